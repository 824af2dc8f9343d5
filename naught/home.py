"""Home: where the segments of a unit live, and in which types. One of each for a unit, handed to all that it consists of."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import NamedTuple

import torch

from naught.comm import Group
from naught.ferry import Ferry
from naught.flat import Meter
from naught.host_crew import HostCrew
from naught.placement import Placement, Tier
from naught.rounding import Rounds, half_up, nearest
from naught.shelves import DeviceShelf, Shelf
from naught.spill import Desk, Room, Spill, Stored
from naught.streams import Point

__all__ = ["DiskSide", "GradTypes", "Home", "HostSide", "Reading", "Types"]


class GradTypes(NamedTuple):
    """The types of a flat of gradients, of a sum that has left it, and of one that waits on the host: there it may be wider than
    it was summed, so that the update finds it as it needs it."""

    flat: torch.dtype
    sums: torch.dtype
    on_host: torch.dtype


class Types(NamedTuple):
    """The types of a segment's weights and gradients. With small masters 16-bit weights are rounded half up, and where they are
    on the device, rests are kept beside them instead of masters. Small moments have 8 bits."""

    weights: torch.dtype
    grads: GradTypes
    small_masters: bool = False
    small_moments: bool = False

    @property
    def rounds(self) -> Rounds:
        return half_up if self.small_masters else nearest


class HostSide(NamedTuple):
    """What a rank has on its host: memory, the way there and back, threads that update, and room for how many sums of the same
    gradients."""

    shelf: Shelf
    ferry: Ferry
    crew: HostCrew
    rooms: int = 1

    def close(self) -> None:
        """Once nothing rests there any more."""
        self.crew.stop()
        self.ferry.close()


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


_SHARDS = "host shards"  # a category of the meter: weights on their way from disk


class Reading:
    """A shard on its way from disk, in a room of its own; and when the device has copied what was in it before."""

    def __init__(self, room: Room) -> None:
        self.room = room
        self.over: Future[None] | None = None
        self.left: Future[Point] | None = None


class Home(NamedTuple):
    """Where a segment lives: its placement, the ranks that share it, their device, who counts its bytes, what share of its
    step a gradient is, the host, if anything rests there, and the disk."""

    placement: Placement
    group: Group
    device: torch.device
    meter: Meter
    share: Callable[[], float]
    host: HostSide | None
    disk: DiskSide | None = None

    def shelf(self, tier: Tier) -> Shelf:
        if tier is Tier.DEVICE:
            return DeviceShelf(self.device, self.meter)
        assert self.host is not None
        return self.host.shelf
