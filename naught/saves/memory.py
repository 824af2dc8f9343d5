"""Memory: what an engine remembers of training beside tensors, as plain data: counters, the scale of the loss, rates."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Annotated, Any, Protocol, runtime_checkable

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor

import naught
from naught.answers import Answers
from naught.errors import CheckpointDamaged, CheckpointError
from naught.loss_scale import AdaptiveScale
from naught.saves.plain import decode, encode

__all__ = ["Data", "Memory", "Scale", "memory_of", "recall", "recall_rates", "refuse_other_rates"]

_LOG = logging.getLogger("naught")
_Count = Annotated[int, Field(ge=0)]


class Scale(BaseModel):
    """Of the loss, where it adapts."""

    model_config = ConfigDict(strict=True, frozen=True)
    value: float
    steps: _Count
    last_overflow: int
    forgiveness: int


class Data(BaseModel):
    """Where the loader of the training data is."""

    model_config = ConfigDict(strict=True, frozen=True)
    epoch: _Count
    samples: _Count


class Memory(BaseModel):
    """A record of a checkpoint. `schedule` is the name of the class that was there; None: there was none."""

    model_config = ConfigDict(strict=True, frozen=True)
    version: str
    taken: _Count
    skipped: _Count
    micro_steps: _Count
    samples: _Count
    scale: Scale | None
    groups: list[dict[str, Any]]
    schedule: str | None
    rates: dict[str, Any]
    data: Data | None
    client_state: Any
    parts: _Count | None = None  # over which states were split; None: over all ranks

    @classmethod
    def of(cls, document: Mapping[str, Any], tag: str) -> Memory:
        """What a manifest says, or an error before anything has changed."""
        try:
            return cls.model_validate({**document, "client_state": decode(document.get("client_state"))})
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(str(part) for part in first["loc"])
            raise CheckpointDamaged(
                f"the manifest of {tag} does not say where training is: {place}: {first['msg']}", fix="load another checkpoint"
            ) from error


@runtime_checkable
class _Resumable(Protocol):
    """A schedule that can tell where it is. A user's own need not."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


def memory_of(engine: Answers, client_state: Mapping[str, Any]) -> dict[str, Any]:
    """As JSON can hold it."""
    stepping, accumulation, loader = engine.stepping, engine.accumulation, engine.training_dataloader
    scale, rates = stepping.scale, stepping.rates
    groups = engine.optimizer.param_groups if engine.optimizer is not None else []
    return {
        "version": naught.__version__,
        "taken": stepping.taken,
        "skipped": stepping.skipped,
        "micro_steps": accumulation.micro_steps,
        "samples": accumulation.samples,
        "scale": {name: getattr(scale, name) for name in Scale.model_fields} if isinstance(scale, AdaptiveScale) else None,
        "groups": [_what_can_be(group, "a parameter group", without={"params"}) for group in groups],
        "schedule": None if rates is None else type(rates).__name__,
        "rates": _what_can_be(rates.state_dict(), "the schedule") if isinstance(rates, _Resumable) else {},
        "data": None if loader is None else loader.state_dict(),
        "client_state": encode(dict(client_state), "client_state"),
        "parts": engine.dp_world_size,
    }


def _what_can_be(values: Mapping[str, Any], place: str, *, without: frozenset[str] | set[str] = frozenset()) -> dict[str, Any]:
    """Functions and objects stay with the script that made them; whoever misses them is told."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        if key in without:
            continue
        try:
            found[key] = encode(value, f"{place}: {key}")
        except CheckpointError as error:
            _LOG.warning("not saved, and not resumed: %s", error.what)
    return found


def refuse_other_rates(engine: Answers, memory: Memory) -> None:
    """Before anything changes: groups and a schedule that are not those that were saved."""
    groups = engine.optimizer.param_groups if engine.optimizer is not None else []
    fix = "make them as they were, or load with load_lr_scheduler_states=False"
    if memory.groups and len(groups) != len(memory.groups):
        raise CheckpointError(
            f"the checkpoint has {len(memory.groups)} parameter groups, and the optimizer {len(groups)}", fix=fix
        )
    rates = engine.stepping.rates
    ours = None if rates is None else type(rates).__name__
    if None not in (ours, memory.schedule) and ours != memory.schedule:
        raise CheckpointError(f"the checkpoint's schedule is a {memory.schedule}, and the engine's a {ours}", fix=fix)


def recall(engine: Answers, memory: Memory) -> None:
    """Go on from where training was, but for the rates."""
    stepping, accumulation = engine.stepping, engine.accumulation
    stepping.taken, stepping.skipped = memory.taken, memory.skipped
    accumulation.micro_steps, accumulation.samples = memory.micro_steps, memory.samples
    accumulation.start_over()
    if memory.scale is not None and isinstance(stepping.scale, AdaptiveScale):
        for name in Scale.model_fields:
            setattr(stepping.scale, name, getattr(memory.scale, name))
    if engine.training_dataloader is not None and memory.data is not None:
        engine.training_dataloader.load_state_dict(memory.data.model_dump())


def recall_rates(engine: Answers, memory: Memory) -> None:
    """Give the parameter groups and the schedule what they had."""
    groups = engine.optimizer.param_groups if engine.optimizer is not None else []
    for group, saved in zip(groups, memory.groups, strict=False):  # an engine without an optimizer saved none
        for key in group.keys() & saved.keys():
            _put(group, key, decode(saved[key]))
    rates = engine.stepping.rates
    if isinstance(rates, _Resumable) and memory.rates:
        rates.load_state_dict({key: decode(value) for key, value in memory.rates.items()})


def _put(group: dict[str, Any], key: str, value: Any) -> None:
    if isinstance(group[key], Tensor):
        group[key].fill_(value)
    else:
        group[key] = tuple(value) if isinstance(group[key], tuple) else value
