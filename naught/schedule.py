"""Schedule: what happened becomes what is issued. Every rank issues the same collectives in the same order.

The first pass of a kind is *careful*: before each collective the ranks say what they need next, and all of them take
part in the first of it, so ranks may differ in what they run. If they never did, the record is compiled into a
plan, and later passes replay it: an event issues the list up to its anchor, steps that are jumped over included. An
event that the plan does not have ends the replay, and so does a jump that would end a unit which is still at work, on every
rank or with an error that names the unit.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import nn

from naught.comm import SAME_ORDER, Group
from naught.errors import ScheduleError
from naught.moving import Budgets
from naught.placement import Kind
from naught.plan import compile_plan
from naught.program import Program
from naught.steps import Event, Moment, Pass, Step, Verb
from naught.unit import Unit
from naught.uses import Uses

__all__ = ["Schedule"]

_LOG = logging.getLogger("naught")


@dataclass
class _Pass:
    """One forward, or a forward and its backward, from its first event to its close."""

    training: bool
    which: Pass
    program: Program | None
    leg: int = 0
    events: list[Event] = field(default_factory=list)
    uses: Uses = field(default_factory=Uses)
    due: set[str] = field(default_factory=set)  # units whose gradients were summed, and that may be updated
    touched: set[nn.Parameter] | None = None  # parameters that its forwards have used; None: nobody has looked
    # Something came to light that changes what the next pass says: this record is not worth a plan.
    surprised: bool = False
    # Nothing comes or goes, and no gradient is made: this rank may do it by itself.
    alone: bool = False
    # It has jumped over events of its plan; else it goes the way that was recorded, on which nothing comes too soon.
    strayed: bool = False


class _Early(Protocol):
    """Whoever updates units in the backward."""

    def refuse_midway(self) -> None:
        """Weights are those of no step while one is under way."""

    def refuse_more(self) -> None:
        """Every backward ends a step."""

    def has_taken(self, unit: Unit) -> bool:
        """Whether it is updated in this step."""

    def take(self, unit: Unit, *, awaits: bool) -> bool:
        """Update one whose gradients are summed, unless some rank awaits more of them; whether it did. All ranks do so for the
        same one."""


class Schedule:
    """Issues the verbs of the units. `budgets` says how far to fetch ahead; None: there is no plan, for ranks may differ in any
    pass. `early` updates a unit whose gradients are summed; None: they wait for the step."""

    def __init__(self, units: Mapping[str, Unit], group: Group, budgets: Budgets | None, early: _Early | None = None) -> None:
        self.units, self.group, self.budgets, self.early = dict(units), group, budgets, early
        self.order = list(self.units)
        self.programs: dict[tuple[bool, Pass], Program] = {}
        # Whether in training or not, ranks have gone through a pass differently, and may do so again.
        self.differing: set[bool] = set()
        self.current: _Pass | None = None

    # --- passes ---

    def pass_of(self, *, last: bool) -> Pass:
        """What a pass of a step is, by whether it is its last."""
        return Pass(last=last, early=self.early is not None)

    def steps_of(self, *, last: bool) -> tuple[Step, ...]:
        """What a micro-batch in training issues, the last of its step or another one; nothing where there is no plan yet."""
        program = self.programs.get((True, self.pass_of(last=last)))
        return () if program is None else program.steps

    def open(self, *, training: bool, which: Pass, careful: bool = False, alone: bool = False) -> None:
        assert self.current is None
        if not alone:
            self.gather_anew()
        program = None if careful or alone else self.programs.get((training, which))
        self.current = _Pass(training, which, program, surprised=careful, alone=alone)

    def close(self) -> None:
        """Finish what a pass has begun: late gradients are reduced and units are released."""
        running = self.current
        if running is None:
            return
        self._sweep(running)
        if running.program is not None:
            self._issue_until(running, running.program, len(running.program.legs))
        elif not running.alone:
            self._serve(running, None)
        for unit in self.units.values():
            unit.release()
            unit.drop_reading()
        self._update_due(running)  # what is gathered no longer: else it would seem to be written to by somebody else
        if running.program is None and not running.alone:
            self._learn(running)
        self.current = None

    def abort(self) -> None:
        """Forget a pass that an exception has ended: wait for what is under way, and release. Nothing is done with it that would
        need memory, of which there may be none."""
        self.current = None
        with ExitStack() as every:  # whatever befalls one of them
            for unit in self.units.values():
                every.callback(unit.drop_reading)
                every.callback(unit.give_up)

    @property
    def is_midway(self) -> bool:
        """Whether there is anything of a step that is not over."""
        begun = self.current is not None and self.current.training
        return begun or any(segment.grads.begun for unit in self.units.values() for segment in unit.trained)

    def lacked_memory(self) -> None:
        """Weights may not have come for it. A rank alone knows that at once; of several all have to hear of it."""
        self.group.gathers_anew |= self.group.size == 1

    def gather_anew(self) -> None:
        """All ranks have heard of something that has failed on one: of whole weights a part may not have come. Nor may those that
        are behind their update, which nobody can bring any more."""
        if self.group.gathers_anew:
            self.group.gathers_anew = False
            for unit in self.units.values():
                unit.catch_up()
                unit.outdate(hide=False)
                if not (unit.lazy or unit.placement.param.split):
                    unit.make_whole()

    def forget_plans(self) -> None:
        """Record anew. All ranks must do so together."""
        self.programs.clear()

    def _sweep(self, running: _Pass) -> None:
        """Units whose backward nothing ended, and gradients that came after it did."""
        for name in reversed(self.order):
            unit = self.units[name]
            if name in running.uses.backward or unit.owes(last=running.which.last):
                self.happened(Moment.DONE, name)

    def _learn(self, running: _Pass) -> None:
        """Compile a plan if all ranks have the same record, and always had; else the next pass is careful again."""
        if self.budgets is None or running.training in self.differing:
            return
        text = "\n".join(f"{event.moment} {event.unit}" for event in running.events)
        digest = hashlib.sha256(text.encode()).digest()[:8]
        rows = self.group.exchange(torch.tensor([int.from_bytes(digest, "little", signed=True), running.surprised]))
        if bool(rows[:, 1].any()):
            return
        if not bool((rows[:, 0] == rows[0, 0]).all()):
            self.differing.add(running.training)
            self.programs = {kind: program for kind, program in self.programs.items() if kind[0] is not running.training}
            if self.group.rank == 0:
                _LOG.warning(
                    "ranks run different modules: from here on they agree on each collective before it, and follow no plan: it "
                    "takes longer. naught.ranks_may_differ says that this is meant"
                )
            return
        self.programs[running.training, running.which] = self._compile(running, self.budgets)

    def _compile(self, running: _Pass, budgets: Budgets) -> Program:
        placements = {name: unit.placement for name, unit in self.units.items()}
        sizes = {name: unit.sizes() for name, unit in self.units.items()}
        plan = compile_plan(running.events, placements, sizes, budgets=budgets, which=running.which)
        if len(set(self.group.exchange_texts(plan.digest))) > 1:
            raise ScheduleError("the ranks have made different plans of the same record", fix="give all ranks the same budgets")
        return Program(plan, self.units, None if self.early is None else self._update)

    # --- events ---

    def happened(self, moment: Moment, name: str) -> None:
        running = self.current
        assert running is not None
        event = Event(moment, name)
        running.events.append(event)
        running.uses.note(event)
        if running.program is not None:
            leg = running.program.find(running.leg, event)
            if leg is not None:
                running.strayed |= leg > running.leg
                if not (running.strayed and running.uses.would_miss(running.program.steps_between(running.leg, leg + 1))):
                    self._issue_until(running, running.program, leg + 1)
                    return
            self._leave_plan(running, event)
        self._carefully(running, event)

    def _issue_until(self, running: _Pass, program: Program, end: int) -> None:
        for leg in program.legs[running.leg : end]:
            for act in leg.actions:
                act()
        running.leg = max(running.leg, end)

    def _update(self, unit: Unit) -> None:
        """As the plan has it; but a pass that goes another way on some rank may have gradients of it left there, and it waits for
        the end."""
        running = self.current
        assert running is not None
        assert self.early is not None
        awaits = running.strayed and running.uses.may_make_more(unit.name)
        if not self.early.take(unit, awaits=awaits):
            running.due.add(unit.name)

    def _leave_plan(self, running: _Pass, event: Event) -> None:
        """The plan does not have this: all ranks must leave it here, or none can go on."""
        at = torch.tensor([running.leg, self.order.index(event.unit), list(Moment).index(event.moment)])
        story = f'{event.moment} of unit "{event.unit or "root"}" does not fit into the plan'
        rows = self.group.diverge(at, story)
        if not bool((rows == rows[0]).all()):
            raise ScheduleError(f"{story}, and other ranks met something else", fix=SAME_ORDER)
        for unit in self.units.values():
            unit.settle()
            unit.drop_reading()
        running.due |= running.program.due_after(running.leg) if running.program is not None else set()  # more may come of them
        running.program = None
        self.programs.pop((running.training, running.which), None)

    # --- without a plan ---

    def _carefully(self, running: _Pass, event: Event) -> None:
        unit = self.units[event.unit]
        if event.moment in (Moment.ENTER, Moment.GRAD):
            unit.ready()
            if not unit.present:
                self._serve(running, Step(Verb.GATHER, Kind.PARAM, event.unit))
            return
        if unit.present and not running.uses.is_in_use(event.unit):
            unit.release()
        if event.moment is Moment.DONE and unit.trained:
            unit.collect()
            if (unit.placement.grad.split or running.which.last) and not self._is_over(unit):
                self._serve(running, Step(Verb.REDUCE, Kind.GRAD, event.unit))

    def _serve(self, running: _Pass, wanted: Step | None) -> None:
        """Take part in what ranks need until this rank has what it wants, or until no rank wants anything."""
        complete = wanted is not None and wanted.verb is Verb.REDUCE and self._is_complete(running, wanted.unit)
        while True:
            rows = self.group.exchange(torch.tensor([self._code(wanted), complete]))
            codes = [code for code in rows[:, 0].tolist() if code >= 0]
            if not codes:
                return
            chosen = self._step(min(codes))
            self._take_part(running, chosen)
            # Else it waits for the end of the pass, also where only some rank has it to do so.
            if chosen == wanted and complete and bool((rows == rows[0]).all()):
                self._update_due(running, chosen.unit)
            if chosen == wanted:
                return

    def _take_part(self, running: _Pass, step: Step) -> None:
        unit = self.units[step.unit]
        if step.verb is Verb.REDUCE:
            unit.reduce()
            running.due.add(step.unit)
            return
        unit.join()
        if not running.uses.is_in_use(step.unit):
            unit.release()

    def _update_due(self, running: _Pass, only: str | None = None) -> None:
        """Update units whose gradients are summed, or one of them, unless they wait for the step. That a sum was asked for
        decides, which is the same on every rank, and not that there is one here."""
        if self.early is not None:
            for name in self.order if only is None else [only]:
                if name in running.due:
                    running.due.discard(name)
                    self.early.take(self.units[name], awaits=False)

    def _is_complete(self, running: _Pass, name: str) -> bool:
        """Whether nothing of a unit is still to come on this rank. Of one that was entered more than once, or lent to others,
        nobody knows; nor where a parameter was used before the forward."""
        return running.uses.entered[name] == 1 and self.units[name].is_complete(running.touched)

    def _is_over(self, unit: Unit) -> bool:
        """Whether it is updated, and has nothing more on this rank."""
        return self.early is not None and self.early.has_taken(unit) and not unit.owes(last=True)

    def _code(self, step: Step | None) -> int:
        return -1 if step is None else 2 * self.order.index(step.unit) + (step.verb is Verb.REDUCE)

    def _step(self, code: int) -> Step:
        name = self.order[code // 2]
        return Step(Verb.REDUCE, Kind.GRAD, name) if code % 2 else Step(Verb.GATHER, Kind.PARAM, name)
