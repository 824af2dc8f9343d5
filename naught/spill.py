"""Spill: states that rest on disk, in tiles that are read and written whole. Each has a checksum: what is read back is what was
written, or an error says where it was lost. Files have no names, so nothing survives its process."""

from __future__ import annotations

import errno
import os
import threading
import weakref
import zlib
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

import torch
from torch import Tensor

from naught.errors import StorageError
from naught.extents import Extents
from naught.file_errors import telling
from naught.flat import Meter
from naught.streams import Slab

__all__ = ["DISK", "Desk", "Room", "Spill", "Stored"]

_ROOMS = "host rooms"  # a category of the meter
DISK = "disk "  # what the meter's categories of disk space begin with
_PAGE = 4096  # of which requests past the system's cache are multiples, and where they begin
_FIXES = {
    errno.ENOSPC: "make room on the disk, name another folder in nvme_path, or let more states rest elsewhere",
    errno.EDQUOT: "make room within your quota, or name another folder in nvme_path",
    errno.EACCES: "name a folder in nvme_path that you may write to",
    errno.EROFS: "name a folder in nvme_path on a file system that can be written",
    errno.ENOENT: "name a folder in nvme_path that is there, on every host",
    errno.EIO: "the disk may be failing: look at the kernel's log, and resume from the last checkpoint",
}


class Room(NamedTuple):
    """Memory that a disk and a device can reach by themselves, as bytes and as elements."""

    memory: memoryview
    elements: Tensor

    @classmethod
    def make(cls, nbytes: int, *, register: bool) -> Room:
        slab = Slab(_padded(nbytes), register=register)
        return cls(memoryview(slab.view).cast("B"), slab.tensor(_padded(nbytes), torch.uint8))

    def of(self, numel: int, dtype: torch.dtype) -> Tensor:
        return self.elements[: numel * dtype.itemsize].view(dtype)

    def behind(self, start: int) -> Room:
        """What is left of it from a byte on."""
        return Room(self.memory[start:], self.elements[start:])


class Desk:
    """Rooms of whichever thread asks, as many as it has ever needed at once."""

    def __init__(self, tile_numel: int, meter: Meter, *, register: bool) -> None:
        self.tile_numel, self.meter, self.register = tile_numel, meter, register
        self.own, self.lock, self.nbytes = threading.local(), threading.Lock(), 0

    def room(self, at: int, itemsize: int = 4) -> Room:
        """One of them, for a tile of elements of so many bytes."""
        rooms: dict[int, Room] = self.own.__dict__.setdefault("rooms", {})
        needed = self.tile_numel * max(itemsize, 4)
        if at not in rooms or rooms[at].elements.nbytes < needed:
            rooms[at] = Room.make(needed, register=self.register)
            with self.lock:
                self.nbytes += needed
            self.meter.change(_ROOMS, needed)
        return rooms[at]

    def close(self) -> None:
        """No thread asks any more."""
        self.meter.change(_ROOMS, -self.nbytes)
        self.own, self.nbytes = threading.local(), 0


class Spill:
    """A file of one rank. Any thread may read and write."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        with telling("make a file in", folder, _FIXES):
            self.handle = _open(folder)
        self.nbytes = 0
        self.spare = Extents()
        self._close = weakref.finalize(self, os.close, self.handle)

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
        if not nbytes:
            return
        with telling(f"find room for {nbytes} bytes in", self.folder, _FIXES):
            try:
                os.posix_fallocate(self.handle, self.nbytes, nbytes)
            except OSError as error:
                if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                    raise

    def write(self, at: int, data: memoryview) -> None:
        with telling("write to a file in", self.folder, _FIXES):
            self._move(os.pwritev, at, data, "nothing was written")

    def read(self, at: int, into: memoryview) -> None:
        with telling("read from a file in", self.folder, _FIXES):
            self._move(os.preadv, at, into, "the file ends before the bytes that were asked for")

    def _move(self, call: Callable[[int, list[memoryview], int], int], at: int, data: memoryview, otherwise: str) -> None:
        """To its end: a call may do a part of it."""
        done = 0
        while done < len(data):
            count = call(self.handle, [data[done:]], at + done)
            if count == 0:
                raise OSError(errno.EIO, otherwise)
            done += count

    def close(self) -> None:
        """Its bytes are nobody's any more."""
        self._close()


def _open(folder: str) -> int:
    """A file without a name, past the system's cache where the file system can do that."""
    flags = os.O_RDWR | os.O_CLOEXEC
    for more in (os.O_TMPFILE | os.O_DIRECT, os.O_TMPFILE):
        with suppress(OSError):  # not every file system has one or the other
            return os.open(folder, flags | more, 0o600)
    path = os.path.join(folder, f"naught-{os.getpid()}-{threading.get_ident()}")  # noqa: PTH118  # tests fail os.open, not Path
    handle = os.open(path, flags | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    os.unlink(path)  # noqa: PTH108
    return handle


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
            self.copy = torch.empty(self.numel, dtype=self.dtype)
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
