"""Vertical: all micro-batches of a step go through a part of a model before the next part is begun, so that its weights are
gathered once for all of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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
        if not isinstance(part, nn.Module):
            raise UsageError(f"the part is a {type(part).__name__}, not a torch.nn.Module", fix="give a module")
        if any(isinstance(inner, Vertical) for inner in part.modules()):
            raise UsageError(
                "the part has a Vertical in it, which would divide each micro-batch again", fix="wrap one of the two"
            )
        if not isinstance(micro_batches, int) or micro_batches < 1:
            raise UsageError(f"micro_batches is {micro_batches!r}", fix="give a whole number, 1 or more")
        self.part, self.micro_batches = part, micro_batches

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Tensors are divided, and all of them alike; what is no tensor goes to every micro-batch as it is. Where no backward
        will follow nothing is divided."""
        if not torch.is_grad_enabled():
            return self.part(*args, **kwargs)
        self._check([given for given in (*args, *kwargs.values()) if isinstance(given, Tensor)])
        found = []
        # The last one first: a backward begins with what came last, and sums begin with the first micro-batch.
        for at in reversed(range(self.micro_batches)):
            named = dict(zip(kwargs, self._of(kwargs.values(), at), strict=True))
            found.append(checkpoint(self.part, *self._of(args, at), use_reentrant=False, **named))
        return _joined(found[::-1])

    def _of(self, given: Iterable[Any], at: int) -> list[Any]:
        """What one micro-batch has of it."""
        return [torch.chunk(value, self.micro_batches)[at] if isinstance(value, Tensor) else value for value in given]

    def _check(self, tensors: Sequence[Tensor]) -> None:
        sizes = {tensor.shape[0] if tensor.dim() else 0 for tensor in tensors}
        if len(sizes) != 1 or min(sizes) == 0 or min(sizes) % self.micro_batches:
            shapes = ", ".join(str(list(tensor.shape)) for tensor in tensors) or "no tensor"
            raise UsageError(
                f"inputs of {shapes} are not {self.micro_batches} micro-batches of one size",
                fix="give tensors whose first dimension is the batch's, a multiple of micro_batches; "
                "what is the same for all of them the part itself must have",
            )

    def extra_repr(self) -> str:
        return f"{self.micro_batches} micro-batches"


def _joined(found: list[Any]) -> Any:
    if isinstance(found[0], Tensor):
        return torch.cat(found) if found[0].dim() else torch.stack(found)
    if isinstance(found[0], tuple):
        return tuple(_joined(list(column)) for column in zip(*found, strict=True))
    raise UsageError(f"a part gave a {type(found[0]).__name__}", fix="have it give a tensor, or a tuple of tensors")
