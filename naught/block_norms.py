"""Block norms: in double precision and in fixed blocks. On one kind of device an element's block, and the kernel that sums it,
depend on the element's place alone, so the same gradients have the same norm whenever and by whichever rank it is taken."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from naught.holding import STRETCH_NUMEL

__all__ = ["in_order", "norms_in_one_read", "norms_of", "numbers_of"]

_BLOCK_NUMEL = 1 << 18


def norms_of(values: Tensor) -> list[Tensor]:
    """The norm of each block, from the first on, in pieces. They are squared once there are all of them: an accelerator is asked
    for much else meanwhile."""
    if values.is_cuda and values.numel():
        return [norms_in_one_read(values)]
    # One call looks at the blocks of a stretch; more at a time might be another kernel's sum.
    found = []
    for stretch in torch.split(values, STRETCH_NUMEL) if values.numel() else ():
        whole = stretch.numel() // _BLOCK_NUMEL * _BLOCK_NUMEL
        blocks = [stretch[:whole].view(-1, _BLOCK_NUMEL)] if whole else []
        blocks += [stretch[whole:].view(1, -1)] if whole < stretch.numel() else []
        found += [torch.linalg.vector_norm(block, dim=1, dtype=torch.float64) for block in blocks]
    return found


def norms_in_one_read(values: Tensor) -> Tensor:
    """Of whole stretches: a kernel for lists of tensors reads 16 bits as they are; the other first widens them in memory."""
    return torch.stack(torch._foreach_norm(torch.split(values, STRETCH_NUMEL), dtype=torch.float64))


def numbers_of(found: Tensor) -> list[float]:
    """As the host has them: this waits. What has no contents counts as ones."""
    return [1.0] * found.numel() if found.is_meta else found.tolist()


def in_order(numbers: Iterable[float]) -> float:
    """A sum from the first to the last; the built-in one compensates rounding in some versions of Python."""
    total = 0.0
    for number in numbers:
        total += number
    return total
