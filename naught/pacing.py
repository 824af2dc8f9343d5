"""Pacing: how long a step takes on a machine: its plan is walked, and the update behind it. Pure."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from naught.lanes import Bar, Lane, Lanes
from naught.machine import Machine
from naught.placement import Kind, Tier
from naught.rooms import LEAVING, UNITS_SUMMED
from naught.steps import Placements, Sizes, Step, Verb, order_of_updates

__all__ = ["Course", "Pace", "Work", "pace"]

_STEPS = 3  # until a step is like the one before


@dataclass(frozen=True)
class Work:
    """What a unit asks of a machine beside its plan, on one rank: operations of its forward and of its backward, which has those
    that are computed again; bytes that come up from the host, for each gather where it rests there, else after each update there;
    elements that it updates, and bytes of states on disk that this reads and writes; and bytes of activations that go away with
    its forward and come back for its backward."""

    forward_flops: float = 0.0
    backward_flops: float = 0.0
    raised: int = 0
    fetched: int = 0  # weights that an update on the device brings up to write them back
    updated_numel: int = 0
    state_bytes: int = 0
    away_bytes: int = 0
    lazy: bool = False  # new weights are gathered where they are used


@dataclass(frozen=True)
class Course:
    """A step: its plan, where units rest and what they take, and where activations go."""

    steps: Sequence[Step]
    placements: Placements
    sizes: Sizes
    works: Mapping[str, Work]
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
    """Walk a few steps, and tell of the last: an update, and the forward and the backward behind it. A unit computes once its
    weights are there, its gradients set out once they are made, the norm is known once all are summed on the device, an update on
    the host waits for it and for its own gradients, and what needs new weights waits for that unit's update alone. Updates that
    the plan has in the backward do not wait for the norm."""
    walk = _Walk(course, Lanes(machine), stale=set(course.sizes))
    norms = [0.0]
    for _ in range(_STEPS):
        for verb, kind, unit in course.steps:
            act = _ACTS.get((verb, kind))
            if act is not None and unit in course.sizes:
                act(walk, unit)
        norms.append(walk.norm())
        walk.update(norms[-1])
    walk.lanes.bring_all()
    begins, ends = norms[-2:]
    bars = (bar for bar in walk.lanes.bars if begins <= bar.start_s < ends)
    return Pace(
        tuple(bar._replace(start_s=bar.start_s - begins, stop_s=bar.stop_s - begins) for bar in bars), seconds=ends - begins
    )


class _Ready(Enum):
    """What of a unit is ready at some time."""

    READ = auto()  # weights, from disk
    WEIGHTS = auto()  # gathered
    AWAY = auto()  # activations, where they rest
    SUMMED = auto()  # gradients, on the device
    ARRIVED = auto()  # gradients, on the host
    WRITTEN = auto()  # gradients, on disk
    UPDATED = auto()


@dataclass
class _Walk:
    """Where a walk is, and when what a unit needs is there."""

    course: Course
    lanes: Lanes
    stale: set[str]  # units whose update was not gathered since
    ready: dict[tuple[_Ready, str], float] = field(default_factory=lambda: defaultdict(float))
    begun: set[str] = field(default_factory=set)  # units whose sums on the host are of this step
    leaving: deque[float] = field(default_factory=deque)  # when activations on their way are gone
    updated: set[str] = field(default_factory=set)  # in this step's backward
    rooms_free_s: deque[float] = field(default_factory=deque)  # of those that sums share until such an update is over

    # --- weights ---

    def read(self, unit: str) -> None:
        after = max(self.lanes.asked, self.ready[_Ready.UPDATED, unit])
        self.ready[_Ready.READ, unit] = self.lanes.on_disk("read", unit, self.course.sizes[unit].weight_shard, after=after)

    def gather(self, unit: str) -> None:
        place, work = self.course.placements[unit], self.course.works.get(unit, Work())
        if unit not in self.stale and not place.param.split:
            return  # they are there
        after = max(self.lanes.asked, self.ready[_Ready.UPDATED, unit], self.ready[_Ready.READ, unit])
        if place.param.tier is Tier.DEVICE:
            after = max(after, self.lanes.arrival(unit))
        else:
            after = self.lanes.up("load", unit, work.raised, after=after)
        self.stale.discard(unit)
        self.ready[_Ready.WEIGHTS, unit] = self.lanes.over_network("gather", unit, self.course.sizes[unit].weights, after=after)

    # --- forward and backward ---

    def forward(self, unit: str) -> None:
        work = self.course.works.get(unit, Work())
        done = self.lanes.compute("forward", unit, work.forward_flops, after=self.ready[_Ready.WEIGHTS, unit])
        if work.away_bytes and self.course.rest is not Tier.DEVICE:
            gone = self.lanes.down("put away", unit, work.away_bytes, after=done)
            self.leaving.append(gone)
            if len(self.leaving) > LEAVING:  # the device waits for the oldest: its memory is for others
                self.lanes.hold(Lane.COMPUTE, self.leaving.popleft())
            if self.course.rest is Tier.DISK:
                gone = self.lanes.on_disk("put away", unit, work.away_bytes, after=gone)
            self.ready[_Ready.AWAY, unit] = gone

    def backward(self, unit: str) -> None:
        work = self.course.works.get(unit, Work())
        self.leaving.clear()
        after = self.ready[_Ready.WEIGHTS, unit]
        if work.away_bytes and self.course.rest is not Tier.DEVICE:
            back = max(self.lanes.asked, self.ready[_Ready.AWAY, unit])
            if self.course.rest is Tier.DISK:
                back = self.lanes.on_disk("bring back", unit, work.away_bytes, after=back)
            after = max(after, self.lanes.up("bring back", unit, work.away_bytes, after=back))
        self.lanes.compute("backward", unit, work.backward_flops, after=after)

    # --- gradients ---

    def reduce(self, unit: str) -> None:
        grads = self.course.sizes[unit].grads
        done = self.lanes.over_network("reduce", unit, grads, after=self.lanes.free[Lane.COMPUTE])
        if not self.course.placements[unit].optim.split:  # every rank updates all of it
            done = self.lanes.over_network("gather", unit, grads, after=done)
        self.ready[_Ready.SUMMED, unit] = done

    def settle(self, unit: str) -> None:
        self.lanes.hold(Lane.COMPUTE, self.ready[_Ready.SUMMED, unit])

    def store(self, unit: str) -> None:
        """The device adds to what is below already of this step, once it is there; what is on disk is read first."""
        size, summed = self.course.sizes[unit], self.ready[_Ready.SUMMED, unit]
        if len(self.rooms_free_s) >= UNITS_SUMMED:
            summed = max(summed, self.rooms_free_s.popleft())
            self.lanes.hold(Lane.COMPUTE, summed)  # it asks for nothing else meanwhile
        if unit in self.begun:
            below = self.ready[_Ready.ARRIVED, unit]
            if self.course.placements[unit].grad.tier is Tier.DISK:
                below = self.lanes.on_disk("read sum", unit, size.grad_shard, after=self.ready[_Ready.WRITTEN, unit])
            summed = max(summed, self.lanes.up("load", unit, size.grad_shard, after=below))
        self.begun.add(unit)
        self.ready[_Ready.SUMMED, unit] = summed
        self.ready[_Ready.ARRIVED, unit] = self.lanes.down("store", unit, size.grad_shard, after=summed)

    def write_sum(self, unit: str) -> None:
        self.ready[_Ready.WRITTEN, unit] = self.lanes.on_disk(
            "write sum", unit, self.course.sizes[unit].grad_shard, after=self.ready[_Ready.ARRIVED, unit]
        )

    def norm(self) -> float:
        """When the device has all sums: those that rest elsewhere may be on their way."""
        sums = (self.ready[_Ready.SUMMED, unit] for unit in self.course.sizes)
        self.lanes.asked = max([self.lanes.free[Lane.COMPUTE], *sums])
        return self.lanes.asked

    # --- the update ---

    def update(self, norm: float) -> None:
        """On the host, and on the device beside it."""
        self.begun.clear()
        trained = [unit for unit, work in self.course.works.items() if work.updated_numel and unit not in self.updated]
        self.updated.clear()
        remote = [unit for unit in trained if self.course.placements[unit].optim.tier is not Tier.DEVICE]
        for unit in order_of_updates(remote):
            self._update_on_host(unit, norm)
        for unit in trained:
            if unit not in remote:
                self._update_on_device(unit, norm)

    def update_early(self, unit: str) -> None:
        """In the backward, as soon as its gradients are summed."""
        self.updated.add(unit)
        if self.course.placements[unit].optim.tier is Tier.DEVICE:
            self._update_on_device(unit, self.ready[_Ready.SUMMED, unit])
            return
        self._update_on_host(unit, self.ready[_Ready.SUMMED, unit])
        if self.course.placements[unit].sums_rest is Tier.HOST:
            self.rooms_free_s.append(self.ready[_Ready.UPDATED, unit])

    def _update_on_host(self, unit: str, norm: float) -> None:
        """States on disk are read, updated and written a tile at a time by many threads: the disk and the host work side by side,
        and the slower of them sets the pace. New weights that rest on the device go there at once."""
        place, size, work = self.course.placements[unit], self.course.sizes[unit], self.course.works[unit]
        sums = size.grad_shard if place.grad.tier is Tier.DISK else 0
        new = size.weight_shard if place.param.tier is Tier.DISK else 0
        begins = max(norm, self.ready[_Ready.ARRIVED, unit], self.ready[_Ready.WRITTEN, unit])
        if sums or new or work.state_bytes:
            begins = max(begins, self.lanes.free[Lane.DISK])
        moved = self.lanes.on_disk("states", unit, 2 * work.state_bytes + sums + new, after=begins)
        done = self.lanes.update_on_host(unit, work.updated_numel, after=begins)
        self.ready[_Ready.UPDATED, unit] = max(moved, done)
        if place.param.tier is Tier.DEVICE:
            self.lanes.load_at(max(moved, done), unit, work.raised)
        self.stale.add(unit)

    def _update_on_device(self, unit: str, norm: float) -> None:
        place, size, work = self.course.placements[unit], self.course.sizes[unit], self.course.works[unit]
        after = norm
        if place.sums_rest is not Tier.DEVICE:
            after = self.lanes.up("load", unit, size.grad_shard, after=max(norm, self.ready[_Ready.ARRIVED, unit]))
        after = self.lanes.up("load", unit, work.fetched, after=after)
        seconds = work.updated_numel / self.lanes.machine.device_update_numel_s
        done = self.lanes.do(Lane.COMPUTE, "update", unit, seconds, after=after)
        if place.param.tier is not Tier.DEVICE:
            done = self.lanes.down("store", unit, size.weight_shard, after=done)
        if place.param.tier is Tier.DISK:
            done = self.lanes.on_disk("write weights", unit, size.weight_shard, after=done)
        self.ready[_Ready.UPDATED, unit] = done
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
    (Verb.UPDATE, Kind.OPTIM): _Walk.update_early,
}
