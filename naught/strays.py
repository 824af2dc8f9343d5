"""Strays: weights that are not what their masters round to, for somebody wrote to them where nobody counts writes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from naught.guard import UNKNOWN_TO_MASTERS
from naught.moments import Wide
from naught.segment import Segment

__all__ = ["check_strays", "forgive", "none_strayed", "wakeful"]

_PIECE_NUMEL = 1 << 22  # that are rounded at a time, beside everything else


def wakeful(trained: Sequence[Segment]) -> list[Segment]:
    """Those whose weights can be looked at in passing: with their masters beside them."""
    return [segment for segment in trained if _comparable(segment) and not segment.remote]


def _comparable(segment: Segment) -> bool:
    """Weights that are whole between steps, and follow masters that are in memory."""
    followed = isinstance(segment.kept.master, Wide) and not segment.behind
    return followed and segment.weights.bound and not segment.weights.split


def none_strayed(segments: Sequence[Segment]) -> Tensor:
    """Whether all weights are what their masters round to, as the device will know."""
    return torch.stack([~strays.any() for segment in segments for _, strays in _compare(segment)]).all()


def check_strays(segments: Sequence[Segment]) -> None:
    """Raise if a weight is not. On an accelerator this waits."""
    for segment in segments:
        for start, strays in _compare(segment):
            if not bool(strays.any()):
                continue
            place = segment.kept.owned.start + start + int(strays.nonzero()[0])
            name = next((slot.name for slot in segment.layout.slots if slot.span.start <= place < slot.span.stop), "padding")
            raise UNKNOWN_TO_MASTERS.error(name)


def forgive(segment: Segment) -> None:
    """Whoever has written to weights and put back what was there, as for an evaluation with others, has changed nothing."""
    guard = segment.weights.guard
    if guard.written() and _comparable(segment) and not any(bool(strays.any()) for _, strays in _compare(segment)):
        guard.renew()


def _compare(segment: Segment) -> Iterator[tuple[int, Tensor]]:
    """Piece by piece, where it starts and which of its weights stray: bit for bit, for NaN is not NaN."""
    weights, masters = segment.target, segment.exact
    bits = torch.int16 if weights.element_size() == 2 else torch.int32
    for start in range(0, weights.numel(), _PIECE_NUMEL):
        mine = weights[start : start + _PIECE_NUMEL].to(masters.device)
        rounded = torch.empty_like(mine)
        segment.weights.rounds(rounded, masters[start : start + _PIECE_NUMEL])
        yield start, rounded.view(bits) != mine.view(bits)
