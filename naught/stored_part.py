"""Stored part: elements on disk that are read and written like a tensor's, a tile at a time and never all at once."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from naught.errors import StorageError
from naught.spill import Room, Stored

__all__ = ["StoredPart"]


class StoredPart:
    """Neighbouring elements of what rests on disk. What a tensor has of the same name means the same."""

    device = torch.device("cpu")

    def __init__(self, stored: Stored, start: int = 0, stop: int | None = None, *, mends: bool = False) -> None:
        self.stored, self.start, self.stop = stored, start, stored.numel if stop is None else stop
        self.mends = mends  # all of it will be written: what is damaged is not worth an error
        self.dtype = stored.dtype

    def numel(self) -> int:
        return self.stop - self.start

    @property
    def nbytes(self) -> int:
        return self.numel() * self.dtype.itemsize

    def is_floating_point(self) -> bool:
        return self.dtype.is_floating_point

    def __getitem__(self, span: slice) -> StoredPart:
        first, last, _ = span.indices(self.numel())
        return StoredPart(self.stored, self.start + first, self.start + last, mends=self.mends)

    def split(self) -> Iterator[StoredPart]:
        """What is in one tile each."""
        each = self.stored.desk.tile_numel
        for start in range(self.start // each * each, self.stop, each):
            yield StoredPart(self.stored, max(start, self.start), min(start + each, self.stop), mends=self.mends)

    def cpu(self) -> Tensor:
        """A copy, in memory of its own: whichever thread asks."""
        copies = [part._read() for part in self.split()]
        return copies[0] if len(copies) == 1 else torch.cat(copies)

    def copy_(self, values: Tensor) -> None:
        for part in self.split():
            part._put(values[part.start - self.start : part.stop - self.start])

    def fill_(self, value: float) -> None:
        for part in self.split():
            part._put(torch.full((part.numel(),), value, dtype=self.dtype))

    def _read(self) -> Tensor:
        """Of one tile."""
        place, begin = self._place()
        tile = self.stored.read(place, Room.make(self.stored.tiles[place].nbytes, torch.device("cpu")))
        return tile[self.start - begin : self.stop - begin]

    def _put(self, values: Tensor) -> None:
        """Into one tile. What it has beside is read first, and kept."""
        place, begin = self._place()
        room, span = self.stored.desk.room(0, self.dtype.itemsize), self.stored.tiles[place].span
        if self.numel() < span.stop - span.start:
            self._read_beside(place, room)
        room.of(span.stop - span.start, self.dtype)[self.start - begin : self.stop - begin].copy_(values)
        self.stored.will_change()
        self.stored.write(place, room)

    def _read_beside(self, place: int, room: Room) -> None:
        try:
            self.stored.read(place, room)
        except StorageError:
            if not self.mends:
                raise
            room.elements.zero_()

    def _place(self) -> tuple[int, int]:
        """Of the tile that it is in, and of that tile's first element."""
        place = self.start // self.stored.desk.tile_numel
        return place, self.stored.tiles[place].span.start
