"""Disk side: what a rank has on disk, and shards on their way from there."""

from __future__ import annotations

from concurrent.futures import Future

import torch

from naught.host_crew import HostCrew
from naught.spill import Desk, Room, Spill, Stored
from naught.streams import Point

__all__ = ["DiskSide", "Reading"]

_SHARDS = "host shards"  # a category of the meter: weights on their way from disk


class Reading:
    """A shard on its way from disk, in a room of its own; and when the device has copied what was in it before."""

    def __init__(self, room: Room) -> None:
        self.room = room
        self.over: Future[None] | None = None
        self.left: Future[Point] | None = None


class DiskSide:
    """What a rank has on disk: a file for each kind of state, room for tiles on their way, and threads that read, update and
    write."""

    def __init__(self, folder: str, desk: Desk, crew: HostCrew) -> None:
        self.folder, self.desk, self.crew = folder, desk, crew
        self.spills: dict[str, Spill] = {}
        self.idle: list[Reading] = []  # rooms for whole shards that nobody reads into

    def take(self, numel: int, dtype: torch.dtype, category: str) -> Stored:
        """Zeros that are held from here on."""
        return Stored(self._spill(category), self.desk, numel, dtype, category)

    def foresee(self, category: str, nbytes: int) -> None:
        """Have room for so many bytes more."""
        self._spill(category).foresee(nbytes)

    def _spill(self, category: str) -> Spill:
        if category not in self.spills:
            self.spills[category] = Spill(self.folder)
        return self.spills[category]

    def read(self, stored: Stored, after: Future[None] | None) -> Reading:
        """Begin to read all of it, once nobody writes to it any more."""
        reading = next((each for each in self.idle if each.room.elements.nbytes >= stored.nbytes), None)
        if reading is None:
            reading = Reading(Room.make(stored.nbytes, register=self.desk.register))
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

    def close(self) -> None:
        """Once nothing rests there any more."""
        self.crew.stop()
        for spill in self.spills.values():
            spill.close()
        self.spills.clear()
        self.desk.meter.change(_SHARDS, -sum(reading.room.elements.nbytes for reading in self.idle))
        self.idle.clear()
        self.desk.close()
