"""Squares: sums of squares in double precision and in fixed blocks. An element's block, and the kernel that sums it, depend on
the element's place alone, so the same gradients have the same norm wherever and whenever it is taken."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from naught.holding import STRETCH_NUMEL

__all__ = ["in_order", "squares_of"]

_BLOCK_NUMEL = 1 << 18


def squares_of(values: Tensor) -> Tensor:
    """The sum of squares of each block, from the first on. One call sums the blocks of a stretch; more at a time might be
    another kernel's sum."""
    sums = [_of_a_stretch(stretch) for stretch in torch.split(values, STRETCH_NUMEL)] if values.numel() else []
    return torch.cat(sums) if sums else torch.zeros(0, dtype=torch.float64, device=values.device)


def _of_a_stretch(values: Tensor) -> Tensor:
    whole = values.numel() // _BLOCK_NUMEL
    blocks = [values[: whole * _BLOCK_NUMEL].view(whole, _BLOCK_NUMEL)] if whole else []
    rest = values[whole * _BLOCK_NUMEL :]
    blocks += [rest.view(1, -1)] if rest.numel() else []
    norms = [torch.linalg.vector_norm(block, dim=1, dtype=torch.float64) for block in blocks]
    norm = torch.cat(norms) if len(norms) > 1 else norms[0]
    return norm * norm


def in_order(numbers: Iterable[float]) -> float:
    """A sum from the first to the last; the built-in one compensates rounding in some versions of Python."""
    total = 0.0
    for number in numbers:
        total += number
    return total
