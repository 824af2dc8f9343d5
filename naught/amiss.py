"""Amiss: what users may have done to parameters that makes a step wrong."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from torch import Tensor

from naught.errors import UsageError
from naught.husks import Husks, check_husks, untouched
from naught.unit import Unit

__all__ = ["Question", "about_husks", "misused", "tampered"]


class Question(NamedTuple):
    """Whether weights are as they should be, as the device will know; and what to do if they are not."""

    fine: Tensor
    otherwise: Callable[[], None]


def about_husks(units: Sequence[Unit]) -> list[Question]:
    """Whether any was written to. There may be none to ask about."""
    husks = _husks(units)
    return [Question(untouched(husks), partial(check_husks, husks))] if husks else []


def tampered(units: Sequence[Unit]) -> UsageError | None:
    """The first misuse of parameters or of what stands for those that are released; on an accelerator this waits."""
    try:
        check_husks(_husks(units))
    except UsageError as error:
        return error
    return misused(units)


def _husks(units: Sequence[Unit]) -> list[Husks]:
    return [segment.weights.husks for unit in units for segment in unit.segments if not segment.weights.bound]


def misused(units: Sequence[Unit]) -> UsageError | None:
    """The first misuse of parameters that can be seen without waiting for the device."""
    for segment in (segment for unit in units for segment in unit.segments):
        amiss = segment.weights.guard.tell()
        if amiss is not None:
            return amiss
        for slot, param, frozen in zip(segment.layout.slots, segment.weights.params, segment.frozen, strict=True):
            if frozen and param.requires_grad:
                return UsageError(
                    f'parameter "{slot.name}" was frozen when the engine was made and now requires a gradient',
                    fix="initialize with all that will ever be trained requiring gradients, and freeze it then",
                )
    return None
