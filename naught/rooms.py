"""Rooms: memory of a constant size through which goes what goes between tiers, and how much of it there is. Pure.

Between a device and its host it is staging: berths for what goes down and landings for what comes up. Between host and disk there
are rooms for tiles.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

__all__ = [
    "BERTH_NUMEL",
    "LEAST_BERTHS",
    "LEAVING",
    "MOST_BERTHS",
    "ROOMS_ON_THE_WAY",
    "STRETCH_NUMEL",
    "TILE_STEP",
    "UNITS_SUMMED",
    "SharedRooms",
    "landings_of",
    "room_bytes",
    "shared_rooms",
    "staging_berths",
    "staging_bytes",
]

# What is reckoned on a device is reckoned in stretches of so many elements; what goes between it and the host goes through berths
# of so many elements of 32 bits each.
STRETCH_NUMEL, BERTH_NUMEL = 1 << 23, 1 << 24
LEAST_BERTHS, MOST_BERTHS = 4, 24
_LANDINGS = 2  # berths for what comes up: one is filled while the other is cast from
# Activations that are on their way at a time, before others are waited for; and rooms on the host for those that go to disk and
# come back from there: written and about to be, read ahead, and raised.
LEAVING = 2
ROOMS_ON_THE_WAY = 2 * (LEAVING + 1)
UNITS_SUMMED = 2  # whose sums are on the host in turn: those of one come while those of the other are read
TILE_STEP = 4096  # elements: of every type a whole number of pages


def staging_berths(largest_numel: int, most: int, berth_numel: int = BERTH_NUMEL) -> int:
    """Room for the largest part that goes down, so that the device goes on while it does, and a berth more; and for what comes
    up."""
    return min(max(-(-largest_numel // berth_numel) + 1 + _LANDINGS, LEAST_BERTHS), most)


def landings_of(berths: int, largest_numel: int, berth_numel: int = BERTH_NUMEL) -> int:
    """Of so many, those for what comes up. What goes down keeps the device waiting: of the fewest it has all but one, unless it
    needs no more than two."""
    down = min(-(-largest_numel // berth_numel) + 1, LEAST_BERTHS - 1)
    return min(_LANDINGS, berths - down) if berths else 0


def staging_bytes(largest_numel: int, most: int, berth_numel: int = BERTH_NUMEL) -> int:
    """Of all berths, where the largest part that travels has so many elements."""
    return staging_berths(largest_numel, most, berth_numel) * min(berth_numel, largest_numel) * 4


@dataclass(frozen=True)
class SharedRooms:
    """So many rooms for sums, of so many elements of 32 bits each."""

    count: int = 0
    numel: int = 0

    @property
    def nbytes(self) -> int:
        return self.count * self.numel * 4


def shared_rooms(units: Iterable[Sequence[int]]) -> SharedRooms:
    """On the host, where each unit is updated as soon as it has its sums: rooms for those of any unit, and one that is read
    meanwhile, if there is more than one unit. `units` has the elements of each sum."""
    sums = [numels for numels in units if numels]
    return SharedRooms(max(map(len, sums)) + (len(sums) > 1), max(map(max, sums))) if sums else SharedRooms()


def room_bytes(largest_numel: int, kinds: int, threads: int, request_bytes: int, others: int = 1) -> int:
    """What is updated from disk is updated a tile at a time: of all rooms for tiles of so many kinds of states, by so many
    threads, in requests of so many bytes at most, and of those for whoever else reads or writes."""
    tile = min(-(-request_bytes // (4 * TILE_STEP)), -(-largest_numel // TILE_STEP)) * TILE_STEP * 4
    return tile * (threads * kinds + others) if kinds else 0
