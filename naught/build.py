"""Build: from a configuration and a model to units, budgets and an update rule; and what cannot be built yet."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from naught.comm import Group
from naught.config import Config, Effect, check, keys, placement_of, to_document
from naught.describe import describe
from naught.errors import ModelError, UsageError
from naught.flat import Meter
from naught.moving import Budgets
from naught.placement import Kind, Tier
from naught.rules import AdamW, Rule, Sgd
from naught.unit import Segment, Unit
from naught.units import UnitRules, find_units, segments

__all__ = ["budgets_of", "build_units", "refuse_what_is_not_there_yet", "rule_of"]

_LOG = logging.getLogger("naught")

# Keys that this engine heeds, and keys that only tune: the result is the same without them.
_HEEDED = (
    "train_",
    "gradient_accumulation_steps",
    "gradient_clipping",
    "optimizer.",
    "zero_optimization.stage",
    "zero_optimization.overlap_comm",
    "zero_optimization.leaf_module.",
    "zero_optimization.stage3_prefetch_bucket_size",
    "zero_optimization.stage3_max_live_parameters",
    "naught.nvme_path",
)
_TUNING = ("zero_optimization.", "aio.", "checkpoint.", "steps_per_print", "timers.", "dataloader_drop_last")


def refuse_what_is_not_there_yet(config: Config) -> None:
    """A key that would change the result or ask for more than there is yet is refused, not ignored."""
    if config.auto:
        raise UsageError(f'"auto" is left in {", ".join(sorted(config.auto))}', fix="give values; nobody has filled them in")
    placement = placement_of(config)
    if any(placement.of(kind).tier is not Tier.DEVICE for kind in Kind):
        raise UsageError("the engine keeps all states on the device so far", fix="remove offload_optimizer and offload_param")
    if config.fp16.enabled or config.bf16.enabled or config.torch_autocast.enabled:
        raise UsageError("the engine trains in fp32 so far", fix="remove fp16, bf16 and torch_autocast")
    if config.scheduler is not None:
        raise UsageError("the engine takes no scheduler so far", fix="set the learning rate in optimizer.param_groups")
    asked = [note.path for note in check(to_document(config)).notes if note.effect is Effect.HONOURED]
    defaults = {keys.plain_path(entry.path): entry.info.default for entry in keys.entries()}
    unheeded = [path for path in asked if not _is_heeded(path) and _value(config, path) != defaults.get(path)]
    wanted = [path for path in unheeded if not path.startswith(_TUNING)]
    if wanted:
        raise UsageError(
            f"the engine cannot do this yet: {', '.join(wanted)}", fix="remove the keys, or wait for the release that can"
        )
    if unheeded:
        _LOG.warning("no effect yet, but on memory and speed only: %s", ", ".join(unheeded))


def _is_heeded(path: str) -> bool:
    return any(path.startswith(key) if key.endswith(("_", ".")) else path == key for key in _HEEDED)


def _value(config: Config, path: str) -> Any:
    value: Any = config
    for name in path.split("."):
        value = getattr(value, name)
    return value


def rule_of(config: Config) -> tuple[Rule, dict[str, Any]]:
    kinds: dict[str, type[Rule]] = {"AdamW": AdamW, "Adam": AdamW, "SGD": Sgd}
    if config.optimizer is None:
        raise UsageError("the configuration names no optimizer", fix='add "optimizer": {"type": "AdamW", ...}')
    hyper = config.optimizer.params.model_dump()
    if config.optimizer.type not in kinds or not hyper.get("adam_w_mode", True):
        raise UsageError(f"the engine has AdamW and SGD so far, not {config.optimizer.type}")
    return kinds[config.optimizer.type](), hyper


def build_units(model: nn.Module, config: Config, group: Group, meter: Meter) -> dict[str, Unit]:
    """Move the model's parameters into the flats of its units."""
    params = dict(model.named_parameters())
    other = next((name for name, param in params.items() if param.requires_grad and param.dtype != torch.float32), None)
    if other is not None:
        raise UsageError(f'the engine trains fp32 so far, and "{other}" is {params[other].dtype}', fix="call model.float() first")
    placement = placement_of(config)
    leaf = config.zero_optimization.leaf_module
    rules = UnitRules(frozenset(leaf.classes), frozenset(leaf.names), frozenset(leaf.name_suffixes))
    units: dict[str, Unit] = {}
    for spec in find_units(describe(model), rules):
        parts = [
            Segment([params[slot.name] for slot in layout.slots], layout, placement, group, meter)
            for layout in segments(spec, world=group.size).values()
        ]
        units[spec.name] = Unit(spec.name, parts, placement)
    if not any(unit.trained for unit in units.values()):
        raise ModelError("the model has no parameters to train")
    return units


def budgets_of(config: Config, units: Mapping[str, Unit]) -> Budgets:
    """Budgets in elements become bytes, rounded up so that one unit can always be fetched ahead."""
    zero = config.zero_optimization
    sizes = [unit.sizes().weights for unit in units.values()]
    largest = max(sizes)
    ahead = 0 if zero.overlap_comm is False else zero.stage3_prefetch_bucket_size * 4
    live = max(zero.stage3_max_live_parameters * 4, 2 * largest)
    return Budgets(
        ahead_bytes=largest + max(ahead, largest) if ahead else 0,
        live_bytes=live,
        overlap_reduce=zero.overlap_comm is not False,
    )
