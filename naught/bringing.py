"""Bringing: how this rank's slice of a segment comes into its flat when that is gathered, by where the slice rests."""

from __future__ import annotations

from concurrent.futures import wait

from torch import Tensor

from naught.beside import Beside
from naught.comm import Waits
from naught.disk_side import DiskSide, Reading
from naught.ferry import Arrival, Ferry
from naught.home import Home
from naught.placement import Tier
from naught.spill import Stored
from naught.states import States
from naught.weights import Weights

__all__ = ["Source", "source_of"]


class Source:
    """Of weights that stay in their flat: nothing has to come, unless an update has just sent for new ones."""

    def __init__(self, weights: Weights, beside: Beside | None) -> None:
        self.weights, self.beside = weights, beside

    def bring(self) -> Waits | None:
        """Have the slice put into the flat; None: it is there."""
        return None if self.beside is None else self.beside.coming

    def read(self) -> None:
        """Have it read from disk, if that is where it rests: ahead of its gather."""

    def drop(self) -> None:
        """Nobody has gathered what was read ahead: it may be old when somebody does."""


def source_of(weights: Weights, states: States, beside: Beside | None, home: Home) -> Source:
    if weights.stays:
        return Source(weights, beside)
    if weights.stored is not None:
        assert home.disk is not None
        assert home.host is not None
        return _OnDisk(weights, beside, weights.stored, home.disk, home.host.ferry)
    if weights.shard is None:
        return _OfMasters(weights, beside, states)
    if home.placement.param.tier is Tier.DEVICE:
        return _OnDevice(weights, beside)
    assert home.host is not None
    return _OnHost(weights, beside, home.host.ferry)


class _OnDisk(Source):
    """Read into a room on the host, and brought up from there."""

    def __init__(self, weights: Weights, beside: Beside | None, stored: Stored, disk: DiskSide, ferry: Ferry) -> None:
        super().__init__(weights, beside)
        self.stored, self.disk, self.ferry = stored, disk, ferry
        self.reading: Reading | None = None  # on its way from disk

    def read(self) -> None:
        if self.reading is None:
            self.reading = self._read()

    def _read(self) -> Reading:
        return self.disk.read(self.stored, None if self.beside is None else self.beside.updating)

    def drop(self) -> None:
        if self.reading is not None:
            assert self.reading.over is not None
            wait([self.reading.over])
            self.disk.idle.append(self.reading)
            self.reading = None

    def bring(self) -> Waits:
        mine = self.weights.open()
        reading, self.reading = self.reading or self._read(), None
        source = reading.room.of(mine.numel(), mine.dtype)
        arrival = Arrival(self.ferry, source, mine, reading.over, self.weights.rounds, stays=False)
        reading.left = arrival.set_out
        self.disk.idle.append(reading)
        return arrival


class _OfMasters(Source):
    """Masters on the host are rounded on their way: the host keeps nothing twice."""

    def __init__(self, weights: Weights, beside: Beside | None, states: States) -> None:
        super().__init__(weights, beside)
        self.states = states

    def bring(self) -> Waits:
        mine = self.weights.open()
        assert self.beside is not None
        assert self.states.masters is not None
        return self.beside.bring(self.states.masters, mine)


class _OnHost(Source):
    def __init__(self, weights: Weights, beside: Beside | None, ferry: Ferry) -> None:
        super().__init__(weights, beside)
        self.ferry = ferry

    def bring(self) -> Waits:
        mine = self.weights.open()
        assert self.weights.shard is not None
        updating = None if self.beside is None else self.beside.updating
        return Arrival(self.ferry, self.weights.shard, mine, updating, self.weights.rounds)


class _OnDevice(Source):
    def bring(self) -> Waits:
        mine = self.weights.open()
        assert self.weights.shard is not None
        return _Copied(self.beside, mine, self.weights.shard)


class _Copied:
    """A shard on the device is copied into the flat once new weights have come to it."""

    def __init__(self, beside: Beside | None, into: Tensor, shard: Tensor) -> None:
        self.beside, self.into, self.shard = beside, into, shard

    def wait(self) -> None:
        if self.beside is not None:
            self.beside.arrive()
        self.into.copy_(self.shard)
