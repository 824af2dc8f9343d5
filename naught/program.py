"""Program: a plan bound to its units. For each event, what to do until the module may go on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
_ACTIONS: dict[tuple[Verb, Kind], Callable[[Unit], Callable[[], None]]] = {
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


class Program:
    """The legs of a plan, in order. What comes after a backward is the update's business, not a pass's; `update` is for units
    that are updated before."""

    def __init__(self, plan: Plan, units: Mapping[str, Unit], update: Callable[[Unit], None] | None = None) -> None:
        end = next((at for at, step in enumerate(plan.steps) if step.verb is Verb.NORM), len(plan.steps))
        self.steps = plan.steps[:end]
        self.actions = dict(_ACTIONS)
        if update is not None:
            self.actions[_UPDATE] = lambda unit: partial(update, unit)
        self.legs: list[Leg] = []
        begun: list[Step] = []
        for step in self.steps:
            begun.append(step)
            moment = _MOMENTS.get((step.verb, step.kind))
            if moment is not None:
                self._add(Event(moment, step.unit), begun, units)
                begun = []
        self._add(None, begun, units)

    def _add(self, event: Event | None, steps: list[Step], units: Mapping[str, Unit]) -> None:
        bound = (self.actions.get((step.verb, step.kind)) for step in steps)
        actions = tuple(act(units[step.unit]) for act, step in zip(bound, steps, strict=True) if act is not None)
        self.legs.append(Leg(event, actions))

    def find(self, start: int, event: Event) -> int | None:
        """The next leg of an event; mostly it is the very next one."""
        legs = self.legs
        if legs[start].event == event:
            return start
        return next((at for at in range(start + 1, len(legs)) if legs[at].event == event), None)
