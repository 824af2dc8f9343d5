"""Plan: the list of steps that one cycle of training issues, the same on every rank. Pure; imports no torch.

A record of what the model did (`Event`s) is expanded into steps by each unit's placement, and fetching steps are
then moved earlier while a byte budget allows: that is all that prefetching is. `simulate` walks the same list, so
what is predicted is what runs.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import NamedTuple

from naught.errors import PlanError
from naught.placement import Kind, Placement, Tier

__all__ = [
    "Budgets",
    "Event",
    "Moment",
    "Peaks",
    "Plan",
    "Step",
    "UnitBytes",
    "Verb",
    "compile_plan",
    "expand",
    "hoist",
    "keep",
    "simulate",
]


class Moment(StrEnum):
    """What a hook can say of a unit."""

    ENTER = "enter"  # its forward begins
    EXIT = "exit"  # its forward has ended
    GRAD = "grad"  # the first gradient reaches its output
    DONE = "done"  # its own gradients are complete


class Event(NamedTuple):
    moment: Moment
    unit: str


class Verb(StrEnum):
    """What a step does; each verb has a lane of its own, in which steps keep their order."""

    READ = "read"  # disk to host
    LOAD = "load"  # host to device
    GATHER = "gather"  # every rank's shard to every rank
    USE = "use"  # the module computes
    RELEASE = "release"  # a gathered flat is freed
    COLLECT = "collect"  # a flat for this unit's gradients is opened
    REDUCE = "reduce"  # summed gradients go to their owners
    STORE = "store"  # device to host
    NORM = "norm"  # all ranks agree on norm and finiteness
    UPDATE = "update"  # the owner applies the rule
    WRITE = "write"  # host to disk


class Step(NamedTuple):
    verb: Verb
    kind: Kind
    unit: str


@dataclass(frozen=True)
class UnitBytes:
    """A unit's bytes on one rank: gathered weights, one rank's share of them, and so on."""

    weights: int
    weight_shard: int
    grads: int
    grad_shard: int
    state_shard: int
    # Held for the length of one reduce: the receive side of an all-to-all where the backend has no reduce-scatter.
    reduce_scratch: int = 0


@dataclass(frozen=True)
class Budgets:
    """How many bytes fetching may hold: gathered on the device, loaded to the device, read into the host."""

    gather_bytes: int = 0
    load_bytes: int = 0
    read_bytes: int = 0
    # A released unit is kept instead if no more than this is gathered before its next use.
    reuse_bytes: int = 0


@dataclass(frozen=True)
class Plan:
    steps: tuple[Step, ...]

    @cached_property
    def digest(self) -> str:
        """Equal for equal plans and for no others; ranks compare it after recording."""
        text = json.dumps([list(step) for step in self.steps], separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()


def compile_plan(
    events: Sequence[Event],
    placements: Mapping[str, Placement],
    sizes: Mapping[str, UnitBytes],
    *,
    budgets: Budgets,
    last: bool = True,
    eager: bool = False,
) -> Plan:
    """Turn the record of one micro-batch into the plan that every later one follows.

    `last` closes the cycle: gradients that stay whole are reduced, and updates follow. `eager` updates a unit right
    behind its reduce, which is right only when nothing waits for the norm.
    """
    steps = expand(events, placements, last=last, eager=eager)
    steps = keep(steps, sizes, live_bytes=budgets.gather_bytes, reuse_bytes=budgets.reuse_bytes)
    for verb, kind, budget_bytes in (
        (Verb.READ, Kind.PARAM, budgets.read_bytes),
        (Verb.READ, Kind.OPTIM, budgets.read_bytes),
        (Verb.LOAD, Kind.PARAM, budgets.load_bytes),
        (Verb.GATHER, Kind.PARAM, budgets.gather_bytes),
    ):
        steps = hoist(steps, verb, kind, sizes=sizes, budget_bytes=budget_bytes)
    return Plan(tuple(steps))


def expand(events: Sequence[Event], placements: Mapping[str, Placement], *, last: bool, eager: bool) -> list[Step]:
    """The steps that the events need, each where it is needed: no prefetching yet."""
    steps: list[Step] = []
    present = {unit for unit, placement in placements.items() if not placement.optim.split}
    entered: dict[str, None] = {}
    reduced: dict[str, None] = {}
    for moment, unit in events:
        if unit not in placements:
            raise PlanError(f'the record names a unit "{unit}" that the model does not have')
        placement = placements[unit]
        if moment in (Moment.ENTER, Moment.GRAD):
            entered.setdefault(unit)
            if unit not in present:
                # Whole weights are stale after the last update; split weights are absent after each release.
                steps += _fetch(unit, placement)
                present.add(unit)
            if moment is Moment.GRAD:
                steps.append(Step(Verb.COLLECT, Kind.GRAD, unit))
            steps.append(Step(Verb.USE, Kind.PARAM, unit))
            continue
        if placement.param.split and unit in present:
            steps.append(Step(Verb.RELEASE, Kind.PARAM, unit))
            present.discard(unit)
        if moment is Moment.DONE and (placement.grad.split or last):
            steps += _reduce(unit, placement)
            reduced.setdefault(unit)
            if last and eager:
                steps += _update(unit, placement)
    if last and not eager:
        steps.append(Step(Verb.NORM, Kind.GRAD, ""))
        # In the order of the next forward, so that its first unit is ready first.
        for unit in entered:
            if unit in reduced:
                steps += _update(unit, placements[unit])
    return steps


def _fetch(unit: str, placement: Placement) -> list[Step]:
    verbs = {
        Tier.DEVICE: [Verb.GATHER],
        Tier.HOST: [Verb.LOAD, Verb.GATHER],
        Tier.DISK: [Verb.READ, Verb.LOAD, Verb.GATHER],
    }[placement.param.tier]
    return [Step(verb, Kind.PARAM, unit) for verb in verbs]


def _reduce(unit: str, placement: Placement) -> list[Step]:
    verbs = {
        Tier.DEVICE: [Verb.REDUCE],
        Tier.HOST: [Verb.REDUCE, Verb.STORE],
        Tier.DISK: [Verb.REDUCE, Verb.STORE, Verb.WRITE],
    }[placement.grad.tier]
    return [Step(verb, Kind.GRAD, unit) for verb in verbs]


def _update(unit: str, placement: Placement) -> list[Step]:
    steps = [Step(Verb.READ, kind, unit) for kind in (Kind.GRAD, Kind.OPTIM) if placement.of(kind).tier is Tier.DISK]
    steps.append(Step(Verb.UPDATE, Kind.OPTIM, unit))
    return steps + [Step(Verb.WRITE, kind, unit) for kind in (Kind.OPTIM, Kind.PARAM) if placement.of(kind).tier is Tier.DISK]


def keep(steps: Sequence[Step], sizes: Mapping[str, UnitBytes], *, live_bytes: int, reuse_bytes: int) -> list[Step]:
    """Drop a release and the fetch that undoes it where the unit is soon used again and there is room to hold it."""
    kept = list(steps)
    # From the back: once an outer unit is kept, nothing stands between the release and the fetch of the one within.
    for at in range(len(kept) - 1, -1, -1):
        step = kept[at]
        again = _next_gather(kept, at) if step.verb is Verb.RELEASE else None
        if again is not None and _worth_keeping(kept, at, again, sizes, live_bytes, reuse_bytes):
            refetch = {Step(verb, Kind.PARAM, step.unit) for verb in (Verb.READ, Verb.LOAD, Verb.GATHER)}
            kept[at : again + 1] = [other for other in kept[at + 1 : again + 1] if other not in refetch]
    return kept


def _next_gather(steps: Sequence[Step], at: int) -> int | None:
    wanted = Step(Verb.GATHER, Kind.PARAM, steps[at].unit)
    return next((later for later in range(at + 1, len(steps)) if steps[later] == wanted), None)


def _worth_keeping(
    steps: Sequence[Step], at: int, again: int, sizes: Mapping[str, UnitBytes], live_bytes: int, reuse_bytes: int
) -> bool:
    between = [step for step in steps[at + 1 : again] if step.verb is Verb.GATHER]
    if sum(sizes[step.unit].weights for step in between) > reuse_bytes:
        return False
    live = _held(steps, _FETCHES[Verb.GATHER, Kind.PARAM], sizes)
    extra = sizes[steps[at].unit].weights
    return not between or all(held + extra <= live_bytes for held in live[at + 1 : again])


class _Buffer(NamedTuple):
    """Memory that one step of a unit opens and a later one closes; `size` is a field of UnitBytes."""

    name: str
    tier: Tier
    opens: tuple[Verb, Kind]
    closes: tuple[tuple[Verb, Kind], ...]
    size: str
    when: Callable[[Placement], bool] = lambda _: True

    def nbytes(self, size: UnitBytes) -> int:
        nbytes: int = getattr(size, self.size)
        return nbytes


# Everything that a plan holds beyond the states at rest. A buffer is closed by the first closing step that comes.
_BUFFERS = (
    _Buffer("read weights", Tier.HOST, (Verb.READ, Kind.PARAM), ((Verb.LOAD, Kind.PARAM),), "weight_shard"),
    _Buffer("loaded weights", Tier.DEVICE, (Verb.LOAD, Kind.PARAM), ((Verb.GATHER, Kind.PARAM),), "weight_shard"),
    _Buffer(
        "gathered weights",
        Tier.DEVICE,
        (Verb.GATHER, Kind.PARAM),
        ((Verb.RELEASE, Kind.PARAM),),
        "weights",
        when=lambda placement: placement.param.split,  # whole weights rest on the device: not the plan's to hold
    ),
    _Buffer(
        "gradient flats",
        Tier.DEVICE,
        (Verb.COLLECT, Kind.GRAD),
        ((Verb.REDUCE, Kind.GRAD),),
        "grads",
        when=lambda placement: placement.grad.split,
    ),
    _Buffer(
        "whole gradients",
        Tier.DEVICE,
        (Verb.COLLECT, Kind.GRAD),
        ((Verb.UPDATE, Kind.OPTIM),),
        "grads",
        when=lambda placement: not placement.grad.split,
    ),
    _Buffer("reduce scratch", Tier.DEVICE, (Verb.REDUCE, Kind.GRAD), ((Verb.REDUCE, Kind.GRAD),), "reduce_scratch"),
    _Buffer(
        "owned gradients",
        Tier.DEVICE,
        (Verb.REDUCE, Kind.GRAD),
        ((Verb.STORE, Kind.GRAD), (Verb.UPDATE, Kind.OPTIM)),
        "grad_shard",
        when=lambda placement: placement.grad.split,
    ),
    _Buffer(
        "stored gradients",
        Tier.HOST,
        (Verb.STORE, Kind.GRAD),
        ((Verb.WRITE, Kind.GRAD), (Verb.UPDATE, Kind.OPTIM)),
        "grad_shard",
    ),
    _Buffer("read gradients", Tier.HOST, (Verb.READ, Kind.GRAD), ((Verb.UPDATE, Kind.OPTIM),), "grad_shard"),
    _Buffer("read states", Tier.HOST, (Verb.READ, Kind.OPTIM), ((Verb.WRITE, Kind.OPTIM),), "state_shard"),
)
_FETCHES = {buffer.opens: buffer for buffer in _BUFFERS if buffer.opens[0] in (Verb.READ, Verb.LOAD, Verb.GATHER)}
_OPENED_BY = {step: [buffer for buffer in _BUFFERS if buffer.opens == step] for step in {b.opens for b in _BUFFERS}}
_CLOSED_BY = {step: [buffer for buffer in _BUFFERS if step in buffer.closes] for step in {c for b in _BUFFERS for c in b.closes}}


def hoist(steps: Sequence[Step], verb: Verb, kind: Kind, *, sizes: Mapping[str, UnitBytes], budget_bytes: int) -> list[Step]:
    """Move each step of one verb and kind as early as the bytes it would hold meanwhile allow.

    Never past a step of its own unit, never past another of its own lane, and never so that what these steps hold
    exceeds the budget where it did not before.
    """
    buffer = _FETCHES[verb, kind]
    moved = list(steps)
    held = _held(moved, buffer, sizes)
    for at, step in enumerate(moved):
        if (step.verb, step.kind) != buffer.opens:
            continue
        need = buffer.nbytes(sizes[step.unit])
        to = at
        while to > 0 and _may_pass(step, moved[to - 1]):
            # held[i] is what is open after step i: the passed step would both begin and end with one buffer more.
            before = held[to - 2] if to > 1 else 0
            if max(before, held[to - 1]) + need > budget_bytes:
                break
            to -= 1
        if to < at:
            moved.insert(to, moved.pop(at))
            before = held[to - 1] if to else 0
            held[to : at + 1] = [before + need, *(passed + need for passed in held[to:at])]
    return moved


def _may_pass(step: Step, earlier: Step) -> bool:
    return step.unit != earlier.unit and step.verb is not earlier.verb


def _held(steps: Sequence[Step], buffer: _Buffer, sizes: Mapping[str, UnitBytes]) -> list[int]:
    """Bytes that one kind of buffer has open after each step."""
    open_units: dict[str, int] = {}
    total = 0
    held: list[int] = []
    for verb, kind, unit in steps:
        if (verb, kind) == buffer.opens and unit not in open_units:
            open_units[unit] = buffer.nbytes(sizes[unit])
            total += open_units[unit]
        elif (verb, kind) in buffer.closes:
            total -= open_units.pop(unit, 0)
        held.append(total)
    return held


@dataclass(frozen=True)
class Peaks:
    """The most that a plan holds at once beyond the states at rest: on each tier, and in each kind of buffer."""

    tiers: Mapping[Tier, int]
    buffers: Mapping[str, int]


def simulate(steps: Iterable[Step], placements: Mapping[str, Placement], sizes: Mapping[str, UnitBytes]) -> Peaks:
    """Walk the plan and count what it holds. A step opens its buffers before it closes others."""
    opened: dict[tuple[str, str], int] = {}
    tiers = dict.fromkeys(Tier, 0)
    buffers = dict.fromkeys((buffer.name for buffer in _BUFFERS), 0)
    tier_peaks, buffer_peaks = dict(tiers), dict(buffers)
    for verb, kind, unit in steps:
        for buffer in _OPENED_BY.get((verb, kind), ()):
            if (buffer.name, unit) not in opened and buffer.when(placements[unit]):
                nbytes = opened[buffer.name, unit] = buffer.nbytes(sizes[unit])
                tiers[buffer.tier] += nbytes
                buffers[buffer.name] += nbytes
                tier_peaks[buffer.tier] = max(tier_peaks[buffer.tier], tiers[buffer.tier])
                buffer_peaks[buffer.name] = max(buffer_peaks[buffer.name], buffers[buffer.name])
        for buffer in _CLOSED_BY.get((verb, kind), ()):
            nbytes = opened.pop((buffer.name, unit), 0)
            tiers[buffer.tier] -= nbytes
            buffers[buffer.name] -= nbytes
    return Peaks(tier_peaks, buffer_peaks)
