"""Early: updates in the middle of a backward. Each unit is updated as soon as its gradients are summed, and these are let go: no
gradients wait for the norm, which is known when the step is over.

Until then weights that are new read as NaN: the forward of this step was computed with others. Who uses them again in the
backward, where no forward has told, has a norm that says so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from naught.amiss import about_husks
from naught.applying import Courier, apply, prepare
from naught.comm import Group
from naught.errors import ScheduleError, UsageError
from naught.optimizer import Optimizer
from naught.states import Updating, changed_since, updating
from naught.strays import Lookout
from naught.unit import Unit
from naught.update import Norm, UpdateLimits
from naught.verdict import by_segment, judge, norms_of_slices, used_here

__all__ = ["Early"]

_PART_NUMEL = 1 << 23  # on a device, where activations are while this goes on: an update has less to widen at a time
_ONCE = (
    "with naught.update_in_backward a step is one forward and one backward: call engine.step() after each, or leave the key out, "
    "also for a model that uses weights in its backward where its forward has not"
)


class Early:
    """The updates of the step under way. `settle` waits for whoever still copies states."""

    def __init__(self, group: Group, optimizer: Optimizer, limits: UpdateLimits, settle: Callable[[], None]) -> None:
        self.group, self.optimizer, self.settle = group, optimizer, settle
        self.limits = replace(limits, part_numel=min(limits.part_numel, _PART_NUMEL))
        self.lookout = Lookout()
        self.how: Updating | None = None  # None: no unit of this step has got so far
        self.norms: dict[Unit, list[Tensor]] = {}  # of the gradients of those that are updated
        self.hidden: list[Unit] = []  # of a step that is over, until their weights have arrived
        self.courier = Courier(limits.flight_bytes, at_once=False)

    @property
    def begun(self) -> bool:
        """Whether the weights are those of a step that is not over."""
        return bool(self.norms)

    def has_taken(self, unit: Unit) -> bool:
        return unit in self.norms

    def refuse_midway(self) -> None:
        """Weights and states are those of no step while one is under way."""
        if self.begun:
            raise UsageError(
                "the gradients of this backward are in the weights already (naught.update_in_backward), and its step is not over",
                fix="call engine.step() first: a step is one forward and one backward; or load a checkpoint",
            )

    def refuse_more(self) -> None:
        """Every backward ends a step."""
        raise UsageError(
            "naught.update_in_backward updates in every backward, and this one is said not to end its step",
            fix="leave out no_sync and what says so of a micro-batch, or the key",
        )

    def refuse_to_look(self) -> None:
        """Of gradients there is nothing to be seen between a backward and its step."""
        raise UsageError(
            "gradients are let go in the backward (naught.update_in_backward)",
            fix="look at them in hooks of your own on parameters, or leave the key out",
        )

    def take(self, unit: Unit, *, awaits: bool) -> bool:
        """Update a unit whose gradients are all summed, unless some rank awaits more of them; whether it did. All ranks do so for
        the same one. A parameter that no rank used stays as it is."""
        if self.has_taken(unit):
            raise ScheduleError(f'unit "{unit.name or "root"}" has more gradients and is updated already', fix=_ONCE)
        how = self._begin()
        with self.group.noting(again=True):
            self.lookout.heed_all(unit.trained)
        norms = norms_of_slices(unit.trained)
        noted = self.group.take_note()
        amiss = prepare(unit.trained, how) or noted
        told = torch.tensor([amiss is not None, awaits, *used_here(unit.trained)])
        failed, waits, *used = self.group.exchange(told).any(0).tolist()
        if failed:
            self.group.raise_noted(amiss)
        if waits:
            return False
        self.norms[unit] = norms
        apply([unit], how, by_segment(unit.trained, used), 1.0, self.courier, delayed=False)
        for segment in unit.trained:
            segment.grads.let_sum_go()
        return True

    def _begin(self) -> Updating:
        """How all units of this step are updated."""
        if self.how is None:
            self.settle()
            self.optimizer.will_step()
            self.how = updating(self.optimizer.rule, self.optimizer.param_groups, self.limits.part_numel)
        return self.how

    def finish(self, units: Sequence[Unit], tell: Callable[[], Exception | None]) -> Norm:
        """The norm of the gradients that this step has had. What is amiss on any rank is raised on all."""
        how = self._begin()  # also where there are no gradients
        with self.group.noting(again=True):
            self.lookout.heed_all([segment for unit in units if unit not in self.norms for segment in unit.trained])
        late = any(unit.owes(last=True) for unit in units)
        norms = [each for unit in units for each in self.norms.get(unit, ())]
        verdict = judge(self.group, norms, about_husks(units), lambda: tell() or self._changed(how), late=late)
        if verdict is None:
            raise ScheduleError("some rank has gradients that came after the updates of this step", fix=_ONCE)
        norm = Norm(verdict.norm)
        if not norm.finite:
            raise ScheduleError(
                "the gradients of this step are not finite, and units have been updated with them",
                where=self._culprit(),
                fix="lower the learning rate; use weights in the backward only where the forward has, for after the update of "
                "their unit they read as NaN; or leave naught.update_in_backward out: then such a step is skipped",
            )
        self._end()
        return norm

    def _end(self) -> None:
        self.hidden += self.norms
        self.how = None
        self.norms.clear()

    def show(self) -> None:
        """New weights have arrived: those that are here are to be seen."""
        for unit in self.hidden:
            unit.show()
        self.hidden.clear()

    def forget(self) -> None:
        """The step is over, one way or another."""
        self._end()
        self.courier.forget()
        self.show()

    def _culprit(self) -> str:
        """The first unit of the backward whose gradients, as far as this rank has them, are not finite."""
        bad = (unit for unit, norms in self.norms.items() if not all(bool(each.isfinite().all()) for each in norms))
        unit = next(bad, None)
        return "" if unit is None else f'rank {self.group.rank}, from unit "{unit.name or "root"}" on'

    def _changed(self, how: Updating) -> UsageError | None:
        """What comes too late for units that are updated."""
        name = changed_since(how, self.optimizer.param_groups)
        if name is None:
            return None
        return UsageError(
            f'"{name}" was changed between a backward and its step, and units have been updated by what it was '
            "(naught.update_in_backward)",
            fix="change hyperparameters before the backward or after the step",
        )
