"""Update: one step of training once all gradients are reduced. One exchange decides for all ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from naught.comm import Group
from naught.rules import Rule
from naught.unit import Segment, Unit

__all__ = ["Norm", "update"]

_BLOCK_NUMEL = 1 << 16


class Norm(NamedTuple):
    """The norm of all gradients together. If it is not finite, nothing was changed on any rank."""

    total: float

    @property
    def finite(self) -> bool:
        return math.isfinite(self.total)


def update(units: Sequence[Unit], group: Group, rule: Rule, *, hyper: dict[str, Any], clip: float) -> Norm:
    """Clip, apply the rule to what this rank owns, and let go of the gradients.

    The ranks exchange their part of the norm, which parameters they have used and which units they have called: a
    parameter that no rank used stays as it is.
    """
    trained = [segment for unit in units for segment in unit.trained]
    used = [flag for segment in trained for flag in segment.used]
    called = [unit.entered for unit in units]
    squares = sum(_square_sum(segment) for segment in trained)
    rows = group.exchange(torch.tensor([squares, *used, *called], dtype=torch.float64))
    norm = _norm(rows[:, 0].tolist())
    if norm.finite:
        used_anywhere = iter((rows[:, 1 : 1 + len(used)].amax(0) > 0).tolist())
        called_everywhere = (rows[:, 1 + len(used) :].amin(0) > 0).tolist()
        coefficient = _coefficient(norm.total, clip)
        for unit in units:
            _update_unit(unit, rule, used_anywhere, hyper=hyper, coefficient=coefficient)
        _refresh(units, called_everywhere)
    for segment in trained:
        segment.forget()
    return norm


def _square_sum(segment: Segment) -> float:
    """The sum of squares of this rank's slice, in double precision and in fixed blocks: the same at every stage."""
    total = segment.grads.sum()
    if total is None:
        return 0.0
    mine = total if segment.grads.placement.optim.split else total[segment.grads.mine]
    blocks = torch.stack([block.double().square_().sum() for block in torch.split(mine, _BLOCK_NUMEL)])
    return _in_order(blocks.tolist())


def _norm(squares: list[float]) -> Norm:
    """Ranks added in their order."""
    total = _in_order(squares)
    return Norm(math.sqrt(total) if math.isfinite(total) else math.nan)


def _in_order(numbers: list[float]) -> float:
    """A sum from the first to the last; the built-in one compensates rounding in some versions of Python."""
    total = 0.0
    for number in numbers:
        total += number
    return total


def _coefficient(norm: float, clip: float) -> float:
    """As torch.nn.utils.clip_grad_norm_ has it: never above one. A clip of 0 does not clip."""
    return min(1.0, clip / (norm + 1e-6)) if clip else 1.0


def _update_unit(unit: Unit, rule: Rule, used: Iterator[bool], *, hyper: dict[str, Any], coefficient: float) -> None:
    changed = False
    for segment in unit.trained:
        flags = [next(used) for _ in segment.used]
        changed |= segment.update(rule, used=flags, hyper=hyper, coefficient=coefficient)
    if changed and unit.placement.optim.split and not unit.placement.param.split:
        unit.present = False  # only the owners' slices are new: the next use gathers them


def _refresh(units: Sequence[Unit], called: Sequence[bool]) -> None:
    """A unit that some rank uses without calling it: nobody says when it is used next, so it is made fresh now."""
    for unit, everywhere in zip(units, called, strict=True):
        if not everywhere and not unit.placement.param.split:
            unit.gather()
            unit.ready()
        unit.entered = False
