"""Activation rests: where activations rest between their forward and their backward. Each is put away once, and brought back for
as often as it is wanted; its room is for the next one when nobody can want it any more."""

from __future__ import annotations

import weakref
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from naught.comm import Among
from naught.errors import ModelError
from naught.flat import Meter
from naught.rooms import LEAVING
from naught.spill import Room
from naught.streams import Lane, Point, here

__all__ = ["AsItIs", "Lanes", "OnDevice", "OnHost", "Rest", "Resting", "Rooms", "Split"]


_ALIGN = 256  # bytes, of which rooms have a multiple, so that they can hold any type


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


class Rooms:
    """Memory that is taken and given back again and again. There are no more rooms than have been in use at once, whatever their
    sizes: the smallest that is large enough is taken, and where none is, a larger one takes the place of the largest."""

    def __init__(self, make: Callable[[int], Room], meter: Meter, category: str, before_one_goes: Callable[[], None]) -> None:
        self.make, self.meter, self.category, self.before_one_goes = make, meter, category, before_one_goes
        self.free: list[Room] = []  # the smallest first
        # Rooms come back whenever and in whichever thread somebody lets go of what was in them.
        self.returned: deque[Room] = deque()
        self.nbytes = 0

    def take(self, nbytes: int) -> Room:
        nbytes = -(-nbytes // _ALIGN) * _ALIGN
        while self.returned:
            insort(self.free, self.returned.popleft(), key=_size)
        at = bisect_left(self.free, nbytes, key=_size)
        if at < len(self.free):
            return self.free.pop(at)
        if self.free:
            self.before_one_goes()
            self.count(-_size(self.free.pop()))
        room = self.make(nbytes)
        self.count(_size(room))
        return room

    def give_back(self, room: Room) -> None:
        self.returned.append(room)

    def count(self, nbytes: int) -> None:
        self.nbytes += nbytes
        self.meter.change(self.category, nbytes)

    def close(self) -> None:
        self.count(-self.nbytes)
        self.free.clear()
        self.returned.clear()


def _size(room: Room) -> int:
    return room.elements.nbytes


class _InRoom:
    """A copy in a room on the device."""

    def __init__(self, rooms: Rooms, room: Room, like: Tensor) -> None:
        self.elements = room.of(like.numel(), like.dtype)
        self.elements.copy_(like)
        weakref.finalize(self, rooms.give_back, room).atexit = False

    def ask(self) -> None:
        """They are there."""

    def back(self) -> Tensor:
        return self.elements


class OnDevice:
    """In memory of their own on the device, so that what lives for long does not lie between what does not. So many of the first
    size are made at once, side by side."""

    def __init__(self, device: torch.device, meter: Meter, count: int) -> None:
        self.device, self.ahead = device, count
        self.rooms = Rooms(self._make, meter, "kept activations", lambda: None)  # the device's own order keeps them apart

    def _make(self, nbytes: int) -> Room:
        return Room(memoryview(b""), torch.empty(nbytes, dtype=torch.uint8, device=self.device))

    def put(self, flat: Tensor) -> Resting:
        if self.ahead:
            each = -(-flat.nbytes // _ALIGN) * _ALIGN
            side_by_side = self._make(each * self.ahead)
            self.rooms.count(each * self.ahead)
            for room in torch.split(side_by_side.elements, each):
                self.rooms.give_back(Room(memoryview(b""), room))
            self.ahead = 0
        return _InRoom(self.rooms, self.rooms.take(flat.nbytes), flat)

    def close(self) -> None:
        self.rooms.close()


class Lanes:
    """Between the device and rooms on its host, beside the device's own order."""

    def __init__(self, device: torch.device, meter: Meter) -> None:
        self.device, self.meter, self.down, self.up = device, meter, Lane(device), Lane(device)
        make = partial(Room.make, device=device)
        self.rooms = Rooms(make, meter, "host activations", self._come_to_rest)
        self.leaving: deque[tuple[Tensor, Point]] = deque()
        # What was asked for and never taken, when nobody can want it any more: as it comes, in whichever thread that is.
        self.unwanted: deque[tuple[Tensor, Point, Room]] = deque()

    def _come_to_rest(self) -> None:
        """Nothing is copied to or from any room."""
        for point in (here(self.device), self.down.point(), self.up.point()):
            point.wait()

    def _let_go(self) -> None:
        """From here on, in the device's own order, others may have the memory of what nobody has taken."""
        while self.unwanted:
            into, there, room = self.unwanted.popleft()
            there.hold(self.device)
            del into
            self.rooms.give_back(room)

    def send(self, flat: Tensor, room: Room) -> Point:
        self._let_go()
        self.meter.move("activations to the host", flat.nbytes)
        self.down.follow(here(self.device))
        with self.down.open():
            room.of(flat.numel(), flat.dtype).copy_(flat, non_blocking=True)
        arrived = self.down.point()
        self.leaving.append((flat, arrived))
        if len(self.leaving) > LEAVING:  # from here on the device may have other use for the oldest one's memory
            self.leaving.popleft()[1].hold(self.device)
        return arrived

    def bring(self, room: Room, numel: int, dtype: torch.dtype, after: Point) -> tuple[Tensor, Point]:
        self._let_go()
        while self.leaving:  # a backward has begun: those that left last are there
            self.leaving.popleft()[1].hold(self.device)
        into = torch.empty(numel, dtype=dtype, device=self.device)
        self.meter.move("activations to the device", into.nbytes)
        self.up.follow(here(self.device))  # what had this memory before is over
        self.up.follow(after)
        with self.up.open():
            into.copy_(room.of(numel, dtype), non_blocking=True)
        return into, self.up.point()

    def close(self) -> None:
        self._come_to_rest()
        self.leaving.clear()
        self.unwanted.clear()
        self.rooms.close()


class OnHost:
    """In host memory."""

    def __init__(self, device: torch.device, meter: Meter) -> None:
        self.lanes = Lanes(device, meter)

    def put(self, flat: Tensor) -> Resting:
        room = self.lanes.rooms.take(flat.nbytes)
        return _OnHost(self.lanes, room, flat, self.lanes.send(flat, room))

    def close(self) -> None:
        self.lanes.close()


class _OnHost:
    def __init__(self, lanes: Lanes, room: Room, flat: Tensor, arrived: Point) -> None:
        self.lanes, self.room, self.numel, self.dtype, self.arrived = lanes, room, flat.numel(), flat.dtype, arrived
        self.coming: list[tuple[Tensor, Point]] = []  # at most one
        weakref.finalize(self, _leave_host, lanes, room, self.coming).atexit = False

    def ask(self) -> None:
        if not self.coming:
            self.coming.append(self.lanes.bring(self.room, self.numel, self.dtype, self.arrived))

    def back(self) -> Tensor:
        self.ask()
        into, there = self.coming.pop()
        there.hold(self.lanes.device)
        return into


def _leave_host(lanes: Lanes, room: Room, coming: list[tuple[Tensor, Point]]) -> None:
    """Nobody can want it any more."""
    if coming:
        lanes.unwanted.append((*coming.pop(), room))
    else:
        lanes.rooms.give_back(room)


class Split:
    """A part on each of the ranks that have the same: ZeRO-R's partitioned activations. They are brought together again before
    their backward, on all of these ranks at the same time."""

    def __init__(self, inner: Rest, among: Among) -> None:
        self.inner, self.among = inner, among
        self.known = False  # that all have the same, as far as the first pass has shown

    def put(self, flat: Tensor) -> Resting:
        if not self.known:
            self._refuse_differences(flat)
        rank, each = self.among.rank, -(-flat.numel() // self.among.size)
        mine = flat[rank * each : (rank + 1) * each]
        part = flat.new_zeros(each)
        part[: mine.numel()].copy_(mine)
        return _Part(self, self.inner.put(part), flat.numel())

    def _refuse_differences(self, flat: Tensor) -> None:
        """What is put together of different tensors would be neither."""
        sums = self.among.exchange(torch.stack([flat.double().sum(), flat.double().abs().sum()]))
        if not sums.allclose(sums[:1].expand_as(sums), rtol=0, atol=0, equal_nan=True):
            raise ModelError(
                f"a checkpoint of {flat.numel()} elements is not the same on the ranks that have a model together",
                where="activation_checkpointing.partition_activations",
                fix="leave it out where blocks are given parts of a sequence, or a mask of a rank's own",
            )

    def close(self) -> None:
        self.inner.close()


class _Part(NamedTuple):
    split: Split
    part: Resting
    numel: int

    def ask(self) -> None:
        self.part.ask()

    def back(self) -> Tensor:
        self.split.known = True
        return self.split.among.gather(self.part.back(), "activations")[: self.numel]
