"""Husks: what parameters are while their weights are away. A read gives NaN, a write leaves a trace."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from naught.errors import UsageError
from naught.layout import Layout

__all__ = ["Husks", "check_husks", "untouched"]


class Husks:
    """NaN of each slot's true shape, type and device, all of a slot's elements in one place: its mark."""

    def __init__(self, layout: Layout, dtype: torch.dtype, device: torch.device) -> None:
        self.layout = layout
        blank = float("nan") if dtype.is_floating_point else 0.0  # whole numbers never leave
        self.marks = torch.full((len(layout.slots),), blank, dtype=dtype, device=device)
        self.tensors = [mark.expand(slot.shape) for mark, slot in zip(self.marks, layout.slots, strict=True)]
        self.addresses = [tensor.data_ptr() for tensor in self.tensors]


def untouched(everything: Sequence[Husks]) -> Tensor:
    """Whether none was written to, as the device will know. One question for all of them."""
    return torch.cat([husks.marks for husks in everything]).isnan().all()


def check_husks(everything: Iterable[Husks]) -> None:
    """Raise if a husk was written to: the write is lost. On an accelerator this waits."""
    everything = list(everything)
    if not everything or everything[0].marks.is_meta or bool(untouched(everything)):
        return
    for husks in everything:
        written = ~husks.marks.isnan()
        if bool(written.any()):
            name = husks.layout.slots[int(written.nonzero()[0])].name
            husks.marks.fill_(float("nan"))
            raise UsageError(
                f'parameter "{name}" was written to while it was released',
                fix="write inside engine.gathered(), or before the engine is made",
            )
