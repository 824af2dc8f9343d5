"""Planned: what an engine will hold, in numbers: the peaks of its compiled plans, and its units as if they were whole. Walks
plans and adds up sizes; allocates nothing and waits for nobody."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from naught.accumulation import Accumulation
from naught.disk_sum import DiskSum
from naught.formulas import SMALL_MOMENT
from naught.holding import Buffer, simulate
from naught.optimizer import Optimizer
from naught.placement import Tier
from naught.schedule import Schedule
from naught.segment import Segment
from naught.shelves import HOST
from naught.shortage import Whole
from naught.spill import DISK, Stored
from naught.steps import Moment, Placements, Sizes, Step

__all__ = ["at_rest", "is_recomputing", "planned_of", "planned_peaks", "whole_units"]

# What the meter counts of what a plan holds.
_METERED = (Buffer.GATHERED, Buffer.GRAD_FLATS, Buffer.WHOLE_GRADS, Buffer.SCRATCH, Buffer.OWNED_GRADS)
_WHERE = {Tier.DEVICE: "", Tier.HOST: HOST, Tier.DISK: DISK}
_WIDE = 4  # bytes of an element of masters and moments


def planned_of(schedule: Schedule, accumulation: Accumulation, optimizer: Optimizer | None) -> dict[str, int]:
    """The peaks of the passes that have a plan, one behind the other as a step has them, with what rests beside them."""
    again = accumulation.every and accumulation.steps > 1  # sums over the ranks are taken more than once in a step
    summed = schedule.steps_of(last=True)
    # Of micro-batches that are not the last one stands for all: those behind it hold no more.
    step = schedule.steps_of(last=False) + summed
    walks = [step, *(program.steps for (training, _), program in schedule.programs.items() if not training)]
    sizes = {name: unit.sizes() for name, unit in schedule.units.items()}
    placements = {name: unit.placement for name, unit in schedule.units.items()}
    peaks = at_rest(schedule, optimizer) | planned_peaks(walks, placements, sizes)
    if again and summed:  # a sum in a whole flat moves aside when the next is made there
        peaks[Buffer.OWNED_GRADS] += sum(sizes[name].grad_shard for name, place in placements.items() if not place.grad.split)
    return peaks


def planned_peaks(walks: Iterable[Sequence[Step]], placements: Placements, sizes: Sizes) -> dict[str, int]:
    """The most that any of these lists of steps holds of each kind of buffer, by the meter's names for them."""
    peaks = [simulate(steps, placements, sizes).buffers for steps in walks]
    return {buffer.value: max((peak[buffer] for peak in peaks), default=0) for buffer in _METERED}


def at_rest(schedule: Schedule, optimizer: Optimizer | None) -> dict[str, int]:
    """Bytes of weights, masters and states between steps, also of states that the first step has still to make."""
    rest = Counter(dict.fromkeys(("weights", "masters", "rests", "states"), 0))
    hosts = set()
    for unit in schedule.units.values():
        for segment in unit.segments:
            weights, states = segment.weights, segment.kept
            updates = _WHERE[unit.placement.optim.tier] if segment.remote else ""
            if not weights.stays:
                nbytes = weights.shard_bytes if weights.stored is None else weights.stored.nbytes
                rest[_WHERE[unit.placement.param.tier] + "weights"] += nbytes
            else:
                rest["weights"] += weights.flat.nbytes
            rest[updates + "masters"] += 0 if states.master is None else states.master.nbytes
            rest["rests"] += 0 if states.rests is None else states.rests.nbytes
            each = SMALL_MOMENT if states.rest.small else _WIDE
            of_moment = states.master.nbytes if isinstance(states.master, Stored) else int(each * states.owned.numel)
            rest[updates + "states"] += of_moment * _moments(segment, optimizer)
            if segment.remote:
                assert segment.home.host is not None
                if isinstance(segment.grads.owned, DiskSum):
                    rest[DISK + "gradients"] += segment.grads.owned.stored.nbytes
                elif segment.home.host.shared_rooms is None:
                    rest[HOST + "gradients"] += segment.grads.owned_bytes * segment.home.host.own_rooms
            hosts |= {segment.home.host} - {None}
    rest[Buffer.STAGING.value] = sum(host.ferry.staging.nbytes for host in hosts if host is not None)
    shared = [host.shared_rooms for host in hosts if host is not None and host.shared_rooms is not None]
    rest[HOST + "gradients"] += sum(rooms.nbytes for rooms in shared)
    return dict(rest)


def whole_units(schedule: Schedule, optimizer: Optimizer | None) -> list[Whole]:
    """What each unit would take if nothing of it was split."""
    return [
        Whole(
            weights=sum(segment.weights.flat.nbytes for segment in unit.segments),
            grads=sum(segment.grads.flat.nbytes for segment in unit.trained),
            states=sum(
                _WIDE * segment.layout.numel * (_moments(segment, optimizer) + (segment.kept.master is not None))
                for segment in unit.trained
            ),
        )
        for unit in schedule.units.values()
    ]


def _moments(segment: Segment, optimizer: Optimizer | None) -> int:
    """How many numbers of each element the rule remembers."""
    if optimizer is None:
        return 0
    hypers: Sequence[Mapping[str, object]] = optimizer.param_groups
    return len({name for group in set(segment.kept.groups) for name in optimizer.rule.states(hypers[group])})


def is_recomputing(schedule: Schedule) -> bool:
    """Whether a forward has begun in a backward, in the pass under way or in one that has a plan: activations are
    checkpointed."""
    records = [[leg.event for leg in program.legs if leg.event is not None] for program in schedule.programs.values()]
    records += [schedule.current.events] if schedule.current is not None else []
    for events in records:
        moments = [event.moment for event in events]
        if Moment.GRAD in moments and Moment.ENTER in moments[moments.index(Moment.GRAD) :]:
            return True
    return False
