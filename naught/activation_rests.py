"""Activation rests: where activations rest between their forward and their backward. Each is put away once, and brought back for
as often as it is wanted; its room is for the next one when nobody can want it any more."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from naught.comm import Among
from naught.disk_side import DiskSide
from naught.flat import Meter
from naught.spill import Room, Stored
from naught.streams import Lane, Point, here

__all__ = ["AsItIs", "OnDevice", "OnDisk", "OnHost", "Rest", "Resting", "Split"]

_LEAVING = 2  # that are on their way at a time: those before them are waited for


class Resting(Protocol):
    """Elements that are away."""

    def ask(self) -> None:
        """Begin to bring them back, ahead of their use."""

    def back(self) -> Tensor: ...


class Rest(Protocol):
    """Where elements go."""

    def put(self, flat: Tensor) -> Resting: ...

    def close(self) -> None:
        """Nothing rests there any more."""


class _Held(NamedTuple):
    """They are there."""

    flat: Tensor

    def ask(self) -> None:
        pass

    def back(self) -> Tensor:
        return self.flat


class AsItIs:
    """Where they were made."""

    def put(self, flat: Tensor) -> Resting:
        return _Held(flat)

    def close(self) -> None:
        pass


class _Rooms:
    """Memory of a few sizes that is taken and given back again and again: none is made where there is some."""

    def __init__(self, make: Callable[[int], Room], meter: Meter, category: str) -> None:
        self.make, self.meter, self.category = make, meter, category
        self.free: dict[int, list[Room]] = {}
        self.nbytes = 0

    def take(self, nbytes: int) -> Room:
        rooms = self.free.setdefault(nbytes, [])
        if not rooms:
            self.count(nbytes)
            rooms.append(self.make(nbytes))
        return rooms.pop()

    def give_back(self, nbytes: int, room: Room) -> None:
        self.free.setdefault(nbytes, []).append(room)

    def count(self, nbytes: int) -> None:
        self.nbytes += nbytes
        self.meter.change(self.category, nbytes)

    def close(self) -> None:
        self.count(-self.nbytes)
        self.free.clear()


class _InRoom:
    """A copy in a room on the device."""

    def __init__(self, rooms: _Rooms, room: Room, like: Tensor) -> None:
        self.elements = room.of(like.numel(), like.dtype)
        self.elements.copy_(like)
        weakref.finalize(self, rooms.give_back, like.nbytes, room).atexit = False

    def ask(self) -> None:
        """They are there."""

    def back(self) -> Tensor:
        return self.elements


class OnDevice:
    """In memory of their own on the device, so that what lives for long does not lie between what does not. So many of the first
    size are made at once, side by side."""

    def __init__(self, device: torch.device, meter: Meter, count: int) -> None:
        self.device, self.ahead = device, count
        self.rooms = _Rooms(self._make, meter, "kept activations")

    def _make(self, nbytes: int) -> Room:
        return Room(memoryview(b""), torch.empty(nbytes, dtype=torch.uint8, device=self.device))

    def put(self, flat: Tensor) -> Resting:
        if self.ahead:
            side_by_side = self._make(flat.nbytes * self.ahead)
            self.rooms.count(flat.nbytes * self.ahead)
            for room in torch.split(side_by_side.elements, flat.nbytes):
                self.rooms.give_back(flat.nbytes, Room(memoryview(b""), room))
            self.ahead = 0
        return _InRoom(self.rooms, self.rooms.take(flat.nbytes), flat)

    def close(self) -> None:
        self.rooms.close()


class _Lanes:
    """Between the device and rooms on its host, beside the device's own order."""

    def __init__(self, device: torch.device, meter: Meter) -> None:
        self.device, self.meter, self.down, self.up = device, meter, Lane(device), Lane(device)
        self.rooms = _Rooms(lambda nbytes: Room.make(nbytes, register=device.type == "cuda"), meter, "host activations")
        self.leaving: deque[tuple[Tensor, Point]] = deque()

    def send(self, flat: Tensor, room: Room) -> Point:
        self.meter.move("activations to the host", flat.nbytes)
        self.down.follow(here(self.device))
        with self.down.open():
            room.of(flat.numel(), flat.dtype).copy_(flat, non_blocking=True)
        arrived = self.down.point()
        self.leaving.append((flat, arrived))
        if len(self.leaving) > _LEAVING:  # from here on the device may have other use for the oldest one's memory
            self.leaving.popleft()[1].hold(self.device)
        return arrived

    def bring(self, room: Room, numel: int, dtype: torch.dtype, after: Point) -> tuple[Tensor, Point]:
        while self.leaving:  # a backward has begun: those that left last are there
            self.leaving.popleft()[1].hold(self.device)
        into = torch.empty(numel, dtype=dtype, device=self.device)
        self.meter.move("activations to the device", into.nbytes)
        self.up.follow(here(self.device))  # what had this memory before is over
        self.up.follow(after)
        with self.up.open():
            into.copy_(room.of(numel, dtype), non_blocking=True)
        return into, self.up.point()


class OnHost:
    """In host memory."""

    def __init__(self, device: torch.device, meter: Meter) -> None:
        self.lanes = _Lanes(device, meter)

    def put(self, flat: Tensor) -> Resting:
        room = self.lanes.rooms.take(flat.nbytes)
        return _OnHost(self.lanes, room, flat, self.lanes.send(flat, room))

    def close(self) -> None:
        self.lanes.leaving.clear()
        self.lanes.rooms.close()


class _OnHost:
    def __init__(self, lanes: _Lanes, room: Room, flat: Tensor, arrived: Point) -> None:
        self.lanes, self.room, self.numel, self.dtype, self.arrived = lanes, room, flat.numel(), flat.dtype, arrived
        self.coming: tuple[Tensor, Point] | None = None
        weakref.finalize(self, lanes.rooms.give_back, flat.nbytes, room).atexit = False

    def ask(self) -> None:
        if self.coming is None:
            self.coming = self.lanes.bring(self.room, self.numel, self.dtype, self.arrived)

    def back(self) -> Tensor:
        self.ask()
        assert self.coming is not None
        (into, there), self.coming = self.coming, None
        there.hold(self.lanes.device)
        return into


class OnDisk:
    """On disk, by way of a few rooms on the host."""

    def __init__(self, device: torch.device, meter: Meter, disk: DiskSide) -> None:
        self.lanes, self.disk = _Lanes(device, meter), disk
        self.writing: deque[Future[None]] = deque()
        self.rising: deque[tuple[Point, int, Room]] = deque()  # rooms that the device still copies from

    def put(self, flat: Tensor) -> Resting:
        while len(self.writing) > _LEAVING:
            wait([self.writing.popleft()])
        nbytes, room = flat.nbytes, self.lanes.rooms.take(flat.nbytes)
        arrived = self.lanes.send(flat, room)
        stored = self.disk.take(flat.numel(), flat.dtype, "activations")

        def write_tile(place: int) -> None:
            arrived.wait()
            stored.write_all(room, place)

        written = self.disk.crew.ask(len(stored.tiles), write_tile)
        written.add_done_callback(lambda _: self.lanes.rooms.give_back(nbytes, room))
        self.writing.append(written)
        return _OnDisk(self, stored, written)

    def read(self, stored: Stored, written: Future[None]) -> tuple[Room, Future[None]]:
        while len(self.rising) > _LEAVING:
            point, nbytes, room = self.rising.popleft()
            point.wait()
            self.lanes.rooms.give_back(nbytes, room)
        room = self.lanes.rooms.take(stored.numel * stored.dtype.itemsize)

        def read_tile(place: int) -> None:
            written.result()
            stored.read_all(room, place)

        return room, self.disk.crew.ask(len(stored.tiles), read_tile)

    def raise_up(self, room: Room, stored: Stored) -> Tensor:
        into, there = self.lanes.bring(room, stored.numel, stored.dtype, here(self.lanes.device))
        there.hold(self.lanes.device)
        self.rising.append((there, into.nbytes, room))
        return into

    def close(self) -> None:
        wait(self.writing)
        self.disk.close()
        self.lanes.leaving.clear()
        self.lanes.rooms.close()


class _OnDisk:
    def __init__(self, rest: OnDisk, stored: Stored, written: Future[None]) -> None:
        self.rest, self.stored, self.written = rest, stored, written
        self.reading: tuple[Room, Future[None]] | None = None
        weakref.finalize(self, _let_go, stored, written).atexit = False

    def ask(self) -> None:
        if self.reading is None:
            self.reading = self.rest.read(self.stored, self.written)

    def back(self) -> Tensor:
        self.ask()
        assert self.reading is not None
        (room, over), self.reading = self.reading, None
        over.result()
        return self.rest.raise_up(room, self.stored)


def _let_go(stored: Stored, written: Future[None]) -> None:
    """Its place in the file is for another once nobody writes to it any more."""
    wait([written])
    stored.give_back()


class Split:
    """A part on each of the ranks that have the same: ZeRO-R's partitioned activations. They are brought together again before
    their backward, on all of these ranks at the same time."""

    def __init__(self, inner: Rest, among: Among) -> None:
        self.inner, self.among = inner, among

    def put(self, flat: Tensor) -> Resting:
        rank, each = self.among.rank, -(-flat.numel() // self.among.size)
        mine = flat[rank * each : (rank + 1) * each]
        part = flat.new_zeros(each)
        part[: mine.numel()].copy_(mine)
        return _Part(self.among, self.inner.put(part), flat.numel())

    def close(self) -> None:
        self.inner.close()


class _Part(NamedTuple):
    among: Among
    part: Resting
    numel: int

    def ask(self) -> None:
        self.part.ask()

    def back(self) -> Tensor:
        return self.among.gather(self.part.back(), "activations")[: self.numel]
