"""Update: what becomes of a step once all gradients are reduced. One exchange decides for all ranks, and the host waits for its
device once."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from naught.amiss import about_husks
from naught.applying import Courier, apply, prepare
from naught.comm import Group
from naught.segment import Segment
from naught.states import Updating
from naught.strays import Lookout
from naught.unit import Unit
from naught.verdict import Verdict, by_segment, judge, norms_of_slices, used_here

__all__ = ["Norm", "UpdateLimits", "update", "verdict_on"]


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


def verdict_on(
    units: Sequence[Unit], group: Group, how: Updating, *, tell: Callable[[], Exception | None], lookout: Lookout
) -> Verdict | None:
    """What all ranks know of a step. None: a rank has gradients that are not summed yet. If something is amiss on any rank, that
    is raised on all, and nothing has changed on any. `tell` says what is amiss, while the device computes the norm. What users
    have written to weights is heeded first.

    The ranks exchange their part of the norm, whether something is amiss or has come late, and which parameters they have used:
    one that no rank used stays as it is.
    """
    trained = _trained_in(units)
    with group.noting(again=True):
        for segment in trained:
            segment.heed_writes()
    late = any(unit.owes(last=True) for unit in units)
    norms = norms_of_slices(trained)
    asked = [*about_husks(units), *lookout.asks_about(trained)]
    return judge(group, norms, asked, lambda: tell() or prepare(trained, how), late=late, used=used_here(trained))


def update(
    units: Sequence[Unit], how: Updating, limits: UpdateLimits, verdict: Verdict, *, scale: float, courier: Courier, delayed: bool
) -> Norm:
    """Undo the scale of the loss, clip, and apply the rule to what this rank owns; if the norm is not finite, nothing changes.
    When this returns the courier has new weights under way, and what rests on the host may still be updated there; delayed, its
    weights follow the update before this one."""
    trained, norm = _trained_in(units), Norm(verdict.norm / scale)
    if not norm.finite and limits.skips:
        return norm._replace(culprit=_culprit(trained))
    flags = by_segment(trained, verdict.used)
    apply(units, how, flags, _coefficient(norm.total, limits.clip) / scale, courier, delayed=delayed)
    return norm


def _trained_in(units: Sequence[Unit]) -> list[Segment]:
    return [segment for unit in units for segment in unit.trained]


def _culprit(trained: Sequence[Segment]) -> str | None:
    """A parameter whose gradient, as far as this rank owns it, is not finite."""
    for segment in trained:
        total = None
        with segment.home.group.noting(again=True):
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


def _coefficient(norm: float, clip: float) -> float:
    """As torch.nn.utils.clip_grad_norm_ has it: never above one, and NaN where the norm is. A clip of 0 does not clip."""
    coefficient = clip / (norm + 1e-6) if clip else 1.0
    return 1.0 if coefficient > 1.0 else coefficient
