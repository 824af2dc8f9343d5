"""Disk side: what a rank has on disk, and shards on their way from there."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, wait

import torch

from naught.host_crew import Crew
from naught.spill import Desk, Room, Spill, Stored
from naught.spill_file import File
from naught.streams import Point

__all__ = ["DiskSide", "Reading"]

_SHARDS, _SUMS = "host shards", "host sums"  # categories of the meter: weights on their way from disk, gradients on theirs to it


class Reading:
    """A shard on its way from disk, in a room of its own; and when the device has copied what was in it before."""

    def __init__(self, room: Room) -> None:
        self.room = room
        self.over: Future[None] | None = None
        self.left: Future[Point] | None = None


class DiskSide:
    """What a rank has on disk: a file for each kind of state, room for tiles on their way, and threads that read, update and
    write."""

    def __init__(self, make_file: Callable[[], File], desk: Desk, crew: Crew) -> None:
        self.make_file, self.desk, self.crew = make_file, desk, crew
        self.spills: dict[str, Spill] = {}
        self.idle: list[Reading] = []  # rooms for whole shards that nobody reads into
        self.way: Room | None = None  # for a sum of gradients on its way down; None: none has needed one
        self.writing: Future[None] | None = None  # what is in it, to disk

    def take(self, numel: int, dtype: torch.dtype, category: str) -> Stored:
        """Zeros that are held from here on."""
        return Stored(self._spill(category), self.desk, numel, dtype, category)

    def foresee(self, category: str, nbytes: int) -> None:
        """Have room for so many bytes more."""
        self._spill(category).foresee(nbytes)

    def _spill(self, category: str) -> Spill:
        if category not in self.spills:
            self.spills[category] = Spill(self.make_file())
        return self.spills[category]

    def read(self, stored: Stored, after: Future[None] | None) -> Reading:
        """Begin to read all of it, once nobody writes to it any more."""
        fitting = [each for each in self.idle if each.room.elements.nbytes >= stored.nbytes]
        reading = min(fitting, key=lambda each: each.room.elements.nbytes, default=None)
        if reading is None:
            reading = Reading(Room.make(stored.nbytes, self.desk.device))
            self.desk.meter.change(_SHARDS, reading.room.elements.nbytes)
        else:
            self.idle.remove(reading)
        left = reading.left

        def read_tile(place: int) -> None:
            if after is not None:
                after.result()
            if left is not None and left.exception() is None:
                left.result().wait()
            stored.read_all(reading.room, place)

        reading.over = self.crew.ask(len(stored.tiles), read_tile)
        return reading

    def way_down(self, nbytes: int) -> Room:
        """A room for one sum of gradients on its way to disk, once the last one is there. There is one for all."""
        if self.writing is not None:
            wait([self.writing])
            self.writing = None
        if self.way is None or self.way.elements.nbytes < nbytes:
            self._drop_way()
            self.way = Room.make(nbytes, self.desk.device)
            self.desk.meter.change(_SUMS, self.way.elements.nbytes)
        return self.way

    def _drop_way(self) -> None:
        self.desk.meter.change(_SUMS, 0 if self.way is None else -self.way.elements.nbytes)
        self.way = None

    def write(self, stored: Stored, arrived: Point) -> Future[None]:
        """Write all that is on its way down, once it has arrived there."""
        room = self.way
        assert room is not None

        def write_tile(place: int) -> None:
            arrived.wait()
            stored.write_all(room, place)

        self.writing = self.crew.ask(len(stored.tiles), write_tile)
        return self.writing

    def close(self) -> None:
        """Once nothing rests there any more."""
        self.crew.stop()
        for spill in self.spills.values():
            spill.close()
        self.spills.clear()
        self.desk.meter.change(_SHARDS, -sum(reading.room.elements.nbytes for reading in self.idle))
        self.idle.clear()
        self._drop_way()
        self.desk.close()
