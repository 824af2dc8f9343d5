"""Flat: one 1-D buffer that is allocated and freed in place, so that views of it come back to life when it is refilled."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch

from naught.devices import Pool
from naught.layout import Layout

__all__ = ["Flat", "Meter"]


@dataclass
class Meter:
    """Bytes of live buffers by category, and the most that there have been; and bytes that went between the tiers, by where they
    went. Whenever a buffer comes it looks what the process holds in all, where somebody can tell it: that is when there is the
    most beside it. Any thread may tell it something."""

    live: Counter[str] = field(default_factory=Counter)
    peak: Counter[str] = field(default_factory=Counter)
    allocated: Callable[[], int | None] = lambda: None
    most: int = 0
    moved: Counter[str] = field(default_factory=Counter)
    told: deque[tuple[str, int]] = field(default_factory=deque)  # changes that are not counted yet
    counting: threading.Lock = field(default_factory=threading.Lock)
    moving: threading.Lock = field(default_factory=threading.Lock)

    def change(self, category: str, nbytes: int) -> None:
        self.told.append((category, nbytes))
        # Else whoever has the lock counts it, maybe this very thread: a collector lets go in the middle of anything.
        while self.told and self.counting.acquire(blocking=False):
            try:
                self._count()
            finally:
                self.counting.release()
        if nbytes > 0:
            self.look()

    def _count(self) -> None:
        while self.told:
            category, nbytes = self.told.popleft()
            live = self.live[category] = self.live[category] + nbytes
            if live > self.peak[category]:
                self.peak[category] = live

    def move(self, where: str, nbytes: int) -> None:
        with self.moving:
            self.moved[where] += nbytes

    def look(self) -> int | None:
        """What the process holds now; None where nobody counts it."""
        now = self.allocated()
        self.most = max(self.most, now or 0)
        return now


class Flat:
    """A buffer with the slots and slices of a layout. While freed, its tensors keep their shapes and must not be read."""

    def __init__(
        self, layout: Layout, dtype: torch.dtype, device: torch.device, *, category: str, meter: Meter, pool: Pool | None
    ) -> None:
        self.tensor = torch.empty(layout.numel, dtype=dtype, device=device)
        self.slots = [self.tensor[slot.span.start : slot.span.stop].view(slot.shape) for slot in layout.slots]
        self.slices = [self.tensor[slice(*layout.shard(rank))] for rank in range(layout.world)]
        self.gaps = [self.tensor[gap.start : gap.stop] for gap in layout.gaps()]
        self.nbytes = self.tensor.nbytes
        self.category, self.meter, self.pool = category, meter, pool
        self.allocated = False
        self.storage = self.tensor.untyped_storage()
        self.storage.resize_(0)

    def alloc(self) -> None:
        if not self.allocated:
            with nullcontext() if self.pool is None else self.pool.open():
                self.storage.resize_(self.nbytes)
            self.allocated = True
            self.meter.change(self.category, self.nbytes)

    def free(self) -> None:
        """Give the memory back. What numpy has once seen torch never frees: it stays."""
        if self.allocated and self.storage.resizable():
            self.storage.resize_(0)
            self.allocated = False
            self.meter.change(self.category, -self.nbytes)

    def clear_gaps(self) -> None:
        """Padding is zero in every flat."""
        for gap in self.gaps:
            gap.zero_()
