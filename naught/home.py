"""Home: where the segments of a unit live, and in which types. One of each for a unit, handed to all that it consists of."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from naught.comm import Group
from naught.devices import Pool
from naught.disk_side import DiskSide
from naught.ferry import Ferry
from naught.flat import Meter
from naught.host_crew import Crew
from naught.placement import Placement, Tier
from naught.rounding import Rounds, half_up, nearest
from naught.shelves import DeviceShelf, Shelf
from naught.sum_rooms import SumRooms

__all__ = ["GradTypes", "Home", "HostSide", "Types"]


class GradTypes(NamedTuple):
    """The types of a flat of gradients, of a sum that has left it, and of one that waits on the host: there it may be wider than
    it was summed, so that the update finds it as it needs it."""

    flat: torch.dtype
    sums: torch.dtype
    on_host: torch.dtype


class Types(NamedTuple):
    """The types of a segment's weights and gradients. With small masters 16-bit weights are rounded half up, and where they are
    on the device, rests are kept beside them instead of masters. Small moments have 8 bits. What is repeated is the same on all
    ranks that have a model together."""

    weights: torch.dtype
    grads: GradTypes
    small_masters: bool = False
    small_moments: bool = False
    repeated: bool = False

    @property
    def rounds(self) -> Rounds:
        return half_up if self.small_masters else nearest


class HostSide(NamedTuple):
    """What a rank has on its host: memory, the way there and back, threads that update, and rooms for sums of gradients: how many
    each segment has, or, if there are any, those that all share."""

    shelf: Shelf
    ferry: Ferry
    crew: Crew
    own_rooms: int = 1
    shared_rooms: SumRooms | None = None

    def rooms_for(self, numel: int, dtype: torch.dtype) -> SumRooms:
        """For the sums of one segment."""
        return self.shared_rooms or SumRooms(self.shelf, numel, dtype, self.own_rooms)

    def close(self) -> None:
        """Once nothing rests there any more."""
        self.crew.stop()
        self.ferry.close()


class Home(NamedTuple):
    """Where a segment lives: its placement, the ranks that share it, their device, who counts its bytes, what share of its
    step a gradient is, which memory its flats come from, the host, if anything rests there, and the disk."""

    placement: Placement
    group: Group
    device: torch.device
    meter: Meter
    share: Callable[[], float]
    pool: Pool
    host: HostSide | None
    disk: DiskSide | None = None

    def shelf(self, tier: Tier) -> Shelf:
        if tier is Tier.DEVICE:
            return DeviceShelf(self.device, self.meter)
        assert self.host is not None
        return self.host.shelf
