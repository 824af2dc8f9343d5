"""Shortage: what to say when memory has run out: where, what was held, what was planned, and what would help most. Pure:
numbers in, text out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from naught.devices import Room
from naught.placement import STAGES
from naught.quantity import show_bytes

__all__ = ["Change", "Held", "Setup", "Whole", "changes_of", "note_of", "step_bytes"]

_MOST = 3  # changes that are named


class Whole(NamedTuple):
    """A unit's bytes if nothing of it is split."""

    weights: int
    grads: int
    states: int


@dataclass(frozen=True)
class Setup:
    """How training goes, as far as its memory depends on it."""

    units: Sequence[Whole]
    stage: int
    world: int
    micro: int
    wide: bool  # weights have 32 bits, and activations as well
    recomputes: bool  # activations are checkpointed already


@dataclass(frozen=True)
class Held:
    """What this process holds on a device by the meter's categories, beyond that in training, and what there is of memory.
    None: nobody counts what is not metered."""

    metered: Mapping[str, int]
    other: int | None
    room: Room


class Change(NamedTuple):
    """Something to change, and about how many bytes it saves."""

    what: str
    saves: int


def note_of(where: str, held: Held, planned: Mapping[str, int] | None, changes: Sequence[Change]) -> str:
    """A note for the exception. `planned` is None where no pass has a plan yet."""
    other = {} if held.other is None else {"activations and other": held.other}
    plan = "there is none yet" if planned is None else _listed(planned)
    help_ = "; ".join(f"{change.what} saves about {show_bytes(change.saves)}" for change in changes)
    return "\n".join(
        [
            f"naught: out of memory in the {where}",
            f"  held: {_listed({**held.metered, **other})}",
            f"  memory: {_room(held)}",
            f"  peaks of the plan: {plan}",
            f"  what would help: {help_ or 'more memory, or a smaller model'}",
        ]
    )


def _listed(held: Mapping[str, int]) -> str:
    parts = sorted(((nbytes, name) for name, nbytes in held.items() if nbytes > 0), key=lambda part: (-part[0], part[1]))
    return ", ".join(f"{name} {show_bytes(nbytes)}" for nbytes, name in parts) or "nothing"


def _room(held: Held) -> str:
    whole, free, kept, limit = held.room
    parts = [f"{show_bytes(free)} of {show_bytes(whole)} are free"]
    if kept is not None:
        ours = sum(held.metered.values()) + (held.other or 0)
        parts.append(f"torch keeps {show_bytes(kept)} more, in pieces that may be too small")
        parts.append(f"others and the driver have {show_bytes(max(0, whole - free - kept - ours))}")
    if limit is not None:
        parts.append(f"this process may have no more than {show_bytes(limit)} of addresses (ulimit -v)")
    return "; ".join(parts)


def changes_of(setup: Setup, activations: int) -> list[Change]:
    """What this release has that would save most, the best first. `activations` are held for the backward, and about as many
    bytes as they are saved where there are fewer or narrower ones; 0 where they are gone already."""
    found = [*_of_states(setup, activations), *_of_activations(setup, activations)]
    return sorted((change for change in found if change.saves > 0), key=lambda change: -change.saves)[:_MOST]


def _of_states(setup: Setup, activations: int) -> Iterator[Change]:
    now = step_bytes(setup.units, setup.stage, setup.world)
    stages = {stage: step_bytes(setup.units, stage, setup.world) for stage in STAGES if stage > setup.stage}
    if stages:
        best = min(stages, key=stages.__getitem__)
        yield Change(f"stage {best} instead of {setup.stage}", now - stages[best])
    if setup.wide:
        # Weights and gradients have half the bytes; masters, as many as the gradients had, come to the states.
        narrow = [Whole(weights // 2, grads // 2, states + grads) for weights, grads, states in setup.units]
        then = step_bytes(narrow, setup.stage, setup.world)
        yield Change("bf16 instead of fp32", now - then + activations // 2)


def _of_activations(setup: Setup, activations: int) -> Iterator[Change]:
    if setup.micro > 1:
        less = setup.micro // 2
        what = f"a micro-batch of {less} instead of {setup.micro} (with more gradient_accumulation_steps the step is the same)"
        yield Change(what, activations - activations * less // setup.micro)
    blocks = len(setup.units) - 1
    if not setup.recomputes and blocks > 1:
        # Those of one block at a time are left, and the inputs of all, which are a small part.
        yield Change("torch.utils.checkpoint around each block", activations - activations // blocks)


def step_bytes(units: Sequence[Whole], stage: int, world: int) -> int:
    """About the most that one rank holds of weights, gradients and states in a step: its share of each, and whole what is
    used and what is under way, two units of what is split."""
    by_kind: tuple[list[int], ...] = ([], [], [])
    for unit in units:
        for kind, nbytes in zip(by_kind, unit, strict=True):
            kind.append(nbytes)
    splits = [split and world > 1 for split in STAGES[stage]]
    rest = sum(sum(kind) // (world if split else 1) for kind, split in zip(by_kind, splits, strict=True))
    passing = [sum(sorted(kind)[-2:]) for kind, split in zip(by_kind[:-1], splits, strict=False) if split]  # states never meet
    return rest + sum(passing)
