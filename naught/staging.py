"""Staging: memory of a constant size on a device, through which goes what goes between it and its host."""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor

from naught.holding import SLOT_NUMEL, landing_slots, staging_slots
from naught.streams import here

__all__ = ["Slot", "Staging"]


class Slot:
    """A piece of it, and when what it held was last read."""

    def __init__(self, numel: int, device: torch.device) -> None:
        self.room = torch.empty(numel, dtype=torch.float32, device=device)
        self.free = here(device)

    def of(self, numel: int, dtype: torch.dtype) -> Tensor:
        return self.room.view(dtype)[:numel]


class Staging:
    """Slots for what goes down and landings for what comes up, so many together at most; what travels has no more elements than
    `largest_numel`."""

    def __init__(self, device: torch.device, largest_numel: int, most_slots: int) -> None:
        numel = min(SLOT_NUMEL, largest_numel)  # of 32 bits; of 16 as many again
        slots = staging_slots(largest_numel, most_slots)
        landings = landing_slots(slots, largest_numel)
        self.slots = deque(Slot(numel, device) for _ in range(slots - landings))
        self.landings = deque(Slot(numel, device) for _ in range(landings))

    @property
    def nbytes(self) -> int:
        return sum(slot.room.nbytes for slot in (*self.slots, *self.landings))

    def next_slot(self) -> Slot:
        return _next(self.slots)

    def next_landing(self) -> Slot:
        return _next(self.landings)

    def clear(self) -> None:
        self.slots.clear()
        self.landings.clear()


def _next(slots: deque[Slot]) -> Slot:
    """The one that was used longest ago."""
    slots.rotate(-1)
    return slots[-1]
