"""Vertical: all micro-batches of a step go through a part of a model before the next part is begun, so that its weights are
gathered once for all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from naught.errors import UsageError

__all__ = ["Vertical"]


class Vertical(nn.Module):
    """A part of a model that takes so many micro-batches one after the other, where the model is a sequence of such parts. All of
    them are given at once, divided along the first dimension, and put together again; gradients are summed over micro-batches
    before they leave the rank. Each micro-batch is computed again in the backward: no more than one of them has activations.

    Every part is one unit: its weights are gathered twice in a step, however many micro-batches there are.
    """

    def __init__(self, part: nn.Module, micro_batches: int) -> None:
        super().__init__()
        if micro_batches < 1:
            raise UsageError(f"micro_batches is {micro_batches}", fix="give 1 or more")
        self.part, self.micro_batches = part, micro_batches

    def forward(self, *inputs: Any) -> Any:
        """Tensors are divided, and all of them alike; what is no tensor goes to every micro-batch as it is."""
        columns = [self._divided(given) if isinstance(given, Tensor) else [given] * self.micro_batches for given in inputs]
        rows = list(zip(*columns, strict=True))
        # The last one first: a backward begins with what came last, and sums begin with the first micro-batch.
        found = [checkpoint(self.part, *row, use_reentrant=False) for row in reversed(rows)]
        return _joined(found[::-1])

    def _divided(self, given: Tensor) -> Sequence[Tensor]:
        if not given.dim() or given.shape[0] % self.micro_batches:
            raise UsageError(
                f"an input of shape {list(given.shape)} is not {self.micro_batches} micro-batches of one size",
                fix="give a batch whose first dimension is a multiple of micro_batches",
            )
        return torch.chunk(given, self.micro_batches)

    def extra_repr(self) -> str:
        return f"{self.micro_batches} micro-batches"


def _joined(found: list[Any]) -> Any:
    if isinstance(found[0], Tensor):
        return torch.cat(found) if found[0].dim() else torch.stack(found)
    if isinstance(found[0], tuple):
        return tuple(_joined(list(column)) for column in zip(*found, strict=True))
    raise UsageError(f"a part gave a {type(found[0]).__name__}", fix="have it give a tensor, or a tuple of tensors")
