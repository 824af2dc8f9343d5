"""Strays: whole weights that are not what their masters round to, for somebody has written to them. Masters follow what was
written, as if the parameters were their own masters.

Writes are noticed by the versions that autograd counts. Through `.data` nobody counts: a lookout compares all weights in the
first steps, and goes on if it finds something, for who writes so mostly does it in every step.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from naught.moments import Wide
from naught.segment import Segment

__all__ = ["Lookout", "heed_writes"]

_LOG = logging.getLogger("naught")
_FIRST_STEPS = 3
_PIECE_NUMEL = 1 << 22  # that are rounded at a time, beside everything else


def heed_writes(segments: Sequence[Segment]) -> None:
    """Let masters follow what has been written to their weights since the engine last knew these."""
    for segment in segments:
        if segment.known is not None and segment.known.are_old():
            segment.heed_writes()


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

    def none_strayed(self, watched: Sequence[Segment]) -> Tensor:
        """Whether all weights are what their masters round to, as the device will know."""
        return torch.stack([~strays.any() for segment in watched for _, strays in _compare(segment)]).all()

    def heed_all(self, trained: Sequence[Segment]) -> None:
        """Let masters follow what was written to their weights in whatever way. On an accelerator this may wait."""
        heed_writes(trained)
        self.heed(self.watched(trained))

    def heed(self, watched: Sequence[Segment]) -> None:
        """Let masters follow where weights stray; who writes to them is told once."""
        for segment in watched:
            place = next((start + int(strays.nonzero()[0]) for start, strays in _compare(segment) if bool(strays.any())), None)
            if place is None:
                continue
            if not self.found_some:
                _LOG.warning(
                    'parameter "%s" was written to where nobody counts writes, through .data or by a fused kernel: it is kept, '
                    "and weights are compared with their masters in every step from here on, which takes some time. Write to the "
                    "parameter itself, under torch.no_grad(), or inside engine.gathered()",
                    _name_at(segment, place),
                )
            self.found_some = True
            segment.heed_writes()


def _name_at(segment: Segment, place: int) -> str:
    """Of the parameter that an element of this rank's part belongs to, or, between two of them, of the one before it."""
    place += segment.kept.owned.start
    return [slot.name for slot in segment.layout.slots if slot.span.start <= place][-1]


def _is_near(segment: Segment) -> bool:
    mastered = isinstance(segment.kept.master, Wide) or segment.folded is not None
    near = mastered and not segment.remote and segment.known is not None
    return near and segment.kept.owned.numel > 0 and segment.home.device.type != "meta"


def _compare(segment: Segment) -> Iterator[tuple[int, Tensor]]:
    """Piece by piece, where it starts and which of its weights stray. Of rests nobody can tell, but where they would not do."""
    weights = segment.target
    masters = segment.exact if segment.folded is None else None
    for start in range(0, weights.numel(), _PIECE_NUMEL):
        mine = weights[start : start + _PIECE_NUMEL]
        if segment.folded is not None:
            yield start, segment.folded.misfits(mine, start)
        elif masters is not None:
            rounded = torch.empty_like(mine)
            segment.weights.rounds(rounded, masters[start : start + _PIECE_NUMEL])
            yield start, (rounded != mine) & ~(rounded.isnan() & mine.isnan())
