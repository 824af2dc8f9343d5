"""Naught: the ZeRO family in plain PyTorch.

Names are imported on first use: asking for a plan must not wait for torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from naught.advice import Advice, advise
    from naught.config import Config
    from naught.config import load as load_config
    from naught.engine import Engine, initialize
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
    from naught.formulas import recipe
    from naught.job import Job
    from naught.machine import Machine, detect
    from naught.model_names import parse_model
    from naught.modules import plan_for
    from naught.showing import show

__version__ = "0.1.0"

__all__ = [
    "Advice",
    "Config",
    "ConfigError",
    "Engine",
    "Job",
    "Machine",
    "ModelError",
    "NaughtError",
    "PlacementError",
    "PlanError",
    "RankMismatch",
    "ScheduleError",
    "UsageError",
    "__version__",
    "advise",
    "detect",
    "initialize",
    "load_config",
    "parse_model",
    "plan_for",
    "recipe",
    "show",
]

_HOMES = {
    "Advice": "advice",
    "Config": "config",
    "ConfigError": "errors",
    "Engine": "engine",
    "Job": "job",
    "Machine": "machine",
    "ModelError": "errors",
    "NaughtError": "errors",
    "PlacementError": "errors",
    "PlanError": "errors",
    "RankMismatch": "errors",
    "ScheduleError": "errors",
    "UsageError": "errors",
    "advise": "advice",
    "detect": "machine",
    "initialize": "engine",
    "load_config": "config",
    "parse_model": "model_names",
    "plan_for": "modules",
    "recipe": "formulas",
    "show": "showing",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'naught' has no attribute {name!r}")
    return getattr(import_module(f"naught.{home}"), "load" if name == "load_config" else name)
