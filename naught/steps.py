"""Steps: the words of a plan: what a hook can say, what a step does, and how large a unit is. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple, TypeVar

from naught.placement import Kind, Placement

__all__ = ["EVERY_UNIT", "Event", "Moment", "Pass", "Placements", "Sizes", "Step", "UnitBytes", "Verb", "order_of_updates"]

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
    GATHER = "gather"  # every rank's shard to every rank, from wherever it rests but the disk
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

    `early` updates a unit right behind its reduce, which is right only when nothing waits for the norm.
    """

    first: bool = True
    last: bool = True
    early: bool = False


Placements = Mapping[str, Placement]
Sizes = Mapping[str, UnitBytes]


Named = TypeVar("Named")


def order_of_updates(units: Sequence[Named]) -> list[Named]:
    """On the host: as the next forward needs them, but for the last one. Its gradients are the first that are there, and while it
    is updated those of the first unit come down. It is often large, too, and what ends an update has to come up before anything
    goes on."""
    return [*units[-1:], *units[:-1]]
