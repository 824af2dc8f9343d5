"""Naught: the ZeRO family in plain PyTorch.

Names are imported on first use: asking for a plan must not wait for torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from naught import accelerator, checkpointing, comm, ops, utils, zero
    from naught.accelerator import get_accelerator
    from naught.advice import Advice, advise
    from naught.arguments import add_config_arguments
    from naught.comm import init_distributed
    from naught.config import Config
    from naught.config import load as load_config
    from naught.engine import Engine
    from naught.engine import Engine as DeepSpeedEngine
    from naught.errors import (
        ConfigError,
        ModelError,
        NaughtError,
        PlacementError,
        PlanError,
        RankMismatch,
        ScheduleError,
        UsageError,
    )
    from naught.errors import ConfigError as DeepSpeedConfigError
    from naught.formulas import recipe
    from naught.job import Job
    from naught.machine import Machine, detect
    from naught.model_names import parse_model
    from naught.modules import plan_for
    from naught.optimizer import Optimizer
    from naught.showing import show
    from naught.start import initialize

__version__ = "0.1.0"

# Where each name lives: "module", or "module:name" where it has another name there, or "" for a module itself.
_HOMES = {
    "Advice": "advice",
    "Config": "config",
    "ConfigError": "errors",
    "DeepSpeedConfigError": "errors:ConfigError",
    "DeepSpeedEngine": "engine:Engine",
    "Engine": "engine",
    "Job": "job",
    "Machine": "machine",
    "ModelError": "errors",
    "NaughtError": "errors",
    "Optimizer": "optimizer",
    "PlacementError": "errors",
    "PlanError": "errors",
    "RankMismatch": "errors",
    "ScheduleError": "errors",
    "UsageError": "errors",
    "accelerator": "",
    "add_config_arguments": "arguments",
    "advise": "advice",
    "comm": "",
    "detect": "machine",
    "get_accelerator": "accelerator",
    "init_distributed": "comm",
    "initialize": "start",
    "load_config": "config:load",
    "ops": "",
    "parse_model": "model_names",
    "plan_for": "modules",
    "recipe": "formulas",
    "show": "showing",
    "utils": "",
    "checkpointing": "",
    "zero": "",
}

__all__ = [
    "Advice",
    "Config",
    "ConfigError",
    "DeepSpeedConfigError",
    "DeepSpeedEngine",
    "Engine",
    "Job",
    "Machine",
    "ModelError",
    "NaughtError",
    "Optimizer",
    "PlacementError",
    "PlanError",
    "RankMismatch",
    "ScheduleError",
    "UsageError",
    "__version__",
    "accelerator",
    "add_config_arguments",
    "advise",
    "checkpointing",
    "comm",
    "detect",
    "get_accelerator",
    "init_distributed",
    "initialize",
    "load_config",
    "ops",
    "parse_model",
    "plan_for",
    "recipe",
    "show",
    "utils",
    "zero",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'naught' has no attribute {name!r}")
    module, _, inner = home.partition(":")
    return getattr(import_module(f"naught.{module}"), inner or name) if module else import_module(f"naught.{name}")
