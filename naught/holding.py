"""Holding: what a list of steps holds in memory beyond weights and states at rest. Pure.

A buffer is opened by one step of a unit and closed by another; walking the list gives the peaks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from naught.placement import Kind, Placement, Tier
from naught.steps import Placements, Sizes, Step, UnitBytes, Verb

__all__ = [
    "LIVES",
    "Buffer",
    "Life",
    "Peaks",
    "held_after_each",
    "read_room_bytes",
    "simulate",
]


class Buffer(StrEnum):
    """Memory that the plan holds beyond the states at rest."""

    READ_WEIGHTS = "read weights"
    READ_GRADS = "read gradients"
    READ_STATES = "read states"
    LOADED_GRADS = "loaded gradients"
    AHEAD = "weights ahead of their use"  # a part of the next one, or of whole weights: never added to a tier
    GATHERED = "gathered weights"
    GRAD_FLATS = "gradient flats"
    WHOLE_GRADS = "whole gradients"
    SCRATCH = "reduce scratch"
    OWNED_GRADS = "owned gradients"
    STORED_GRADS = "stored gradients"
    NEW_WEIGHTS = "new weights"
    STAGING = "staging"  # between device and host: as much in every plan


class Life(NamedTuple):
    """A buffer's tier, the step that opens it, the steps of which the first closes it, and its size."""

    tier: Tier | None
    opens: tuple[Verb, Kind]
    closes: tuple[tuple[Verb, Kind], ...]
    nbytes: Callable[[UnitBytes], int]
    when: Callable[[Placement], bool] = lambda _: True


_UPDATED = (Verb.UPDATE, Kind.OPTIM)
LIVES: Mapping[Buffer, Life] = {
    # In rooms that are used again: see `read_room_bytes`.
    Buffer.READ_WEIGHTS: Life(None, (Verb.READ, Kind.PARAM), ((Verb.GATHER, Kind.PARAM),), lambda size: size.weight_shard),
    # A tile at a time, in rooms of a constant size: see `room_bytes`. Gradients that are added to are where they are stored from.
    Buffer.READ_GRADS: Life(None, (Verb.READ, Kind.GRAD), ((Verb.WRITE, Kind.GRAD), _UPDATED), lambda size: size.grad_shard),
    Buffer.READ_STATES: Life(None, (Verb.READ, Kind.OPTIM), ((Verb.WRITE, Kind.OPTIM),), lambda size: size.state_shard),
    Buffer.LOADED_GRADS: Life(Tier.DEVICE, (Verb.LOAD, Kind.GRAD), (_UPDATED,), lambda size: size.grad_shard),
    Buffer.AHEAD: Life(
        None, (Verb.GATHER, Kind.PARAM), ((Verb.USE, Kind.PARAM), (Verb.USE, Kind.GRAD)), lambda size: size.weights
    ),
    Buffer.GATHERED: Life(
        Tier.DEVICE,
        (Verb.GATHER, Kind.PARAM),
        ((Verb.RELEASE, Kind.PARAM),),
        lambda size: size.weights,
        when=lambda place: place.param.split,  # whole weights rest on the device: not the plan's to hold
    ),
    Buffer.GRAD_FLATS: Life(
        Tier.DEVICE,
        (Verb.COLLECT, Kind.GRAD),
        ((Verb.SETTLE, Kind.GRAD),),
        lambda size: size.grads,
        when=lambda place: place.sums_leave,
    ),
    Buffer.WHOLE_GRADS: Life(
        Tier.DEVICE,
        (Verb.COLLECT, Kind.GRAD),
        (_UPDATED,),
        lambda size: size.grads,
        when=lambda place: not place.sums_leave,
    ),
    Buffer.SCRATCH: Life(Tier.DEVICE, (Verb.REDUCE, Kind.GRAD), ((Verb.SETTLE, Kind.GRAD),), lambda size: size.reduce_scratch),
    Buffer.OWNED_GRADS: Life(
        Tier.DEVICE,
        (Verb.SETTLE, Kind.GRAD),
        ((Verb.STORE, Kind.GRAD), _UPDATED),
        lambda size: size.grad_shard,
        when=lambda place: place.grad.split and place.optim.tier is Tier.DEVICE,  # else staging takes it to the host at once
    ),
    Buffer.STORED_GRADS: Life(
        Tier.HOST, (Verb.STORE, Kind.GRAD), ((Verb.WRITE, Kind.GRAD), _UPDATED), lambda size: size.grad_shard
    ),
    Buffer.NEW_WEIGHTS: Life(
        None,
        _UPDATED,
        ((Verb.WRITE, Kind.PARAM),),
        lambda size: size.weight_shard,
        when=lambda place: place.param.tier is Tier.DISK,
    ),
}
_OPENED_BY: dict[tuple[Verb, Kind], list[Buffer]] = {}
_CLOSED_BY: dict[tuple[Verb, Kind], list[Buffer]] = {}
for _buffer, _life in LIVES.items():
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
        tier = LIVES[buffer].tier
        accounts = [("buffer", buffer.value)]
        if tier:
            accounts.append(("tier", tier.value))
            if _RESTING_ON.get(buffer) is not placements[unit].sums_rest:
                accounts.append(("passing", tier.value))
        for account in accounts:
            held[account] += nbytes
            peaks[account] = max(peaks[account], held[account])

    for verb, kind, unit in steps:
        for buffer in _OPENED_BY.get((verb, kind), ()):
            if (buffer, unit) not in opened and LIVES[buffer].when(placements[unit]):
                opened[buffer, unit] = LIVES[buffer].nbytes(sizes[unit])
                change(buffer, unit, opened[buffer, unit])
        for buffer in _CLOSED_BY.get((verb, kind), ()):
            if (buffer, unit) in opened:
                change(buffer, unit, -opened.pop((buffer, unit)))
    return Peaks(
        tiers={tier: peaks["tier", tier.value] for tier in Tier},
        passing={tier: peaks["passing", tier.value] for tier in Tier},
        buffers={buffer: peaks["buffer", buffer.value] for buffer in Buffer},
    )


def read_room_bytes(steps: Sequence[Step], sizes: Sizes) -> int:
    """Of all rooms on the host that weights are read into: the smallest idle one that is large enough, else a new one. A room is
    idle once its unit is gathered, and stays: a step finds those of the last."""
    life = LIVES[Buffer.READ_WEIGHTS]
    idle: list[int] = []
    in_use: dict[str, int] = {}
    total = 0
    for verb, kind, unit in [*steps, *steps]:
        if (verb, kind) == life.opens and unit not in in_use:
            needed = life.nbytes(sizes[unit])
            room = min((room for room in idle if room >= needed), default=0)
            if room:
                idle.remove(room)
            else:
                room, total = needed, total + needed
            in_use[unit] = room
        elif (verb, kind) in life.closes and unit in in_use:
            idle.append(in_use.pop(unit))
    return total


def held_after_each(steps: Sequence[Step], buffer: Buffer, placements: Placements, sizes: Sizes) -> list[int]:
    """Bytes that one kind of buffer has open after each step."""
    life = LIVES[buffer]
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
