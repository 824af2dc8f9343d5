"""Activation disk: activations that rest on disk between their forward and their backward, in tiles with checksums."""

from __future__ import annotations

import weakref
from collections import deque
from concurrent.futures import Future, wait

import torch
from torch import Tensor

from naught.activation_rests import Lanes, Resting, Rooms
from naught.disk_side import DiskSide
from naught.flat import Meter
from naught.rooms import LEAVING
from naught.spill import Room, Stored
from naught.streams import Point, here

__all__ = ["OnDisk"]


class OnDisk:
    """On disk, by way of a few rooms on the host."""

    def __init__(self, device: torch.device, meter: Meter, disk: DiskSide) -> None:
        self.lanes, self.disk = Lanes(device, meter), disk
        # Given back in their order and not when the disk is done: so the rooms of a step are as many every time.
        self.writing: deque[tuple[Future[None], Room]] = deque()
        self.rising: deque[tuple[Point, Room]] = deque()  # rooms that the device still copies from

    def put(self, flat: Tensor) -> Resting:
        while len(self.writing) > LEAVING:
            written, room = self.writing.popleft()
            wait([written])
            self.lanes.rooms.give_back(room)
        room = self.lanes.rooms.take(flat.nbytes)
        arrived = self.lanes.send(flat, room)
        stored = self.disk.take(flat.numel(), flat.dtype, "activations")

        def write_tile(place: int) -> None:
            arrived.wait()
            stored.write_all(room, place)

        written = self.disk.crew.ask(len(stored.tiles), write_tile)
        self.writing.append((written, room))
        return _OnDisk(self, stored, written)

    def read(self, stored: Stored, written: Future[None]) -> tuple[Room, Future[None]]:
        while len(self.rising) > LEAVING:
            point, room = self.rising.popleft()
            point.wait()
            self.lanes.rooms.give_back(room)
        room = self.lanes.rooms.take(stored.numel * stored.dtype.itemsize)

        def read_tile(place: int) -> None:
            written.result()
            stored.read_all(room, place)

        return room, self.disk.crew.ask(len(stored.tiles), read_tile)

    def raise_up(self, room: Room, stored: Stored) -> Tensor:
        into, there = self.lanes.bring(room, stored.numel, stored.dtype, here(self.lanes.device))
        there.hold(self.lanes.device)
        self.rising.append((there, room))
        return into

    def close(self) -> None:
        wait([written for written, _ in self.writing])
        self.writing.clear()
        self.disk.close()
        self.lanes.close()


class _OnDisk:
    def __init__(self, rest: OnDisk, stored: Stored, written: Future[None]) -> None:
        self.rest, self.stored, self.written = rest, stored, written
        self.reading: list[tuple[Room, Future[None]]] = []  # at most one
        weakref.finalize(self, _leave_disk, rest.lanes.rooms, stored, written, self.reading).atexit = False

    def ask(self) -> None:
        if not self.reading:
            self.reading.append(self.rest.read(self.stored, self.written))

    def back(self) -> Tensor:
        self.ask()
        room, over = self.reading.pop()
        over.result()
        return self.rest.raise_up(room, self.stored)


def _leave_disk(rooms: Rooms, stored: Stored, written: Future[None], reading: list[tuple[Room, Future[None]]]) -> None:
    """Its place in the file is for another once nobody writes to it or reads from it any more; so is the room of who asked for it
    and never took it."""
    under_way = [written, *(over for _, over in reading)]
    left = deque(under_way)

    def over(_: Future[None]) -> None:
        left.pop()
        if not left:
            for room, _ in reading:
                rooms.give_back(room)
            stored.give_back()

    for future in under_way:
        future.add_done_callback(over)  # not a wait: the thread that lets go may be the one that is to write
