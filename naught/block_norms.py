"""Block norms: in double precision and in fixed blocks. On one kind of device an element's block, and the kernel that sums it,
depend on the element's place alone, so the same gradients have the same norm whenever and by whichever rank it is taken."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from naught.rooms import STRETCH_NUMEL

__all__ = ["in_order", "norms_in_one_read", "norms_of", "norms_of_each", "numbers_of"]

_BLOCK_NUMEL = 1 << 18


def norms_of(values: Tensor) -> list[Tensor]:
    """The norm of each block, from the first on, in pieces. They are squared once there are all of them: an accelerator is asked
    for much else meanwhile."""
    return norms_of_each([values])[0]


def norms_of_each(many: Sequence[Tensor]) -> list[list[Tensor]]:
    """The norms of the blocks of several tensors. A GPU is asked once for all that have the same type: a list of several types
    is another kernel's."""
    found = [[] if values.is_cuda else _norms_by_stretches(values) for values in many]
    on_gpu = [index for index, values in enumerate(many) if values.is_cuda and values.numel()]
    for dtype in dict.fromkeys(many[index].dtype for index in on_gpu):
        alike = [index for index in on_gpu if many[index].dtype == dtype]
        for index, norms in zip(alike, norms_in_one_read([many[index] for index in alike]), strict=True):
            found[index] = [norms]
    return found


def _norms_by_stretches(values: Tensor) -> list[Tensor]:
    # One call looks at the blocks of a stretch; more at a time might be another kernel's sum.
    found = []
    for stretch in torch.split(values, STRETCH_NUMEL) if values.numel() else ():
        whole = stretch.numel() // _BLOCK_NUMEL * _BLOCK_NUMEL
        blocks = [stretch[:whole].view(-1, _BLOCK_NUMEL)] if whole else []
        blocks += [stretch[whole:].view(1, -1)] if whole < stretch.numel() else []
        found += [torch.linalg.vector_norm(block, dim=1, dtype=torch.float64) for block in blocks]
    return found


def norms_in_one_read(many: Sequence[Tensor]) -> Sequence[Tensor]:
    """Of whole stretches: a kernel for lists of tensors reads 16 bits as they are; the other first widens them in memory. It sums
    each tensor by itself, whatever else is in the list."""
    stretches = [torch.split(values, STRETCH_NUMEL) for values in many]
    norms = torch.stack(torch._foreach_norm([stretch for each in stretches for stretch in each], dtype=torch.float64))
    return torch.split(norms, [len(each) for each in stretches])


def numbers_of(found: Tensor) -> list[float]:
    """As the host has them: this waits. What has no contents counts as ones."""
    return [1.0] * found.numel() if found.is_meta else found.tolist()


def in_order(numbers: Iterable[float]) -> float:
    """A sum from the first to the last; the built-in one compensates rounding in some versions of Python."""
    total = 0.0
    for number in numbers:
        total += number
    return total
