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
from naught.errors import ScheduleError
from naught.optimizer import Optimizer
from naught.states import Updating, updating
from naught.strays import Lookout
from naught.unit import Unit
from naught.update import Norm, UpdateLimits
from naught.verdict import judge, norms_of_slices

__all__ = ["Early"]

_PART_NUMEL = 1 << 23  # on a device, where activations are while this goes on: an update has less to widen at a time
_ONCE = (
    "with naught.update_in_backward a step is one forward and one backward: call engine.step() after each, or leave the key out"
)


class Early:
    """The updates of the step under way."""

    def __init__(self, group: Group, optimizer: Optimizer, limits: UpdateLimits, settle: Callable[[], None]) -> None:
        self.group, self.optimizer, self.settle = group, optimizer, settle  # which waits for whoever still copies states
        self.limits = replace(limits, part_numel=min(limits.part_numel, _PART_NUMEL))
        self.lookout = Lookout()
        self.how: Updating | None = None  # None: no unit of this step has been updated
        self.norms: dict[Unit, list[Tensor]] = {}  # of the gradients of those that have
        self.courier = Courier(limits.flight_bytes)

    @property
    def begun(self) -> bool:
        """Whether the weights are those of a step that is not over."""
        return self.how is not None

    def take(self, unit: Unit) -> None:
        """Update a unit whose gradients are all summed; all ranks do so for the same one. A parameter that no rank used stays as
        it is."""
        if unit in self.norms:
            raise ScheduleError(f'unit "{unit.name or "root"}" has more gradients and is updated already', fix=_ONCE)
        if self.how is None:
            self.settle()
            self.optimizer.will_step()
            self.how = updating(self.optimizer.rule, self.optimizer.param_groups, self.limits.part_numel)
        with self.group.noting():
            self.lookout.heed_all(unit.trained)
        self.norms[unit] = norms_of_slices(unit.trained)
        amiss = prepare(unit.trained, self.how)
        used = [flag for segment in unit.trained for flag in segment.grads.used]
        failed, *anywhere = self.group.exchange(torch.tensor([amiss is not None, *used])).any(0).tolist()
        if failed:
            self.group.raise_together(amiss)
        flag = iter(anywhere)
        flags = {segment: [next(flag) for _ in segment.grads.used] for segment in unit.trained}
        apply([unit], self.how, flags, 1.0, self.courier, delayed=False)
        for segment in unit.trained:
            segment.grads.let_sum_go()

    def finish(self, units: Sequence[Unit], tell: Callable[[], Exception | None]) -> Norm:
        """The norm of the gradients that this step has had. What is amiss on any rank is raised on all."""
        with self.group.noting():
            self.lookout.heed_all([segment for unit in units if unit not in self.norms for segment in unit.trained])
        late = any(unit.owes(last=True) for unit in units)
        norms = [each for unit in units for each in self.norms.get(unit, ())]
        verdict = judge(self.group, norms, about_husks(units), tell, late=late)
        if verdict is None:
            raise ScheduleError("some rank has gradients that came after the update of their unit", fix=_ONCE)
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
        self.courier.forget()
