"""Sum rooms: memory on the host for sums of gradients, from when they come down until the update has read them."""

from __future__ import annotations

from concurrent.futures import Future, wait

import torch
from torch import Tensor

from naught.shelves import Shelf
from naught.streams import Point

__all__ = ["SumRoom", "SumRooms"]


class SumRoom:
    """Memory for one sum, and an update that may still read what was here before."""

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory
        self.held = False  # by a sum that waits for its update
        self.reader: Future[None] | None = None
        self.arrived: Point | None = None  # of the sum that it reads

    @property
    def is_read(self) -> bool:
        """Whether an update is through with what is here, and all of that has come: one that needs nothing of a sum does not wait
        for it. Of a sum that was dropped nobody knows whether it still comes."""
        over = not self.held and self.reader is not None and self.reader.done()
        return over and self.arrived is not None and self.arrived.reached

    def read_by(self, reader: Future[None], arrived: Point) -> None:
        """The sum may be dropped from here on; what comes next waits for this update."""
        self.held, self.reader, self.arrived = False, reader, arrived

    def wait(self) -> None:
        """Also for an update that fails: who needs its result is told."""
        if self.reader is not None:
            wait([self.reader])
            self.reader = None


class SumRooms:
    """So many rooms of one size, taken in turn: for the sums of one segment, or of all together."""

    def __init__(self, shelf: Shelf, numel: int, dtype: torch.dtype, count: int) -> None:
        self.shelf, self.numel, self.dtype, self.count = shelf, numel, dtype, count
        self.rooms = [self._make() for _ in range(count)]

    @property
    def nbytes(self) -> int:
        return sum(room.memory.nbytes for room in self.rooms)

    def take(self) -> SumRoom:
        """The one that was taken the longest ago, once nobody reads it any more; one more, if a sum waits in each: those of units
        that ranks do not run alike wait for the end of a backward. What is too many goes when it is free."""
        for spare in [room for room in self.rooms if room.is_read][: max(0, len(self.rooms) - self.count)]:
            self.rooms.remove(spare)
            self.shelf.give_back(spare.memory, "gradients")
        room = next((room for room in self.rooms if not room.held), None)
        if room is None:
            room = self._make()
        else:
            self.rooms.remove(room)
        self.rooms.append(room)
        room.wait()
        room.held = True
        return room

    def _make(self) -> SumRoom:
        return SumRoom(self.shelf.take(self.numel, self.dtype, "gradients", travels=True))

    def close(self) -> None:
        """Let go of all of them. Those that several share are let go with the first: none of them has a sum any more."""
        for room in self.rooms:
            room.wait()
            self.shelf.give_back(room.memory, "gradients")
        self.rooms.clear()
