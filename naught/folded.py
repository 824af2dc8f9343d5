"""Folded: masters that are kept as 16-bit weights and rests, and put together where they are needed whole."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from naught.rooms import STRETCH_NUMEL
from naught.rounding import fold, misfits, unfold

__all__ = ["Folded"]


class Folded:
    """The rests of a segment's weights. Who asks for whole masters gets a copy on the host, which counts again once it is told
    to be written; another write, or an update, makes it void."""

    def __init__(self, rests: Tensor) -> None:
        self.rests = rests
        self.copy: Tensor | None = None  # while somebody may have it
        self.lent: Tensor | None = None  # the weights as they were when they were lent

    def keep(self, masters: Tensor, weights: Tensor) -> None:
        """Take masters apart, into weights and rests."""
        for wide, upper, rest in self._stretches(masters, weights):
            fold(wide.to(upper.device), upper, rest)
        self.copy = None

    def whole(self, weights: Tensor) -> Tensor:
        if self.copy is None:
            self.copy = torch.empty(self.rests.shape, dtype=torch.float32)
            for wide, upper, rest in self._stretches(self.copy, weights):
                wide.copy_(unfold(upper, rest))
        return self.copy

    def written(self, weights: Tensor) -> None:
        """The copy that was given away has been written to."""
        if self.copy is not None:
            self.keep(self.copy, weights)

    def mend(self, weights: Tensor) -> None:
        """Somebody may have written to the weights: rests that do not fit them go."""
        self.rests.masked_fill_(misfits(weights, self.rests), 0)
        self.copy = None

    def _stretches(self, wide: Tensor, weights: Tensor) -> Iterator[tuple[Tensor, ...]]:
        if wide.numel():
            yield from zip(*(torch.split(tensor, STRETCH_NUMEL) for tensor in (wide, weights, self.rests)), strict=True)
