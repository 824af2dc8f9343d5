"""Pacing: how long a step takes on a machine, one thing behind the other in a lane and side by side in several. Pure."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from naught.holding import LEAVING
from naught.machine import Machine
from naught.placement import Kind, Tier
from naught.steps import Placements, Sizes, Step, Verb

__all__ = ["Bar", "Course", "Pace", "Work", "pace"]

_STEPS = 3  # until a step is like the one before


class Bar(NamedTuple):
    """Something that keeps a lane busy."""

    lane: str
    what: str
    unit: str
    start_s: float
    stop_s: float


@dataclass(frozen=True)
class Work:
    """What a unit asks of a machine beside its plan, on one rank: operations of its forward; bytes that come up from the host,
    for each gather where it rests there, else after each update there; elements that it updates, and bytes of states on disk that
    this reads and writes; and bytes of activations that go away with its forward and come back for its backward."""

    flops: float = 0.0
    raised: int = 0
    fetched: int = 0  # weights that an update on the device brings up to write them back
    updated_numel: int = 0
    state_bytes: int = 0
    away_bytes: int = 0
    lazy: bool = False  # new weights are gathered where they are used


@dataclass(frozen=True)
class Course:
    """A step: its plan, where units rest and what they take, whether blocks are computed again, and where activations go."""

    steps: Sequence[Step]
    placements: Placements
    sizes: Sizes
    works: Mapping[str, Work]
    recomputes: bool = False
    rest: Tier = Tier.DEVICE


@dataclass(frozen=True)
class Pace:
    """When what happens in a step, and how long it takes: from one norm to the next, when steps follow each other."""

    bars: tuple[Bar, ...]
    seconds: float

    @property
    def busy(self) -> dict[str, float]:
        found: dict[str, float] = defaultdict(float)
        for bar in self.bars:
            found[bar.lane] += bar.stop_s - bar.start_s
        return dict(found)


def pace(course: Course, machine: Machine) -> Pace:
    """Walk a few steps, and tell of the last: an update, and the forward and the backward behind it. A unit's backward has twice
    as many operations as its forward, and as many again if it computes it anew. Whatever is asked of a lane waits for what was
    asked of it before; a unit computes once its weights are there, its gradients set out once they are made, all are updated once
    the norm of all is known, and what needs new weights waits for that unit's update alone."""
    walk = _Walk(course, machine)
    norms = [0.0]
    for _ in range(_STEPS):
        walk.run()
        norms.append(walk.norm())
        walk.update(norms[-1])
    begins, ends = norms[-2:]
    bars = (bar for bar in walk.bars if begins <= bar.start_s < ends)
    return Pace(
        tuple(bar._replace(start_s=bar.start_s - begins, stop_s=bar.stop_s - begins) for bar in bars), seconds=ends - begins
    )


@dataclass
class _Walk:
    """Where each lane is, and when what a unit needs is there."""

    course: Course
    machine: Machine
    bars: list[Bar] = field(default_factory=list)
    free: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    ready: dict[tuple[str, str], float] = field(default_factory=lambda: defaultdict(float))  # by what it is and whose
    stale: set[str] = field(default_factory=set)  # units whose update was not gathered since
    begun: set[str] = field(default_factory=set)  # units whose sums on the host are of this step
    leaving: deque[float] = field(default_factory=deque)  # when activations on their way are gone
    asked: float = 0.0  # when the latest computation has begun: what is asked ahead is asked then

    def __post_init__(self) -> None:
        self.stale |= set(self.course.sizes)

    def run(self) -> None:
        """A step's forwards and backwards."""
        for verb, kind, unit in self.course.steps:
            act = _ACTS.get((verb, kind))
            if act is not None and unit in self.course.sizes:
                act(self, unit)

    def do(self, lane: str, what: str, unit: str, seconds: float, *, after: float) -> float:
        """When it is done."""
        start = max(self.free[lane], after)
        self.free[lane] = start + seconds
        if seconds:
            self.bars.append(Bar(lane, what, unit, start, start + seconds))
        return start + seconds

    def over_link(self, what: str, unit: str, nbytes: int, *, after: float) -> float:
        return self.do("link", what, unit, nbytes / self.machine.link_bytes_s, after=after) if nbytes else after

    def on_disk(self, what: str, unit: str, nbytes: int, *, after: float) -> float:
        return self.do("disk", what, unit, nbytes / self.machine.rank_disk_bytes_s, after=after) if nbytes else after

    def over_network(self, what: str, unit: str, nbytes: int, *, after: float) -> float:
        share = (self.machine.ranks - 1) / self.machine.ranks / self.machine.collective_bytes_s
        return self.do("network", what, unit, nbytes * share, after=after)

    def compute(self, what: str, unit: str, flops: float, *, after: float) -> float:
        start = self.asked = max(self.free["compute"], after)
        return self.do("compute", what, unit, flops / self.machine.gpu.flops, after=start)

    # --- weights ---

    def read(self, unit: str) -> None:
        after = max(self.asked, self.ready["updated", unit])
        self.ready["read", unit] = self.on_disk("read", unit, self.course.sizes[unit].weight_shard, after=after)

    def gather(self, unit: str) -> None:
        place, work = self.course.placements[unit], self.course.works.get(unit, Work())
        if unit not in self.stale and not place.param.split:
            return  # they are there
        after = max(self.asked, self.ready["updated", unit], self.ready["read", unit])
        if place.param.tier is not Tier.DEVICE or (place.optim.tier is not Tier.DEVICE and unit in self.stale):
            after = self.over_link("load", unit, work.raised, after=after)
        self.stale.discard(unit)
        self.ready["weights", unit] = self.over_network("gather", unit, self.course.sizes[unit].weights, after=after)

    # --- forward and backward ---

    def forward(self, unit: str) -> None:
        work = self.course.works.get(unit, Work())
        done = self.compute("forward", unit, work.flops, after=self.ready["weights", unit])
        if work.away_bytes and self.course.rest is not Tier.DEVICE:
            gone = self.over_link("put away", unit, work.away_bytes, after=done)
            self.leaving.append(gone)
            if len(self.leaving) > LEAVING:  # the device waits for the oldest: its memory is for others
                self.free["compute"] = max(self.free["compute"], self.leaving.popleft())
            if self.course.rest is Tier.DISK:
                gone = self.on_disk("put away", unit, work.away_bytes, after=gone)
            self.ready["away", unit] = gone

    def backward(self, unit: str) -> None:
        work = self.course.works.get(unit, Work())
        self.leaving.clear()
        after = self.ready["weights", unit]
        if work.away_bytes and self.course.rest is not Tier.DEVICE:
            back = max(self.asked, self.ready["away", unit])
            if self.course.rest is Tier.DISK:
                back = self.on_disk("bring back", unit, work.away_bytes, after=back)
            after = max(after, self.over_link("bring back", unit, work.away_bytes, after=back))
        self.compute("backward", unit, (3 if self.course.recomputes else 2) * work.flops, after=after)

    # --- gradients ---

    def reduce(self, unit: str) -> None:
        grads = self.course.sizes[unit].grads
        done = self.over_network("reduce", unit, grads, after=self.free["compute"])
        if not self.course.placements[unit].optim.split:  # every rank updates all of it
            done = self.over_network("gather", unit, grads, after=done)
        self.ready["sum", unit] = done

    def settle(self, unit: str) -> None:
        self.free["compute"] = max(self.free["compute"], self.ready["sum", unit])

    def store(self, unit: str) -> None:
        """What is on disk already of this step is read first, to be added to."""
        size, after = self.course.sizes[unit], self.ready["sum", unit]
        if self.course.placements[unit].grad.tier is Tier.DISK and unit in self.begun:
            after = max(after, self.on_disk("read sum", unit, size.grad_shard, after=self.ready["on disk", unit]))
        self.begun.add(unit)
        self.ready["sum", unit] = self.over_link("store", unit, size.grad_shard, after=after)

    def write_sum(self, unit: str) -> None:
        self.ready["on disk", unit] = self.on_disk(
            "write sum", unit, self.course.sizes[unit].grad_shard, after=self.ready["sum", unit]
        )

    def norm(self) -> float:
        """When all sums are there, or on their way to the disk."""
        sums = (self.ready["sum", unit] for unit in self.course.sizes)
        self.asked = max([self.free["compute"], *sums])
        return self.asked

    # --- the update ---

    def update(self, norm: float) -> None:
        """On the host the last unit first, and then all in the order of the forward; on the device beside it."""
        self.begun.clear()
        trained = [unit for unit, work in self.course.works.items() if work.updated_numel]
        remote = [unit for unit in trained if self.course.placements[unit].optim.tier is not Tier.DEVICE]
        for unit in [*remote[-1:], *remote[:-1]]:
            self._update_on_host(unit, norm)
        for unit in trained:
            if unit not in remote:
                self._update_on_device(unit, norm)

    def _update_on_host(self, unit: str, norm: float) -> None:
        """States on disk are read, updated and written a tile at a time by many threads: the disk and the host work side by side,
        and the slower of them sets the pace."""
        place, size, work = self.course.placements[unit], self.course.sizes[unit], self.course.works[unit]
        sums = size.grad_shard if place.grad.tier is Tier.DISK else 0
        new = size.weight_shard if place.param.tier is Tier.DISK else 0
        begins = max(norm, self.ready["on disk", unit])
        if sums or new or work.state_bytes:
            begins = max(begins, self.free["disk"])
        moved = self.on_disk("states", unit, 2 * work.state_bytes + sums + new, after=begins)
        done = self.do("host", "update", unit, work.updated_numel / self.machine.host_update_numel_s, after=begins)
        self.ready["updated", unit] = max(moved, done)
        self.stale.add(unit)

    def _update_on_device(self, unit: str, norm: float) -> None:
        place, size, work = self.course.placements[unit], self.course.sizes[unit], self.course.works[unit]
        after = norm
        if place.sums_rest is not Tier.DEVICE:
            after = self.over_link("load", unit, size.grad_shard, after=after)
        after = self.over_link("load", unit, work.fetched, after=after)
        done = self.do("compute", "update", unit, work.updated_numel / self.machine.device_update_numel_s, after=after)
        if place.param.tier is not Tier.DEVICE:
            done = self.over_link("store", unit, size.weight_shard, after=done)
        if place.param.tier is Tier.DISK:
            done = self.on_disk("write weights", unit, size.weight_shard, after=done)
        self.ready["updated", unit] = done
        self.stale.add(unit)
        if place.optim.split and not place.param.split and not work.lazy:
            self.gather(unit)  # at once, beside the update of the next


_ACTS: Mapping[tuple[Verb, Kind], Callable[[_Walk, str], None]] = {
    (Verb.READ, Kind.PARAM): _Walk.read,
    (Verb.GATHER, Kind.PARAM): _Walk.gather,
    (Verb.USE, Kind.PARAM): _Walk.forward,
    (Verb.USE, Kind.GRAD): _Walk.backward,
    (Verb.REDUCE, Kind.GRAD): _Walk.reduce,
    (Verb.SETTLE, Kind.GRAD): _Walk.settle,
    (Verb.STORE, Kind.GRAD): _Walk.store,
    (Verb.WRITE, Kind.GRAD): _Walk.write_sum,
}
