"""Lanes: what a machine does at a time, one thing behind the other in a lane and side by side in several. Pure."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from naught.machine import Machine

__all__ = ["Bar", "Lane", "Lanes"]


class Lane(StrEnum):
    COMPUTE = "compute"
    NETWORK = "network"
    UP = "up"  # from the host to the device
    DOWN = "down"
    DISK = "disk"
    HOST = "host"


class Bar(NamedTuple):
    """Something that keeps a lane busy."""

    lane: Lane
    what: str
    unit: str
    start_s: float
    stop_s: float


class _Load(NamedTuple):
    due_s: float
    nbytes: int


@dataclass
class Lanes:
    """What was asked of a machine, and until when each lane is busy with it: whatever is asked of a lane waits for what was asked
    of it before. Only new weights set out by themselves, when their update is over: what is to come up until then goes first."""

    machine: Machine
    bars: list[Bar] = field(default_factory=list)
    free: dict[Lane, float] = field(default_factory=lambda: defaultdict(float))
    coming: dict[str, _Load] = field(default_factory=dict)  # by unit; the host updates one behind the other: the earliest first
    arrived: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    asked: float = 0.0  # when the latest computation has begun: what is asked ahead is asked then

    def do(self, lane: Lane, what: str, unit: str, seconds: float, *, after: float) -> float:
        """When it is done."""
        start = max(self.free[lane], after)
        self.free[lane] = start + seconds
        if seconds:
            self.bars.append(Bar(lane, what, unit, start, start + seconds))
        return start + seconds

    def hold(self, lane: Lane, until: float) -> None:
        self.free[lane] = max(self.free[lane], until)

    def compute(self, what: str, unit: str, flops: float, *, after: float) -> float:
        self.asked = max(self.free[Lane.COMPUTE], after)
        return self.do(Lane.COMPUTE, what, unit, flops / self.machine.gpu.flops, after=after)

    def up(self, what: str, unit: str, nbytes: int, *, after: float) -> float:
        if not self._crosses(nbytes):
            return after
        while self.coming and next(iter(self.coming.values())).due_s <= max(self.free[Lane.UP], after):
            self._load_next()
        return self.do(Lane.UP, what, unit, nbytes / self.machine.link_bytes_s, after=after)

    def down(self, what: str, unit: str, nbytes: int, *, after: float) -> float:
        """A link carries as much each way, at the same time."""
        return self.do(Lane.DOWN, what, unit, nbytes / self.machine.link_bytes_s, after=after) if self._crosses(nbytes) else after

    def on_disk(self, what: str, unit: str, nbytes: int, *, after: float) -> float:
        return self.do(Lane.DISK, what, unit, nbytes / self.machine.rank_disk_bytes_s, after=after) if nbytes else after

    def over_network(self, what: str, unit: str, nbytes: int, *, after: float) -> float:
        share = (self.machine.ranks - 1) / self.machine.ranks / self.machine.collective_bytes_s
        return self.do(Lane.NETWORK, what, unit, nbytes * share, after=after)

    def update_on_host(self, unit: str, numel: int, *, after: float) -> float:
        """Where the device is the host, the same cores do both."""
        lane = Lane.COMPUTE if self.machine.unified else Lane.HOST
        return self.do(lane, "update", unit, numel / self.machine.host_update_numel_s, after=after)

    def load_at(self, due_s: float, unit: str, nbytes: int) -> None:
        """Have new weights of a unit come up then."""
        self.arrival(unit)  # those of an earlier update, which nobody has waited for
        if self._crosses(nbytes):
            self.coming[unit] = _Load(due_s, nbytes)
        else:
            self.arrived[unit] = due_s

    def arrival(self, unit: str) -> float:
        """When the latest new weights of a unit are up."""
        while unit in self.coming:
            self._load_next()
        return self.arrived[unit]

    def bring_all(self) -> None:
        """New weights that nobody has waited for."""
        while self.coming:
            self._load_next()

    def _load_next(self) -> None:
        unit = next(iter(self.coming))
        load = self.coming.pop(unit)
        self.arrived[unit] = self.do(Lane.UP, "load", unit, load.nbytes / self.machine.link_bytes_s, after=load.due_s)

    def _crosses(self, nbytes: int) -> bool:
        """A device that is the host has no link to it."""
        return bool(nbytes) and not self.machine.unified
