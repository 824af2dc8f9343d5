"""Verdict: what all ranks know of a step together, by one exchange: the norm of its gradients, and which parameters were used.
This is where the host waits for its device."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from naught.amiss import Question
from naught.block_norms import in_order, norms_of_each, numbers_of
from naught.comm import Group
from naught.errors import UsageError
from naught.segment import Segment

__all__ = ["Verdict", "by_segment", "judge", "norms_of_slices", "used_here"]


class Verdict(NamedTuple):
    norm: float
    used: list[bool]  # by any rank


def judge(
    group: Group,
    norms: Sequence[Tensor],
    asked: Sequence[Question],
    tell: Callable[[], Exception | None],
    *,
    late: bool,
    used: Sequence[bool] = (),
) -> Verdict | None:
    """The norm of all gradients together, of the norms of this rank's blocks. None: some rank has gradients that came too `late`
    to be in it. What is amiss on any rank, as the device or `tell` says while the device computes, is raised on all."""
    amiss, square = _look(norms, asked, tell)
    noted = group.take_note()
    amiss = amiss or noted
    rows = group.exchange(torch.tensor([amiss is not None, late, square, *used], dtype=torch.float64))
    if bool(rows[:, 0].any()):
        group.raise_noted(amiss)
    if bool(rows[:, 1].any()):
        return None
    return Verdict(_root(rows[:, 2].tolist()), (rows[:, 3:].amax(0) > 0).tolist())


def _look(
    norms: Sequence[Tensor], asked: Sequence[Question], tell: Callable[[], Exception | None]
) -> tuple[Exception | None, float]:
    """What is amiss, such as a husk that was written to, and the sum of squares of this rank's slices."""
    count = sum(each.numel() for each in norms)
    found = [*norms, *(question.fine.double().reshape(1) for question in asked)]
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


def norms_of_slices(trained: Iterable[Segment]) -> list[Tensor]:
    """Of the blocks of this rank's slices, in their order, the same at every stage and on every tier: those of slices that are on
    the device are read together."""
    found = [segment.grads.slice_or_norms() for segment in trained if segment.counts]
    read = iter(norms_of_each([each for each in found if isinstance(each, Tensor)]))
    return [norms for each in found for norms in (next(read) if isinstance(each, Tensor) else each)]


def used_here(trained: Iterable[Segment]) -> list[bool]:
    """Which parameters this rank has used."""
    return [flag for segment in trained for flag in segment.grads.used]


def by_segment(trained: Iterable[Segment], used: Iterable[bool]) -> dict[Segment, list[bool]]:
    """The same flags, or those of all ranks together, for each segment."""
    flags = iter(used)
    return {segment: [next(flags) for _ in segment.grads.used] for segment in trained}


def _root(squares: list[float]) -> float:
    """Ranks added in their order."""
    return math.sqrt(in_order(squares))
