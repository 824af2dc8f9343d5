"""Update: what becomes of a step once all gradients are reduced. One exchange decides for all ranks, and the host waits for its
device once."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from naught.applying import apply
from naught.block_norms import in_order, norms_of_each, numbers_of
from naught.comm import Group
from naught.errors import UsageError
from naught.gradients import Gradients
from naught.husks import Husks, check_husks, untouched
from naught.segment import Segment
from naught.states import Updating
from naught.strays import Lookout
from naught.unit import Unit

__all__ = ["Norm", "UpdateLimits", "misused", "tampered", "update"]


class Norm(NamedTuple):
    """The norm of all gradients together, and if it is not finite, a parameter whose part on this rank is to blame."""

    total: float
    culprit: str | None = None

    @property
    def finite(self) -> bool:
        return math.isfinite(self.total)


@dataclass(frozen=True)
class UpdateLimits:
    """How an update goes about it. `part_numel` elements are updated at a time, and new weights of `flight_bytes` are under way
    at a time."""

    clip: float
    skips: bool  # a step whose norm is not finite
    part_numel: int
    flight_bytes: int
    delay_after: int | None = None  # steps; then weights on the host's side follow an update one step late. None: never


def update(
    units: Sequence[Unit],
    group: Group,
    how: Updating,
    limits: UpdateLimits,
    *,
    scale: float,
    tell: Callable[[], Exception | None],
    lookout: Lookout,
    delayed: bool = False,
) -> Norm | None:
    """Undo the scale of the loss, clip, and apply the rule to what this rank owns. None: a rank has gradients that are not summed
    yet, so that nothing was done. If the norm is not finite, or something
    is amiss on any rank, nothing changes on any. What rests on the host may still be updated there when this returns; delayed,
    its weights follow the update before this one. `tell` says what is amiss, while the device computes the norm. What users have
    written to weights is heeded first.

    The ranks exchange their part of the norm, whether something is amiss, and which parameters they have used: one that
    no rank used stays as it is.
    """
    trained = [segment for unit in units for segment in unit.trained]
    used = [flag for segment in trained for flag in segment.grads.used]
    with group.noting():
        for segment in trained:
            segment.heed_writes()
    late = any(unit.owes(last=True) for unit in units)
    amiss, square = _look(trained, _questions(units, lookout), tell)
    amiss = amiss or group.noted
    rows = group.exchange(torch.tensor([amiss is not None, late, square, *used], dtype=torch.float64))
    if bool(rows[:, 0].any()):
        group.raise_together(amiss)
    if bool(rows[:, 1].any()):
        return None
    norm = Norm(_root(rows[:, 2].tolist()) / scale)
    if norm.finite or not limits.skips:
        anywhere = iter((rows[:, 3:].amax(0) > 0).tolist())
        flags = {segment: [next(anywhere) for _ in segment.grads.used] for segment in trained}
        coefficient = _coefficient(norm.total, limits.clip) / scale
        apply(units, how, flags, coefficient, limits.flight_bytes, delayed=delayed)
    else:
        norm = norm._replace(culprit=_culprit(trained))
    return norm


def tampered(units: Sequence[Unit]) -> UsageError | None:
    """What users may have done to parameters that makes a step wrong."""
    try:
        check_husks(_husks(units))
    except UsageError as error:
        return error
    return misused(units)


def _husks(units: Sequence[Unit]) -> list[Husks]:
    return [segment.weights.husks for unit in units for segment in unit.segments if not segment.weights.bound]


def misused(units: Sequence[Unit]) -> UsageError | None:
    """The same, as far as no device has to be asked."""
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


class _Question(NamedTuple):
    """Whether weights are as they should be, as the device will know; and what to do if they are not."""

    fine: Tensor
    otherwise: Callable[[], None]


def _questions(units: Sequence[Unit], lookout: Lookout) -> list[_Question]:
    asked = []
    if husks := _husks(units):
        asked.append(_Question(untouched(husks), partial(check_husks, husks)))
    if watched := lookout.watched([segment for unit in units for segment in unit.trained]):
        asked.append(_Question(lookout.none_strayed(watched), partial(lookout.heed, watched)))
    return asked


def _look(
    trained: Sequence[Segment], asked: Sequence[_Question], tell: Callable[[], Exception | None]
) -> tuple[Exception | None, float]:
    """What is amiss, such as a husk that was written to, and the sum of squares of this rank's slices: the same at every stage
    and on every tier. This is where the host waits for its device."""
    found = _norms([segment.grads for segment in trained if segment.counts])
    count = sum(norms.numel() for norms in found)
    found += [question.fine.double().reshape(1) for question in asked]
    squares = torch.cat(found).square_() if found else None
    amiss = tell()
    numbers = [] if squares is None else numbers_of(squares)
    for question, fine in zip(asked, numbers[count:], strict=True):
        try:
            if not fine:
                question.otherwise()
        except UsageError as error:
            amiss = amiss or error
    return amiss, in_order(numbers[:count])


def _norms(trained: Sequence[Gradients]) -> list[Tensor]:
    """Of the blocks of this rank's slices, in their order: those of slices that are on the device are read together."""
    found = [grads.slice_or_norms() for grads in trained]
    read = iter(norms_of_each([each for each in found if isinstance(each, Tensor)]))
    return [norms for each in found for norms in (next(read) if isinstance(each, Tensor) else each)]


def _culprit(trained: Sequence[Segment]) -> str | None:
    """A parameter whose gradient, as far as this rank owns it, is not finite."""
    for segment in trained:
        total = None
        with segment.home.group.noting():
            total = segment.grads.sum()
        segment.grads.let_copy_go()
        if total is None or bool(total.isfinite().all()):
            continue
        start = segment.kept.owned.start
        for slot in segment.layout.slots:
            part = total[max(0, slot.span.start - start) : max(0, slot.span.stop - start)]
            if not bool(part.isfinite().all()):
                return slot.name
    return None


def _root(squares: list[float]) -> float:
    """Ranks added in their order."""
    return math.sqrt(in_order(squares))


def _coefficient(norm: float, clip: float) -> float:
    """As torch.nn.utils.clip_grad_norm_ has it: never above one, and NaN where the norm is. A clip of 0 does not clip."""
    coefficient = clip / (norm + 1e-6) if clip else 1.0
    return 1.0 if coefficient > 1.0 else coefficient
