"""Strays: whole weights that are not what their masters round to, for somebody has written to them. Masters follow what was
written, as if the parameters were their own masters.

Writes are noticed by the versions that autograd counts. Through `.data` nobody counts: a lookout compares all weights in the
first steps, and goes on if it finds something, for who writes so mostly does it in every step.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from naught.amiss import Question
from naught.moments import Wide
from naught.rooms import STRETCH_NUMEL
from naught.rounding import Rounds, misfits
from naught.segment import Segment

__all__ = ["Lookout"]

_LOG = logging.getLogger("naught")
_FIRST_STEPS = 3


class Lookout:
    """Looks for weights that were written to where nobody counts writes."""

    def __init__(self) -> None:
        self.steps_left = _FIRST_STEPS
        self.found_some = False

    def watched(self, trained: Sequence[Segment]) -> list[Segment]:
        """What to look at now: on the device, with masters beside them."""
        return [segment for segment in trained if _is_near(segment)] if self.steps_left or self.found_some else []

    def has_stepped(self) -> None:
        self.steps_left = max(0, self.steps_left - 1)

    def asks_about(self, trained: Sequence[Segment]) -> list[Question]:
        """Whether all weights are what their masters round to. There may be none to ask about."""
        watched = self.watched(trained)
        if not watched:
            return []
        fine = torch.stack([~strays.any() for segment in watched for strays in _strays(segment)]).all()
        return [Question(fine, partial(self.heed, watched))]

    def heed_all(self, trained: Sequence[Segment]) -> None:
        """Let masters follow what was written to their weights in whatever way. On an accelerator this may wait."""
        for segment in trained:
            segment.heed_writes()
        self.heed(self.watched(trained))

    def heed(self, watched: Sequence[Segment]) -> None:
        """Let masters follow where weights stray; who writes to them is told once."""
        for segment in watched:
            if self.found_some:  # it finds out where by itself, and keeps nobody waiting for the answer
                segment.follow_weights()
                continue
            name = _first_stray(segment)
            if name is None:
                continue
            _LOG.warning(
                'parameter "%s" was written to where nobody counts writes, through .data or by a fused kernel: it is kept, '
                "and weights are compared with their masters in every step from here on, which takes some time. Write to the "
                "parameter itself, under torch.no_grad(), or inside engine.gathered()",
                name,
            )
            self.found_some = True
            segment.follow_weights()


def _first_stray(segment: Segment) -> str | None:
    """The parameter of the first weight that strays; None: none does."""
    for at, strays in enumerate(_strays(segment)):
        if bool(strays.any()):
            place = segment.kept.owned.start + at * STRETCH_NUMEL + int(strays.nonzero()[0])
            return [slot.name for slot in segment.layout.slots if slot.span.start <= place][-1]
    return None


def _is_near(segment: Segment) -> bool:
    mastered = isinstance(segment.kept.master, Wide) or segment.folded is not None
    near = mastered and not segment.remote and segment.known is not None
    return near and segment.kept.owned.numel > 0 and segment.home.device.type != "meta"


def _strays(segment: Segment) -> Iterator[Tensor]:
    """Stretch by stretch, which of its weights stray. Beside rests nobody can tell, but where these do not fit."""
    folded, rounds = segment.folded, segment.weights.rounds
    beside = segment.exact if folded is None else folded.rests
    for weights, near in zip(*(torch.split(each, STRETCH_NUMEL) for each in (segment.target, beside)), strict=True):
        yield misfits(weights, near) if folded is not None else _differ(weights, near, rounds)


def _differ(weights: Tensor, masters: Tensor, rounds: Rounds) -> Tensor:
    rounded = torch.empty_like(weights)
    rounds(rounded, masters)
    return (rounded != weights) & ~(rounded.isnan() & weights.isnan())
