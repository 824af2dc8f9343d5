"""Spill: states that rest on disk, in tiles that are read and written whole. Each has a checksum: what is read back is what was
written, or an error says where it was lost. Files have no names, so nothing survives its process."""

from __future__ import annotations

import threading
import zlib
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from naught.errors import StorageError
from naught.extents import Extents
from naught.flat import Meter
from naught.spill_file import File
from naught.streams import Slab, host_of

__all__ = ["DISK", "Desk", "Room", "Spill", "Stored"]

_ROOMS = "host rooms"  # a category of the meter
DISK = "disk "  # what the meter's categories of disk space begin with
_PAGE = 4096  # of which requests past the system's cache are multiples, and where they begin


class Room(NamedTuple):
    """Memory that a disk and a device can reach by themselves, as bytes and as elements. For a device without contents it has
    elements and no bytes: nothing can be written of it, and nothing read."""

    memory: memoryview
    elements: Tensor

    @classmethod
    def make(cls, nbytes: int, device: torch.device) -> Room:
        if device.type == "meta":
            return cls(memoryview(b""), torch.empty(_padded(nbytes), dtype=torch.uint8, device=device))
        slab = Slab(_padded(nbytes), register=device.type == "cuda")
        return cls(memoryview(slab.view).cast("B"), slab.tensor(_padded(nbytes), torch.uint8))

    def of(self, numel: int, dtype: torch.dtype) -> Tensor:
        return self.elements[: numel * dtype.itemsize].view(dtype)

    def behind(self, start: int) -> Room:
        """What is left of it from a byte on."""
        return Room(self.memory[start:], self.elements[start:])


class Desk:
    """Rooms of whichever thread asks, as many as it has ever needed at once. `worker` tells which one does."""

    def __init__(
        self, tile_numel: int, meter: Meter, device: torch.device, worker: Callable[[], int] = threading.get_ident
    ) -> None:
        self.tile_numel, self.meter, self.device, self.worker = tile_numel, meter, device, worker
        self.rooms: dict[tuple[int, int], Room] = {}  # by whose they are; each is the business of one thread alone

    def room(self, at: int, itemsize: int = 4) -> Room:
        """One of them, for a tile of elements of so many bytes."""
        key, needed = (self.worker(), at), self.tile_numel * max(itemsize, 4)
        room = self.rooms.get(key)
        if room is None or room.elements.nbytes < needed:
            before = 0 if room is None else room.elements.nbytes
            room = self.rooms[key] = Room.make(needed, self.device)
            self.meter.change(_ROOMS, room.elements.nbytes - before)
        return room

    def close(self) -> None:
        """No thread asks any more."""
        self.meter.change(_ROOMS, -sum(room.elements.nbytes for room in self.rooms.values()))
        self.rooms.clear()


class Spill:
    """What lies where in a file of one rank. Any thread may read and write."""

    def __init__(self, file: File) -> None:
        self.file = file
        self.nbytes = 0
        self.spare = Extents()

    @property
    def folder(self) -> str:
        return self.file.folder

    def reserve(self, nbytes: int) -> int:
        """Where so many bytes have room from here on. A disk that is too full says so now."""
        spare = self.spare.take(nbytes)
        if spare is not None:
            return spare
        at = self.nbytes
        self.foresee(nbytes)
        self.nbytes += nbytes
        return at

    def give_back(self, at: int, nbytes: int) -> None:
        """Nobody needs what is there any more."""
        self.spare.give_back(at, nbytes)

    def foresee(self, nbytes: int) -> None:
        """Have room for so many bytes more, which nobody has asked for yet."""
        if nbytes:
            self.file.grow(self.nbytes, nbytes)

    def write(self, at: int, data: memoryview) -> None:
        self.file.write(at, data)

    def read(self, at: int, into: memoryview) -> None:
        self.file.read(at, into)

    def close(self) -> None:
        """Its bytes are nobody's any more."""
        self.file.close()


class _Tile(NamedTuple):
    """Elements from one to another, and where their bytes are in the file."""

    span: slice
    at: int
    nbytes: int


_NEVER, _LOST = -1, -2  # instead of the checksum of a tile: it was never written; a write of it has failed


class Stored:
    """Elements of one type on disk. Zeros at first."""

    def __init__(self, spill: Spill, desk: Desk, numel: int, dtype: torch.dtype, category: str) -> None:
        self.spill, self.desk, self.dtype, self.category = spill, desk, dtype, category
        self.tiles: list[_Tile] = []
        spans = [slice(start, min(start + desk.tile_numel, numel)) for start in range(0, numel, desk.tile_numel)]
        sizes = [(span.stop - span.start) * dtype.itemsize for span in spans]
        self.nbytes = sum(map(_padded, sizes))
        at = spill.reserve(self.nbytes) if numel else 0
        for span, nbytes in zip(spans, sizes, strict=True):
            self.tiles.append(_Tile(span, at, nbytes))
            at += _padded(nbytes)
        self.sums = [_NEVER] * len(self.tiles)
        self.copy: Tensor | None = None  # all of it, while somebody may have it
        desk.meter.change(DISK + category, self.nbytes)

    @property
    def numel(self) -> int:
        return self.tiles[-1].span.stop if self.tiles else 0

    def read(self, place: int, room: Room) -> Tensor:
        """A tile, in a room."""
        span, at, nbytes = self.tiles[place]
        found = room.of(span.stop - span.start, self.dtype)
        wanted = self.sums[place]
        if wanted == _NEVER:
            return found.zero_()
        self.spill.read(at, room.memory[: _padded(nbytes)])
        self.desk.meter.move(DISK + "read", nbytes)
        sum_found = zlib.crc32(room.memory[:nbytes])
        if sum_found != wanted:
            raise StorageError(
                f"a file in {self.spill.folder} does not have what was written to it: {nbytes} bytes at {at} are others",
                fix="the disk or its cable may be failing: look at the kernel's log, and resume from the last checkpoint",
            )
        return found

    def write(self, place: int, room: Room) -> None:
        """A tile, as it is in a room."""
        _, at, nbytes = self.tiles[place]
        self.sums[place] = _LOST
        self.spill.write(at, room.memory[: _padded(nbytes)])
        self.desk.meter.move(DISK + "written", nbytes)
        self.sums[place] = zlib.crc32(room.memory[:nbytes])

    def fill(self, values: Tensor) -> None:
        """Write all of it."""
        if values is not self.copy:
            self.copy = None
        for place, tile in enumerate(self.tiles):
            room = self.desk.room(0, self.dtype.itemsize)
            room.of(tile.span.stop - tile.span.start, self.dtype).copy_(values[tile.span])
            self.write(place, room)

    def whole(self) -> Tensor:
        """A copy on the host, which counts again once it is told to be written to."""
        if self.copy is None:
            self.copy = torch.empty(self.numel, dtype=self.dtype, device=host_of(self.desk.device))
            for place, tile in enumerate(self.tiles):
                self.copy[tile.span].copy_(self.read(place, self.desk.room(0, self.dtype.itemsize)))
        return self.copy

    def written(self) -> None:
        if self.copy is not None:
            self.fill(self.copy)

    def will_change(self) -> None:
        self.copy = None

    def give_back(self, shelf: object = None) -> None:
        """It is held no longer, and its room is for the next one of its size."""
        del shelf
        self.desk.meter.change(DISK + self.category, -self.nbytes)
        if self.tiles:
            self.spill.give_back(self.tiles[0].at, self.nbytes)

    def read_all(self, room: Room, place: int) -> None:
        """One of its tiles, to where it belongs in a room for all of them."""
        self.read(place, self._own(room, place))

    def write_all(self, room: Room, place: int) -> None:
        """One of its tiles, from there."""
        self.write(place, self._own(room, place))

    def _own(self, room: Room, place: int) -> Room:
        return room.behind(self.tiles[place].at - self.tiles[0].at)


def _padded(nbytes: int) -> int:
    return -(-nbytes // _PAGE) * _PAGE
