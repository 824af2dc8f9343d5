"""Memory: what an engine remembers of training beside tensors, as plain data: counters, the scale of the loss, rates."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import naught
from naught.answers import Answers
from naught.errors import CheckpointError
from naught.loss_scale import AdaptiveScale

__all__ = ["memory_of", "recall", "recall_rates"]

_SCALE = ("value", "steps", "last_overflow", "forgiveness")


@runtime_checkable
class _Resumable(Protocol):
    """A schedule that can tell where it is. A user's own need not."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


def memory_of(engine: Answers) -> dict[str, Any]:
    stepping, accumulation = engine.stepping, engine.accumulation
    scale = stepping.scale
    loader = engine.training_dataloader
    return {
        "version": naught.__version__,
        "taken": stepping.taken,
        "skipped": stepping.skipped,
        "micro_steps": accumulation.micro_steps,
        "samples": accumulation.samples,
        "scale": {name: getattr(scale, name) for name in _SCALE} if isinstance(scale, AdaptiveScale) else None,
        "groups": [_plain(group) for group in engine.optimizer.param_groups] if engine.optimizer is not None else [],
        "rates": _plain(_state_of(stepping.rates)),
        "data": None if loader is None else loader.state_dict(),
    }


def _state_of(rates: Any) -> Mapping[str, Any]:
    return rates.state_dict() if isinstance(rates, _Resumable) else {}


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """What can be written as JSON; parameters, functions and tensors cannot."""
    return {key: value for key, value in values.items() if _is_plain(value)}


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    if isinstance(value, Mapping):
        return all(isinstance(key, str) and _is_plain(member) for key, member in value.items())
    return value is None or isinstance(value, bool | int | float | str)


def recall(engine: Answers, memory: Mapping[str, Any]) -> None:
    """Go on from where training was, but for the rates."""
    stepping, accumulation = engine.stepping, engine.accumulation
    stepping.taken, stepping.skipped = memory["taken"], memory["skipped"]
    accumulation.micro_steps, accumulation.samples = memory["micro_steps"], memory["samples"]
    accumulation.start_over()
    if memory["scale"] is not None and isinstance(stepping.scale, AdaptiveScale):
        for name in _SCALE:
            setattr(stepping.scale, name, memory["scale"][name])
    if engine.training_dataloader is not None and memory["data"] is not None:
        engine.training_dataloader.load_state_dict(memory["data"])


def recall_rates(engine: Answers, memory: Mapping[str, Any]) -> None:
    """Give the parameter groups and the schedule what they had."""
    groups = engine.optimizer.param_groups if engine.optimizer is not None else []
    if len(groups) != len(memory["groups"]):
        raise CheckpointError(
            f"the checkpoint has {len(memory['groups'])} parameter groups, and the optimizer {len(groups)}",
            fix="make the optimizer as it was, or load with load_lr_scheduler_states=False",
        )
    for group, saved in zip(groups, memory["groups"], strict=True):
        group.update({key: tuple(value) if isinstance(group.get(key), tuple) else value for key, value in saved.items()})
    rates = engine.stepping.rates
    if isinstance(rates, _Resumable) and memory["rates"]:
        rates.load_state_dict(dict(memory["rates"]))
