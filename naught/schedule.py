"""Schedule: what happened becomes what is issued. Every rank issues the same collectives in the same order.

The first pass of a kind is *careful*: before each collective the ranks say what they need next, and all of them take
part in the first of it, so ranks may differ in what they run. If they did not differ, the record is compiled into a
plan, and later passes replay it: an event issues the list up to its anchor, steps that are jumped over included. An
event that the plan does not have ends the replay, on every rank or with an error that names the unit.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from naught.comm import SAME_ORDER, Group
from naught.errors import ScheduleError
from naught.moving import Budgets
from naught.placement import Kind
from naught.plan import Plan, compile_plan
from naught.steps import Event, Moment, Pass, Step, Verb
from naught.unit import Unit

__all__ = ["Schedule"]

_ANCHORS = {
    Moment.ENTER: (Verb.USE, Kind.PARAM),
    Moment.EXIT: (Verb.LEAVE, Kind.PARAM),
    Moment.GRAD: (Verb.USE, Kind.GRAD),
    Moment.DONE: (Verb.LEAVE, Kind.GRAD),
}


@dataclass
class _Pass:
    """One forward, or a forward and its backward, from its first event to its close."""

    training: bool
    which: Pass
    plan: Plan | None
    cursor: int = 0
    events: list[Event] = field(default_factory=list)
    depth: dict[str, int] = field(default_factory=dict)
    backward: set[str] = field(default_factory=set)
    seen_backward: bool = False


class Schedule:
    """Issues the verbs of the units. `budgets` says how far to fetch ahead."""

    def __init__(self, units: Mapping[str, Unit], group: Group, budgets: Budgets) -> None:
        self.units, self.group, self.budgets = dict(units), group, budgets
        self.order = list(self.units)
        self.plans: dict[tuple[bool, Pass], Plan] = {}
        self.current: _Pass | None = None
        self.log: deque[Step] = deque(maxlen=4096)  # the latest that was issued, for whoever wants to compare ranks

    # --- passes ---

    def open(self, *, training: bool, which: Pass) -> None:
        assert self.current is None
        self.current = _Pass(training, which, self.plans.get((training, which)))

    def close(self) -> None:
        """Finish what a pass has begun: late gradients are reduced and units are released."""
        running = self.current
        if running is None:
            return
        self._sweep(running)
        if running.plan is not None:
            self._issue_until(len(running.plan.steps))
        else:
            self._serve(None)
            self._learn(running)
        for unit in self.units.values():
            if unit.placement.param.split and (unit.present or unit.pending):
                unit.release()
        self.current = None

    def abort(self) -> None:
        """Forget a pass that an exception has ended: wait for what is under way, and release."""
        self.current = None
        for unit in self.units.values():
            unit.settle()
            unit.ready()
            unit.release()

    def _sweep(self, running: _Pass) -> None:
        """Units whose backward nothing ended, and gradients that came after it did."""
        if not running.seen_backward:
            return
        for name in reversed(self.order):
            unit = self.units[name]
            due = unit.placement.grad.split or running.which.last
            if name in running.backward or (unit.owes and due):
                self.happened(Moment.DONE, name)

    def _learn(self, running: _Pass) -> None:
        """Compile a plan if all ranks have the same record; else the next pass is careful again."""
        text = "\n".join(f"{event.moment} {event.unit}" for event in running.events)
        digest = hashlib.sha256(text.encode()).digest()[:8]
        mine = torch.tensor([int.from_bytes(digest, "little", signed=True)])
        rows = self.group.exchange(mine)
        if bool((rows == rows[0]).all()):
            placements = {name: unit.placement for name, unit in self.units.items()}
            sizes = {name: unit.sizes() for name, unit in self.units.items()}
            plan = compile_plan(running.events, placements, sizes, budgets=self.budgets, which=running.which)
            steps = tuple(step for step in plan.steps if step.verb not in (Verb.NORM, Verb.UPDATE))
            self.plans[running.training, running.which] = Plan(steps)

    # --- events ---

    def happened(self, moment: Moment, name: str) -> None:
        running = self.current
        assert running is not None
        running.events.append(Event(moment, name))
        running.seen_backward |= moment is Moment.GRAD
        if running.plan is not None:
            verb, kind = _ANCHORS[moment]
            anchor = self._find(running, Step(verb, kind, name))
            if anchor is not None:
                self._note(running, moment, name)
                self._issue_until(anchor + 1)
                return
            self._leave_plan(running, moment, name)
        self._carefully(running, moment, name)

    def _note(self, running: _Pass, moment: Moment, name: str) -> None:
        if moment is Moment.GRAD:
            running.backward.add(name)
        elif moment is Moment.DONE:
            running.backward.discard(name)
        elif moment is Moment.ENTER:
            self.units[name].entered = True
            running.depth[name] = running.depth.get(name, 0) + 1
        else:
            running.depth[name] = max(0, running.depth.get(name, 0) - 1)

    def _find(self, running: _Pass, anchor: Step) -> int | None:
        assert running.plan is not None
        steps = running.plan.steps
        return next((at for at in range(running.cursor, len(steps)) if steps[at] == anchor), None)

    def _issue_until(self, end: int) -> None:
        running = self.current
        assert running is not None and running.plan is not None
        for step in running.plan.steps[running.cursor : end]:
            self._issue(step)
        running.cursor = max(running.cursor, end)

    def _issue(self, step: Step) -> None:
        self.log.append(step)
        action = _ACTIONS.get(step.verb)
        if action is not None:
            action(self.units[step.unit])

    def _leave_plan(self, running: _Pass, moment: Moment, name: str) -> None:
        """The plan does not have this: all ranks must leave it here, or none can go on."""
        at = torch.tensor([running.cursor, self.order.index(name), list(Moment).index(moment)])
        story = f'{moment} of unit "{name or "root"}" is not in the plan'
        rows = self.group.diverge(at, story)
        if not bool((rows == rows[0]).all()):
            raise ScheduleError(f"{story}, and other ranks met something else", fix=SAME_ORDER)
        for unit in self.units.values():
            unit.settle()
        running.plan = None
        self.plans.pop((running.training, running.which), None)

    # --- without a plan ---

    def _carefully(self, running: _Pass, moment: Moment, name: str) -> None:
        unit = self.units[name]
        self._note(running, moment, name)
        if moment in (Moment.ENTER, Moment.GRAD):
            unit.ready()
            if not unit.present:
                self._serve(Step(Verb.GATHER, Kind.PARAM, name))
            return
        if not running.depth.get(name) and name not in running.backward and unit.present:
            unit.release()
        due = unit.placement.grad.split or running.which.last
        if moment is Moment.DONE and unit.trained and due:
            self._serve(Step(Verb.REDUCE, Kind.GRAD, name))

    def _serve(self, wanted: Step | None) -> None:
        """Take part in what ranks need until this rank has what it wants, or until no rank wants anything."""
        while True:
            rows = self.group.exchange(torch.tensor([self._code(wanted)]))
            codes = [code for code in rows.flatten().tolist() if code >= 0]
            if not codes:
                return
            chosen = self._step(min(codes))
            self._take_part(chosen)
            if chosen == wanted:
                return

    def _take_part(self, step: Step) -> None:
        self.log.append(step)
        unit = self.units[step.unit]
        if step.verb is Verb.REDUCE:
            unit.reduce()
            return
        unit.join()
        running = self.current
        assert running is not None
        in_use = running.depth.get(step.unit) or step.unit in running.backward
        if not in_use:
            unit.release()

    def _code(self, step: Step | None) -> int:
        return -1 if step is None else 2 * self.order.index(step.unit) + (step.verb is Verb.REDUCE)

    def _step(self, code: int) -> Step:
        name = self.order[code // 2]
        return Step(Verb.REDUCE, Kind.GRAD, name) if code % 2 else Step(Verb.GATHER, Kind.PARAM, name)


_ACTIONS: dict[Verb, Callable[[Unit], None]] = {
    Verb.GATHER: Unit.gather,
    Verb.USE: Unit.ready,
    Verb.RELEASE: Unit.release,
    Verb.COLLECT: Unit.open_grads,
    Verb.REDUCE: Unit.start_reduce,
    Verb.SETTLE: Unit.settle,
}
