"""Early: updates in the middle of a backward. Each unit is updated as soon as its gradients are summed, and these are let go: no
gradients wait for the norm, and none rest anywhere. What that norm was is known when the step is over."""

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
from naught.segment import Segment
from naught.states import Updating, changed_since, updating
from naught.strays import Lookout
from naught.unit import Unit
from naught.update import Norm, UpdateLimits
from naught.verdict import by_segment, judge, norms_of_slices, used_here
from naught.versions import Versions

__all__ = ["Early"]

_PART_NUMEL = 1 << 23  # on a device, where activations are while this goes on: an update has less to widen at a time
_ONCE = (
    "with naught.update_in_backward a step is one forward and one backward: call engine.step() after each, or leave the key out"
)


class Early:
    """The updates of the step under way. `settle` waits for whoever still copies states."""

    def __init__(self, group: Group, optimizer: Optimizer, limits: UpdateLimits, settle: Callable[[], None]) -> None:
        self.group, self.optimizer, self.settle = group, optimizer, settle
        self.limits = replace(limits, part_numel=min(limits.part_numel, _PART_NUMEL))
        self.lookout = Lookout()
        self.how: Updating | None = None  # None: no unit of this step has got so far
        self.norms: dict[Unit, list[Tensor]] = {}  # of the gradients of those that are updated
        self.known: dict[Segment, Versions] = {}  # what their parameters were then
        self.courier = Courier(limits.flight_bytes)

    @property
    def begun(self) -> bool:
        """Whether the weights are those of a step that is not over."""
        return bool(self.norms)

    def has_taken(self, unit: Unit) -> bool:
        return unit in self.norms

    def take(self, unit: Unit) -> None:
        """Update a unit whose gradients are all summed; all ranks do so for the same one. A parameter that no rank used stays as
        it is."""
        if self.has_taken(unit):
            raise ScheduleError(f'unit "{unit.name or "root"}" has more gradients and is updated already', fix=_ONCE)
        if self.how is None:
            self.settle()
            self.optimizer.will_step()
            self.how = updating(self.optimizer.rule, self.optimizer.param_groups, self.limits.part_numel)
        with self.group.noting():
            self.lookout.heed_all(unit.trained)
        norms = norms_of_slices(unit.trained)
        amiss = prepare(unit.trained, self.how) or self.group.noted
        failed, *used = self.group.exchange(torch.tensor([amiss is not None, *used_here(unit.trained)])).any(0).tolist()
        if failed:
            self.group.raise_together(amiss)
        self.norms[unit] = norms
        apply([unit], self.how, by_segment(unit.trained, used), 1.0, self.courier, delayed=False)
        for segment in unit.trained:
            segment.grads.let_sum_go()
            if not segment.weights.split:
                self.known[segment] = Versions(segment.weights.params)

    def finish(self, units: Sequence[Unit], tell: Callable[[], Exception | None]) -> Norm:
        """The norm of the gradients that this step has had. What is amiss on any rank is raised on all."""
        with self.group.noting():
            self.lookout.heed_all([segment for unit in units if unit not in self.norms for segment in unit.trained])
        late = any(unit.owes(last=True) for unit in units)
        norms = [each for unit in units for each in self.norms.get(unit, ())]
        verdict = judge(self.group, norms, about_husks(units), lambda: tell() or self._amiss(), late=late)
        if verdict is None:
            raise ScheduleError("some rank has gradients that came after the updates of this step", fix=_ONCE)
        norm = Norm(verdict.norm)
        if not norm.finite:
            raise ScheduleError(
                "the gradients of this step are not finite, and units have been updated with them",
                fix="lower the learning rate, or leave naught.update_in_backward out: then such a step is skipped",
            )
        self.courier.arrive()
        self.forget()
        return norm

    def forget(self) -> None:
        """The step is over, one way or another."""
        self.how = None
        self.norms.clear()
        self.known.clear()
        self.courier.forget()

    def _amiss(self) -> UsageError | None:
        """What was changed between the backward and its step, too late for units that are updated."""
        name = None if self.how is None else changed_since(self.how, self.optimizer.param_groups)
        if name is not None:
            return UsageError(
                f'"{name}" was changed between a backward and its step, and units have been updated by what it was '
                "(naught.update_in_backward)",
                fix="change hyperparameters before the forward or after the step",
            )
        for segment, known in self.known.items():
            index = known.first_written()
            if index is not None:
                return UsageError(
                    f'parameter "{segment.layout.slots[index].name}" was written to between a backward and its step, when it was '
                    "updated already (naught.update_in_backward)",
                    fix="write to parameters before the forward or after the step",
                )
        return None
