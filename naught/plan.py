"""Plan: the list of steps that one pass of training issues, the same on every rank. Pure; imports no torch.

A record of what the model did (`Event`s) is expanded into steps by each unit's placement, and fetching steps are
then moved earlier while a byte budget allows: that is all that prefetching is. Every event leaves one anchor in the
list (`use` or `leave`), up to which the list is issued when the event happens again. `simulate` walks the same list,
so what is predicted is what runs.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import NamedTuple

from naught.errors import PlanError
from naught.placement import Kind, Placement, Tier

__all__ = [
    "EVERY_UNIT",
    "Budgets",
    "Buffer",
    "Event",
    "Moment",
    "Pass",
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
    "sink",
]

# What a step that concerns all units at once has for a unit. No module can have this name.
EVERY_UNIT = "*"


class Moment(StrEnum):
    """What a hook can say of a unit."""

    ENTER = "enter"  # its forward begins (also a recompute, between grad and done)
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
    USE = "use"  # anchor: the module computes from here, forward (param) or backward (grad)
    LEAVE = "leave"  # anchor: the module has computed, forward (param) or backward (grad)
    RELEASE = "release"  # a gathered flat is freed
    COLLECT = "collect"  # a flat for this unit's gradients is opened
    REDUCE = "reduce"  # gradients set out for their owners
    SETTLE = "settle"  # their sum has arrived
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
    """A unit's bytes on one rank: gathered weights, one rank's share of them, and so on. A unit that is not trained is
    never reduced or updated."""

    weights: int
    weight_shard: int
    grads: int
    grad_shard: int
    state_shard: int
    # Held from reduce to settle: the receive side where the backend has no reduce-scatter.
    reduce_scratch: int = 0
    trained: bool = True


class Pass(NamedTuple):
    """Which micro-batch of a step a plan is for. The first finds whole weights stale; the last updates.

    `eager` updates a unit right behind its reduce, which is right only when nothing waits for the norm.
    """

    first: bool = True
    last: bool = True
    eager: bool = False


@dataclass(frozen=True)
class Plan:
    steps: tuple[Step, ...]

    @cached_property
    def digest(self) -> str:
        """Equal for equal plans and for no others; ranks compare it after recording."""
        text = json.dumps([list(step) for step in self.steps], separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()


Placements = Mapping[str, Placement]
Sizes = Mapping[str, UnitBytes]


def compile_plan(events: Sequence[Event], placements: Placements, sizes: Sizes, *, budgets: Budgets, which: Pass) -> Plan:
    """Turn the record of one micro-batch into the plan that every later one follows."""
    steps = expand(events, placements, sizes, which)
    steps = keep(steps, placements, sizes, budgets)
    for verb in (Verb.READ, Verb.LOAD, Verb.GATHER):
        steps = hoist(steps, verb, placements, sizes, budgets)
    return Plan(tuple(sink(steps) if budgets.overlap_reduce else steps))


# --- from events to steps ---------------------------------------------------------------------------------------------


def expand(events: Sequence[Event], placements: Placements, sizes: Sizes, which: Pass) -> list[Step]:
    """The steps that the events need, each where it is needed: no prefetching yet."""
    expansion = _Expansion(placements, sizes, which)
    last_done = {event.unit: at for at, event in enumerate(events) if event.moment is Moment.DONE}
    for at, (moment, unit) in enumerate(events):
        if unit not in placements:
            raise PlanError(f'the record names a unit "{unit}" that the model does not have')
        if moment in (Moment.ENTER, Moment.GRAD):
            expansion.open(unit, backward=moment is Moment.GRAD)
        elif moment is Moment.EXIT:
            expansion.leave(unit)
        else:
            expansion.finish(unit, for_good=last_done[unit] == at)
    expansion.close()
    return expansion.steps


class _Expansion:
    """The list so far, and what is known of each unit at its end."""

    def __init__(self, placements: Placements, sizes: Sizes, which: Pass) -> None:
        self.placements, self.sizes, self.which = placements, sizes, which
        self.steps: list[Step] = []
        # Whole weights are stale after an update that only owners made; split ones are absent until gathered.
        self.present = {
            unit for unit, place in placements.items() if not place.param.split and not (place.optim.split and which.first)
        }
        self.depth: dict[str, int] = {}  # forwards that have begun and not ended, in order of first use
        self.backward: set[str] = set()  # between grad and done
        self.reduced: set[str] = set()

    def open(self, unit: str, *, backward: bool) -> None:
        if unit not in self.present:
            self._add(unit, Kind.PARAM, *_FETCH[self.placements[unit].param.tier])
            self.present.add(unit)
        if backward:
            if self.sizes[unit].trained and unit not in self.backward:
                self._add(unit, Kind.GRAD, Verb.COLLECT)
            self.backward.add(unit)
        else:
            self.depth[unit] = self.depth.get(unit, 0) + 1
        self._add(unit, Kind.GRAD if backward else Kind.PARAM, Verb.USE)

    def leave(self, unit: str) -> None:
        self.depth[unit] = max(0, self.depth.get(unit, 0) - 1)
        self._release_if_idle(unit)
        self._add(unit, Kind.PARAM, Verb.LEAVE)

    def finish(self, unit: str, *, for_good: bool) -> None:
        """A unit's gradients are complete, for now or for good: a late gradient may follow."""
        placement = self.placements[unit]
        self.backward.discard(unit)
        self._release_if_idle(unit)
        # Whole gradients wait for the last micro-batch and for the last of their own: summing them twice is wrong.
        due = placement.grad.split or (self.which.last and for_good)
        if self.sizes[unit].trained and due:
            on_top = unit in self.reduced or not self.which.first
            if placement.grad.tier is Tier.DISK and on_top:
                self._add(unit, Kind.GRAD, Verb.READ)
            self._add(unit, Kind.GRAD, Verb.REDUCE, Verb.SETTLE, *_STASH[placement.grad.tier])
            self.reduced.add(unit)
            if self.which.last and self.which.eager and for_good:
                self._update(unit)
        self._add(unit, Kind.GRAD, Verb.LEAVE)

    def close(self) -> None:
        if not self.which.last or self.which.eager or not self.reduced:
            return
        self._add(EVERY_UNIT, Kind.GRAD, Verb.NORM)
        # In the order of the next forward, so that its first unit is ready first; units that only a backward met last.
        for unit in [*(unit for unit in self.depth if unit in self.reduced), *sorted(self.reduced - set(self.depth))]:
            self._update(unit)

    def _update(self, unit: str) -> None:
        """Bring gradient and states to where the update runs, and new weights to where they rest."""
        placement = self.placements[unit]
        on_device = placement.optim.tier is Tier.DEVICE
        grad, param = placement.grad.tier, placement.param.tier
        if grad is Tier.DISK:
            self._add(unit, Kind.GRAD, Verb.READ)
        if on_device != (grad is Tier.DEVICE):
            self._add(unit, Kind.GRAD, Verb.LOAD if on_device else Verb.STORE)
        if placement.optim.tier is Tier.DISK:
            self._add(unit, Kind.OPTIM, Verb.READ)
        self._add(unit, Kind.OPTIM, Verb.UPDATE)
        if placement.optim.tier is Tier.DISK:
            self._add(unit, Kind.OPTIM, Verb.WRITE)
        if on_device != (param is Tier.DEVICE):
            self._add(unit, Kind.PARAM, Verb.STORE if on_device else Verb.LOAD)
        if param is Tier.DISK:
            self._add(unit, Kind.PARAM, Verb.WRITE)
        if placement.optim.split and not placement.param.split:
            self.present.discard(unit)

    def _release_if_idle(self, unit: str) -> None:
        idle = not self.depth.get(unit) and unit not in self.backward
        if idle and self.placements[unit].param.split and unit in self.present:
            self._add(unit, Kind.PARAM, Verb.RELEASE)
            self.present.discard(unit)

    def _add(self, unit: str, kind: Kind, *verbs: Verb) -> None:
        self.steps += [Step(verb, kind, unit) for verb in verbs]


_FETCH = {
    Tier.DEVICE: (Verb.GATHER,),
    Tier.HOST: (Verb.LOAD, Verb.GATHER),
    Tier.DISK: (Verb.READ, Verb.LOAD, Verb.GATHER),
}
_STASH: dict[Tier, tuple[Verb, ...]] = {
    Tier.DEVICE: (),
    Tier.HOST: (Verb.STORE,),
    Tier.DISK: (Verb.STORE, Verb.WRITE),
}


# --- what a list holds ------------------------------------------------------------------------------------------------


class Buffer(StrEnum):
    """Memory that the plan holds beyond the states at rest."""

    READ_WEIGHTS = "read weights"
    READ_GRADS = "read gradients"
    READ_STATES = "read states"
    LOADED_WEIGHTS = "loaded weights"
    LOADED_GRADS = "loaded gradients"
    AHEAD = "weights ahead of their use"  # a part of the next one, or of whole weights: never added to a tier
    GATHERED = "gathered weights"
    GRAD_FLATS = "gradient flats"
    WHOLE_GRADS = "whole gradients"
    SCRATCH = "reduce scratch"
    OWNED_GRADS = "owned gradients"
    STORED_GRADS = "stored gradients"
    NEW_WEIGHTS = "new weights"


class _Life(NamedTuple):
    """A buffer's tier, the step that opens it, the steps of which the first closes it, and its size."""

    tier: Tier | None
    opens: tuple[Verb, Kind]
    closes: tuple[tuple[Verb, Kind], ...]
    nbytes: Callable[[UnitBytes], int]
    when: Callable[[Placement], bool] = lambda _: True


_UPDATED = (Verb.UPDATE, Kind.OPTIM)
_LIVES: Mapping[Buffer, _Life] = {
    Buffer.READ_WEIGHTS: _Life(Tier.HOST, (Verb.READ, Kind.PARAM), ((Verb.LOAD, Kind.PARAM),), lambda size: size.weight_shard),
    Buffer.READ_GRADS: _Life(
        Tier.HOST, (Verb.READ, Kind.GRAD), ((Verb.WRITE, Kind.GRAD), _UPDATED), lambda size: size.grad_shard
    ),
    Buffer.READ_STATES: _Life(Tier.HOST, (Verb.READ, Kind.OPTIM), ((Verb.WRITE, Kind.OPTIM),), lambda size: size.state_shard),
    Buffer.LOADED_WEIGHTS: _Life(
        Tier.DEVICE,
        (Verb.LOAD, Kind.PARAM),
        ((Verb.GATHER, Kind.PARAM),),
        lambda size: size.weight_shard,
        when=lambda place: place.param.tier is not Tier.DEVICE,  # else they are loaded to where they rest
    ),
    Buffer.LOADED_GRADS: _Life(Tier.DEVICE, (Verb.LOAD, Kind.GRAD), (_UPDATED,), lambda size: size.grad_shard),
    Buffer.AHEAD: _Life(
        None, (Verb.GATHER, Kind.PARAM), ((Verb.USE, Kind.PARAM), (Verb.USE, Kind.GRAD)), lambda size: size.weights
    ),
    Buffer.GATHERED: _Life(
        Tier.DEVICE,
        (Verb.GATHER, Kind.PARAM),
        ((Verb.RELEASE, Kind.PARAM),),
        lambda size: size.weights,
        when=lambda place: place.param.split,  # whole weights rest on the device: not the plan's to hold
    ),
    Buffer.GRAD_FLATS: _Life(
        Tier.DEVICE,
        (Verb.COLLECT, Kind.GRAD),
        ((Verb.SETTLE, Kind.GRAD),),
        lambda size: size.grads,
        when=lambda place: place.grad.split,
    ),
    Buffer.WHOLE_GRADS: _Life(
        Tier.DEVICE,
        (Verb.COLLECT, Kind.GRAD),
        (_UPDATED,),
        lambda size: size.grads,
        when=lambda place: not place.grad.split,
    ),
    Buffer.SCRATCH: _Life(Tier.DEVICE, (Verb.REDUCE, Kind.GRAD), ((Verb.SETTLE, Kind.GRAD),), lambda size: size.reduce_scratch),
    Buffer.OWNED_GRADS: _Life(
        Tier.DEVICE,
        (Verb.SETTLE, Kind.GRAD),
        ((Verb.STORE, Kind.GRAD), _UPDATED),
        lambda size: size.grad_shard,
        when=lambda place: place.grad.split,
    ),
    Buffer.STORED_GRADS: _Life(
        Tier.HOST, (Verb.STORE, Kind.GRAD), ((Verb.WRITE, Kind.GRAD), _UPDATED), lambda size: size.grad_shard
    ),
    Buffer.NEW_WEIGHTS: _Life(
        Tier.HOST,
        _UPDATED,
        ((Verb.WRITE, Kind.PARAM),),
        lambda size: size.weight_shard,
        when=lambda place: place.param.tier is Tier.DISK,
    ),
}
_OPENED_BY: dict[tuple[Verb, Kind], list[Buffer]] = {}
_CLOSED_BY: dict[tuple[Verb, Kind], list[Buffer]] = {}
for _buffer, _life in _LIVES.items():
    _OPENED_BY.setdefault(_life.opens, []).append(_buffer)
    for _step in _life.closes:
        _CLOSED_BY.setdefault(_step, []).append(_buffer)


# Gradients wait for the update where they rest; everything else that a plan holds is on its way.
_RESTING_ON = {Buffer.OWNED_GRADS: Tier.DEVICE, Buffer.WHOLE_GRADS: Tier.DEVICE, Buffer.STORED_GRADS: Tier.HOST}


@dataclass(frozen=True)
class Peaks:
    """The most that a plan holds at once beyond weights and states at rest: on each tier, on each tier without the
    gradients that rest there, and in each kind of buffer."""

    tiers: Mapping[Tier, int]
    passing: Mapping[Tier, int]
    buffers: Mapping[Buffer, int]


def simulate(steps: Iterable[Step], placements: Placements, sizes: Sizes) -> Peaks:
    """Walk a step's passes, one behind the other, and count what they hold. A step opens before it closes."""
    opened: dict[tuple[Buffer, str], int] = {}
    held: Counter[tuple[str, str]] = Counter()
    peaks: Counter[tuple[str, str]] = Counter()

    def change(buffer: Buffer, unit: str, nbytes: int) -> None:
        tier = _LIVES[buffer].tier
        accounts = [("buffer", buffer.value)]
        if tier:
            accounts.append(("tier", tier.value))
            if _RESTING_ON.get(buffer) is not placements[unit].grad.tier:
                accounts.append(("passing", tier.value))
        for account in accounts:
            held[account] += nbytes
            peaks[account] = max(peaks[account], held[account])

    for verb, kind, unit in steps:
        for buffer in _OPENED_BY.get((verb, kind), ()):
            if (buffer, unit) not in opened and _LIVES[buffer].when(placements[unit]):
                opened[buffer, unit] = _LIVES[buffer].nbytes(sizes[unit])
                change(buffer, unit, opened[buffer, unit])
        for buffer in _CLOSED_BY.get((verb, kind), ()):
            if (buffer, unit) in opened:
                change(buffer, unit, -opened.pop((buffer, unit)))
    return Peaks(
        tiers={tier: peaks["tier", tier.value] for tier in Tier},
        passing={tier: peaks["passing", tier.value] for tier in Tier},
        buffers={buffer: peaks["buffer", buffer.value] for buffer in Buffer},
    )


# --- moving steps -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Budgets:
    """Bytes that fetching early may hold, for each kind of buffer, and gathered weights in all.

    `ahead_bytes` counts weights from their gather to their use, so with the sizes of two units the second is gathered
    before the first is used. A released unit is kept instead if no more than `reuse_bytes` are gathered before its next
    use. `overlap_reduce` lets one reduce be under way while the next unit computes.
    """

    ahead_bytes: int = 0
    live_bytes: int = 0
    load_bytes: int = 0
    read_weight_bytes: int = 0
    read_state_bytes: int = 0
    reuse_bytes: int = 0
    overlap_reduce: bool = False

    def of(self, buffer: Buffer) -> int:
        return {
            Buffer.AHEAD: self.ahead_bytes,
            Buffer.GATHERED: self.live_bytes,
            Buffer.LOADED_WEIGHTS: self.load_bytes,
            Buffer.LOADED_GRADS: self.load_bytes,
            Buffer.READ_WEIGHTS: self.read_weight_bytes,
            Buffer.READ_GRADS: self.read_state_bytes,
            Buffer.READ_STATES: self.read_state_bytes,
        }[buffer]


def hoist(steps: Sequence[Step], verb: Verb, placements: Placements, sizes: Sizes, budgets: Budgets) -> list[Step]:
    """Move each step of one fetching verb as early as the bytes it would hold meanwhile allow.

    Never past a step of its own unit, never past another of its own lane, and never so that a buffer exceeds its
    budget where it did not before.
    """
    moved = list(steps)
    lane = [buffer for buffer, life in _LIVES.items() if life.opens[0] is verb]
    held = {buffer: _held(moved, buffer, placements, sizes) for buffer in lane}
    for at, step in enumerate(moved):
        if step.verb is not verb:
            continue
        needs = {
            buffer: _LIVES[buffer].nbytes(sizes[step.unit])
            for buffer in lane
            if _LIVES[buffer].opens == (step.verb, step.kind) and _LIVES[buffer].when(placements[step.unit])
        }
        rooms = [(held[buffer], budgets.of(buffer) - need) for buffer, need in needs.items()]
        to = at
        while to > 0 and _may_pass(step, moved[to - 1]) and _has_room(rooms, to):
            to -= 1
        if to < at:
            moved.insert(to, moved.pop(at))
            for buffer in lane:
                _shift(held[buffer], to, at, needs.get(buffer, 0))
    return moved


def sink(steps: Sequence[Step]) -> list[Step]:
    """Wait for each reduce as late as possible: before the next one, before the norm, or before its sum is needed."""
    sunk: list[Step] = []
    waiting: Step | None = None
    for step in steps:
        if waiting is not None:
            needed = step.unit == waiting.unit and step.verb not in (Verb.LEAVE, Verb.RELEASE)
            if needed or step.verb in (Verb.REDUCE, Verb.NORM, Verb.SETTLE):
                sunk.append(waiting)
                waiting = None
        if step.verb is Verb.SETTLE:
            waiting = step
        else:
            sunk.append(step)
    return [*sunk, waiting] if waiting is not None else sunk


def _may_pass(step: Step, earlier: Step) -> bool:
    return step.unit != earlier.unit and step.verb is not earlier.verb


def _has_room(rooms: Sequence[tuple[list[int], int]], to: int) -> bool:
    """Whether the step before `to` may begin and end with one buffer more; a room is what is held and may be held."""
    return all(held[to - 1] <= most and (to < 2 or held[to - 2] <= most) for held, most in rooms)


def _shift(held: list[int], to: int, at: int, need: int) -> None:
    """Account for a step that moved: `held[i]` is what is open after step i."""
    before = held[to - 1] if to else 0
    held[to : at + 1] = [before + need, *(passed + need for passed in held[to:at])]


def _held(steps: Sequence[Step], buffer: Buffer, placements: Placements, sizes: Sizes) -> list[int]:
    """Bytes that one kind of buffer has open after each step."""
    life = _LIVES[buffer]
    open_units: dict[str, int] = {}
    total = 0
    held: list[int] = []
    for verb, kind, unit in steps:
        if (verb, kind) == life.opens and unit not in open_units and life.when(placements[unit]):
            open_units[unit] = life.nbytes(sizes[unit])
            total += open_units[unit]
        elif (verb, kind) in life.closes:
            total -= open_units.pop(unit, 0)
        held.append(total)
    return held


def keep(steps: Sequence[Step], placements: Placements, sizes: Sizes, budgets: Budgets) -> list[Step]:
    """Drop a release and the fetch that undoes it where the unit is soon used again and there is room to hold it."""
    live = _held(steps, Buffer.GATHERED, placements, sizes)
    dropped = [False] * len(steps)
    # The last release first: what was gathered between it and its own fetch no longer stands between those before it.
    for release, gather in sorted(_pairs(steps), reverse=True):
        unit = steps[release].unit
        gathers = distance = 0
        for at in range(release + 1, gather):
            if steps[at].verb is Verb.GATHER and not dropped[at]:
                gathers += 1
                distance += sizes[steps[at].unit].weights
            if distance > budgets.reuse_bytes:
                break
        extra = sizes[unit].weights
        # With nothing gathered between, holding the unit costs no more than its use did.
        fits = not gathers or all(held + extra <= budgets.live_bytes for held in live[release:gather])
        if distance > budgets.reuse_bytes or not fits:
            continue
        live[release:gather] = [held + extra for held in live[release:gather]]
        dropped[release] = True
        for at in range(release + 1, gather + 1):
            verb, kind, other = steps[at]
            dropped[at] |= other == unit and kind is Kind.PARAM and verb in (Verb.READ, Verb.LOAD, Verb.GATHER)
    return [step for step, gone in zip(steps, dropped, strict=True) if not gone]


def _pairs(steps: Sequence[Step]) -> list[tuple[int, int]]:
    """Each release with the gather that undoes it, unless an update of the unit makes a fresh gather due."""
    released: dict[str, int] = {}
    pairs: list[tuple[int, int]] = []
    for at, (verb, _, unit) in enumerate(steps):
        if verb is Verb.RELEASE:
            released[unit] = at
        elif verb is Verb.UPDATE:
            released.pop(unit, None)
        elif verb is Verb.GATHER and unit in released:
            pairs.append((released.pop(unit), at))
    return pairs
