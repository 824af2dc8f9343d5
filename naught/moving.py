"""Moving: steps of a list that may come earlier or later, and by how much. Pure.

Prefetching is moving a fetch earlier while a budget allows; overlapping a reduce is waiting for it later.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from naught.holding import LIVES, Buffer, held_after_each
from naught.placement import Kind
from naught.steps import Placements, Sizes, Step, Verb

__all__ = ["Budgets", "hoist", "keep", "sink"]


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
    lane = [buffer for buffer, life in LIVES.items() if life.opens[0] is verb]
    held = {buffer: held_after_each(moved, buffer, placements, sizes) for buffer in lane}
    for at, step in enumerate(moved):
        if step.verb is not verb:
            continue
        needs = {
            buffer: LIVES[buffer].nbytes(sizes[step.unit])
            for buffer in lane
            if LIVES[buffer].opens == (step.verb, step.kind) and LIVES[buffer].when(placements[step.unit])
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
    """Wait for each reduce as late as possible, and do what follows on its sum then: before the next one, before the norm, or
    before the unit is used again."""
    sunk: list[Step] = []
    waiting: list[Step] = []  # for a sum: that it settles, and what is done with it
    for step in steps:
        own = bool(waiting) and step.unit == waiting[0].unit
        follows = own and (step.verb, step.kind) in _OF_A_SUM
        needed = own and step.verb not in (Verb.LEAVE, Verb.RELEASE)
        if waiting and not follows and (needed or step.verb in (Verb.REDUCE, Verb.NORM, Verb.SETTLE)):
            sunk += waiting
            waiting = []
        if follows or step.verb is Verb.SETTLE:
            waiting.append(step)
        else:
            sunk.append(step)
    return sunk + waiting


# What is done with a sum once it has settled: it goes to where it rests, or the unit is updated.
_OF_A_SUM = frozenset(
    {
        (Verb.STORE, Kind.GRAD),
        (Verb.WRITE, Kind.GRAD),
        (Verb.READ, Kind.GRAD),
        (Verb.LOAD, Kind.GRAD),
        (Verb.READ, Kind.OPTIM),
        (Verb.UPDATE, Kind.OPTIM),
        (Verb.WRITE, Kind.OPTIM),
        (Verb.STORE, Kind.PARAM),
        (Verb.LOAD, Kind.PARAM),
        (Verb.WRITE, Kind.PARAM),
    }
)


def _may_pass(step: Step, earlier: Step) -> bool:
    return step.unit != earlier.unit and step.verb is not earlier.verb


def _has_room(rooms: Sequence[tuple[list[int], int]], to: int) -> bool:
    """Whether the step before `to` may begin and end with one buffer more; a room is what is held and may be held."""
    return all(held[to - 1] <= most and (to < 2 or held[to - 2] <= most) for held, most in rooms)


def _shift(held: list[int], to: int, at: int, need: int) -> None:
    """Account for a step that moved: `held[i]` is what is open after step i."""
    before = held[to - 1] if to else 0
    held[to : at + 1] = [before + need, *(passed + need for passed in held[to:at])]


def keep(steps: Sequence[Step], placements: Placements, sizes: Sizes, budgets: Budgets) -> list[Step]:
    """Drop a release and the fetch that undoes it where the unit is soon used again and there is room to hold it."""
    live = held_after_each(steps, Buffer.GATHERED, placements, sizes)
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
