"""Program: a plan bound to its units. For each event, what to do until the module may go on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import NamedTuple

from naught.placement import Kind
from naught.plan import Plan
from naught.steps import Event, Moment, Step, Verb
from naught.unit import Unit

__all__ = ["Leg", "Program"]

_MOMENTS = {
    (Verb.USE, Kind.PARAM): Moment.ENTER,
    (Verb.LEAVE, Kind.PARAM): Moment.EXIT,
    (Verb.USE, Kind.GRAD): Moment.GRAD,
    (Verb.LEAVE, Kind.GRAD): Moment.DONE,
}
_Bind = Callable[[Unit], Callable[[], None]]
_ACTIONS: dict[tuple[Verb, Kind], _Bind] = {
    (Verb.READ, Kind.PARAM): lambda unit: unit.read,
    (Verb.GATHER, Kind.PARAM): lambda unit: unit.gather,
    (Verb.USE, Kind.PARAM): lambda unit: unit.ready,
    (Verb.USE, Kind.GRAD): lambda unit: unit.ready,
    (Verb.RELEASE, Kind.PARAM): lambda unit: unit.release,
    (Verb.COLLECT, Kind.GRAD): lambda unit: unit.open_grads,
    (Verb.REDUCE, Kind.GRAD): lambda unit: unit.start_reduce,
    (Verb.SETTLE, Kind.GRAD): lambda unit: unit.settle,
    (Verb.LEAVE, Kind.GRAD): lambda unit: unit.collect,
}
_UPDATE = (Verb.UPDATE, Kind.OPTIM)


class Leg(NamedTuple):
    """What is to be done up to the anchor of one event. The last leg of a program has no event."""

    event: Event | None
    actions: tuple[Callable[[], None], ...]
    steps: tuple[Step, ...]


class Program:
    """The legs of a plan, in order. What comes after a backward is the update's business, not a pass's; `update` is for units
    that are updated before."""

    def __init__(self, plan: Plan, units: Mapping[str, Unit], update: Callable[[Unit], None] | None = None) -> None:
        end = next((at for at, step in enumerate(plan.steps) if step.verb is Verb.NORM), len(plan.steps))
        self.steps = plan.steps[:end]
        binds = dict(_ACTIONS)
        if update is not None:
            binds[_UPDATE] = lambda unit: partial(update, unit)
        self.legs: list[Leg] = []
        begun: list[Step] = []
        for step in self.steps:
            begun.append(step)
            moment = _MOMENTS.get((step.verb, step.kind))
            if moment is not None:
                self.legs.append(_leg(Event(moment, step.unit), begun, units, binds))
                begun = []
        self.legs.append(_leg(None, begun, units, binds))

    def find(self, start: int, event: Event) -> int | None:
        """The next leg of an event; mostly it is the very next one."""
        legs = self.legs
        if legs[start].event == event:
            return start
        return next((at for at in range(start + 1, len(legs)) if legs[at].event == event), None)

    def steps_between(self, start: int, end: int) -> Iterator[Step]:
        """Those of the legs from one up to another."""
        return (step for leg in self.legs[start:end] for step in leg.steps)

    def due_after(self, end: int) -> set[str]:
        """Units whose reduce the legs up to one have issued, and no update."""
        found: set[str] = set()
        for step in self.steps_between(0, end):
            if step.verb is Verb.REDUCE:
                found.add(step.unit)
            elif step.verb is Verb.UPDATE:
                found.discard(step.unit)
        return found


def _leg(event: Event | None, steps: list[Step], units: Mapping[str, Unit], binds: Mapping[tuple[Verb, Kind], _Bind]) -> Leg:
    bound = (binds.get((step.verb, step.kind)) for step in steps)
    actions = tuple(act(units[step.unit]) for act, step in zip(bound, steps, strict=True) if act is not None)
    return Leg(event, actions, tuple(steps))
