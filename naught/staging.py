"""Staging: memory of a constant size on a device, through which goes what goes between it and its host."""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor

from naught.rooms import BERTH_NUMEL, landings_of, staging_berths
from naught.streams import here

__all__ = ["Berth", "Staging"]


class Berth:
    """A piece of staging, and when what it held was last read."""

    def __init__(self, numel: int, device: torch.device) -> None:
        self.room = torch.empty(numel, dtype=torch.float32, device=device)
        self.free = here(device)

    def of(self, numel: int, dtype: torch.dtype) -> Tensor:
        return self.room.view(dtype)[:numel]


class Staging:
    """Berths for what goes down and landings for what comes up, so many together at most; none of what travels has more elements
    than `largest_numel`. What has more than a berth travels in pieces."""

    def __init__(self, device: torch.device, largest_numel: int, most: int, berth_numel: int = BERTH_NUMEL) -> None:
        self.device, self.piece_numel = device, berth_numel  # of 32 bits; of 16 as many again
        count = staging_berths(largest_numel, most, berth_numel)
        landings = landings_of(count, largest_numel, berth_numel)
        numel = min(berth_numel, largest_numel)
        self.berths = deque(Berth(numel, device) for _ in range(count - landings))
        self.landings = deque(Berth(numel, device) for _ in range(landings))

    @property
    def nbytes(self) -> int:
        return sum(berth.room.nbytes for berth in (*self.berths, *self.landings))

    def next_berth(self) -> Berth:
        return _next(self.berths)

    def next_landing(self) -> Berth:
        return _next(self.landings)

    def clear(self) -> None:
        self.berths.clear()
        self.landings.clear()


def _next(berths: deque[Berth]) -> Berth:
    """The one that was used longest ago."""
    berths.rotate(-1)
    return berths[-1]
