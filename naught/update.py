"""Update: one step of training once all gradients are reduced. One exchange decides for all ranks."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from naught.comm import Group
from naught.errors import UsageError
from naught.husks import check_husks
from naught.rules import Part
from naught.states import Updating
from naught.unit import Segment, Unit

__all__ = ["Norm", "UpdateLimits", "tampered", "update"]

_BLOCK_NUMEL = 1 << 16  # of a sum of squares
_BATCH_BYTES = 4 << 20  # of gradients that one call of the rule takes up: their weights travel beside the next


class Norm(NamedTuple):
    """The norm of all gradients together, and if it is not finite, a parameter whose part on this rank is to blame."""

    total: float
    culprit: str | None = None

    @property
    def finite(self) -> bool:
        return math.isfinite(self.total)


@dataclass(frozen=True)
class UpdateLimits:
    """How an update goes about it. `part_numel` elements are updated at a time, and new weights
    of `flight_bytes` are under way at a time. Lazy ones are gathered where they are used next."""

    clip: float
    skips: bool  # a step whose norm is not finite
    part_numel: int
    flight_bytes: int
    lazy: bool


def update(
    units: Sequence[Unit],
    group: Group,
    how: Updating,
    limits: UpdateLimits,
    *,
    scale: float,
    amiss: UsageError | None,
) -> Norm:
    """Undo the scale of the loss, clip, and apply the rule to what this rank owns. If the norm is not finite, or something
    is amiss on any rank, nothing changes on any.

    The ranks exchange their part of the norm, whether something is amiss, and which parameters they have used: one that
    no rank used stays as it is.
    """
    trained = [segment for unit in units for segment in unit.trained]
    used = [flag for segment in trained for flag in segment.grads.used]
    rows = group.exchange(torch.tensor([amiss is not None, _square_sum(trained, group.rank), *used], dtype=torch.float64))
    if bool(rows[:, 0].any()):
        group.raise_together(amiss)
    norm = Norm(_root(rows[:, 1].tolist()) / scale)
    if norm.finite or not limits.skips:
        anywhere = iter((rows[:, 2:].amax(0) > 0).tolist())
        _apply(units, how, anywhere, limits, coefficient=_coefficient(norm.total, limits.clip) / scale)
    else:
        norm = norm._replace(culprit=_culprit(trained))
    return norm


def tampered(units: Sequence[Unit]) -> UsageError | None:
    """What users may have done to parameters that makes a step wrong."""
    segments = [segment for unit in units for segment in unit.segments]
    try:
        check_husks(segment.weights.husks for segment in segments if not segment.weights.bound)
    except UsageError as error:
        return error
    for segment in segments:
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


def _square_sum(trained: Sequence[Segment], rank: int) -> float:
    """The sum of squares of this rank's slices, in double precision and in fixed blocks: the same at every stage."""
    blocks: list[Tensor] = []
    for segment in trained:
        total = segment.grads.sum()
        if total is not None:
            mine = total[slice(*segment.layout.shard(rank))] if segment.everywhere else total
            blocks += torch.split(mine, _BLOCK_NUMEL) if mine.numel() > _BLOCK_NUMEL else [mine]
    if not blocks:
        return 0.0
    norms = torch.stack(torch._foreach_norm(blocks, 2, dtype=torch.float64))
    return _in_order((norms * norms).tolist())


def _culprit(trained: Sequence[Segment]) -> str | None:
    """A parameter whose gradient, as far as this rank owns it, is not finite."""
    for segment in trained:
        total = segment.grads.sum()
        if total is None or bool(total.isfinite().all()):
            continue
        start = segment.states.owned.start
        for slot in segment.layout.slots:
            part = total[max(0, slot.span.start - start) : max(0, slot.span.stop - start)]
            if not bool(part.isfinite().all()):
                return slot.name
    return None


def _root(squares: list[float]) -> float:
    """Ranks added in their order."""
    total = _in_order(squares)
    return math.sqrt(total) if math.isfinite(total) else math.nan


def _in_order(numbers: list[float]) -> float:
    """A sum from the first to the last; the built-in one compensates rounding in some versions of Python."""
    total = 0.0
    for number in numbers:
        total += number
    return total


def _coefficient(norm: float, clip: float) -> float:
    """As torch.nn.utils.clip_grad_norm_ has it: never above one. A clip of 0 does not clip."""
    return min(1.0, clip / (norm + 1e-6)) if clip else 1.0


def _apply(units: Sequence[Unit], how: Updating, used: Iterator[bool], limits: UpdateLimits, *, coefficient: float) -> None:
    """Update what this rank owns, a batch of units in each call of the rule; new weights travel beside the next batch."""
    courier = _Courier(limits)
    for batch in _batches(units):
        parts: list[Part] = []
        changed: list[Unit] = []
        for unit in batch:
            for segment in unit.trained:
                flags = [next(used) for _ in segment.grads.used]
                if any(flags) and segment.grads.sum() is not None:
                    parts += segment.due(how, flags)
                    if unit not in changed:
                        changed.append(unit)
        parts = [part._replace(grads=part.grads.float()) for part in parts]  # as they are, if they have 32 bits
        if coefficient != 1.0 and parts:
            torch._foreach_mul_([part.grads for part in parts], coefficient)
        for group, hyper in enumerate(how.hypers):
            members = [part for part in parts if part.group == group]
            if members:
                how.rule.update(members, hyper)
        for segment in (segment for unit in changed for segment in unit.trained):
            segment.written()
        # Writing a flat does not bump the version counters by which autograd notices a change behind its back.
        torch.autograd.graph.increment_version(
            [param for unit in changed for segment in unit.trained for param in segment.weights.params]
        )
        courier.send(changed)
    courier.arrive()


def _batches(units: Sequence[Unit]) -> Iterator[list[Unit]]:
    """Units in their order, as many at a time as make a call worth its while."""
    batch: list[Unit] = []
    nbytes = 0
    for unit in units:
        batch.append(unit)
        nbytes += sum(segment.grads.mine.nbytes for segment in unit.trained)
        if nbytes >= _BATCH_BYTES:
            yield batch
            batch, nbytes = [], 0
    yield batch


class _Courier:
    """Brings new weights of whole flats from their owners to everybody, within a limit of bytes under way."""

    def __init__(self, limits: UpdateLimits) -> None:
        self.limits = limits
        self.under_way: deque[tuple[Unit, int]] = deque()
        self.nbytes = 0

    def send(self, units: Sequence[Unit]) -> None:
        for unit in units:
            unit.outdate(hide=self.limits.lazy)
            if unit.present or self.limits.lazy or unit.placement.param.split:
                continue
            while self.under_way and self.nbytes + unit.gathered_bytes > self.limits.flight_bytes:
                self._arrive()
            unit.gather()
            self.under_way.append((unit, unit.gathered_bytes))
            self.nbytes += unit.gathered_bytes

    def arrive(self) -> None:
        while self.under_way:
            self._arrive()

    def _arrive(self) -> None:
        unit, nbytes = self.under_way.popleft()
        unit.ready()
        self.nbytes -= nbytes
