"""Stepping: what follows the last backward of a step. The scale of the loss, the update, the schedule of the rate, and what
is said of a step that is skipped."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any, Protocol

from torch import Tensor

from naught.errors import UsageError
from naught.loss_scale import LossScale
from naught.optimizer import Optimizer
from naught.passes import Passes
from naught.rules import Hyper
from naught.states import Updating
from naught.strays import Lookout
from naught.update import Norm, UpdateLimits, update

__all__ = ["Scheduler", "Stepping"]

_LOG = logging.getLogger("naught")


class Scheduler(Protocol):
    """What the engine calls of a schedule: ours, torch's, or a user's own."""

    def step(self, *args: Any, **kwargs: Any) -> None: ...


def _as_it_is(hyper: Hyper) -> Hyper:
    """What a schedule of the rate may write to afterwards does not change it."""
    return {name: value.clone() if isinstance(value, Tensor) else value for name, value in hyper.items()}


class Stepping:
    """Takes the steps of training once their gradients are there, and counts them."""

    def __init__(
        self, passes: Passes, optimizer: Optimizer | None, limits: UpdateLimits, scale: LossScale, rates: Scheduler | None
    ) -> None:
        self.passes, self.optimizer, self.limits, self.scale, self.rates = passes, optimizer, limits, scale, rates
        self.scaled = False  # a loss of this step was multiplied by the scale
        self.taken = self.skipped = 0
        self.norm: Norm | None = None  # of the last step; None before the first
        self.lookout = Lookout()

    def scale_loss(self, loss: Tensor) -> Tensor:
        self.scaled = True
        return loss if self.scale.value == 1.0 else loss.float() * self.scale.value

    @property
    def applied(self) -> bool:
        """Whether the last step changed the weights."""
        return self.norm is not None and (self.norm.finite or not self.limits.skips)

    def take(self, **rate_arguments: Any) -> None:
        """Update the weights on all ranks, or skip the step on all. Arguments are for the schedule of the rate."""
        if self.optimizer is None:
            raise UsageError(
                "the engine was made without an optimizer",
                fix='give naught.initialize one, or name one in the configuration: "optimizer": {"type": "AdamW"}',
            )
        if self.scale.value != 1.0 and not self.scaled:
            raise UsageError(
                "the loss was not scaled before its backward", fix="call engine.backward(loss) or engine.scale(loss).backward()"
            )
        self.scaled = False
        self.optimizer.will_step()
        schedule, scale = self.passes.schedule, self.scale.value
        units = list(schedule.units.values())
        rule, hypers = self.optimizer.rule, self.optimizer.param_groups
        how = Updating(rule, [_as_it_is(hyper) for hyper in hypers] if rule.defers else hypers, self.limits.part_numel)
        delayed = self.limits.delay_after is not None and self.taken >= self.limits.delay_after
        tell, lookout = self.passes.amiss, self.lookout
        take = partial(update, units, schedule.group, how, self.limits, scale=scale, tell=tell, lookout=lookout, delayed=delayed)
        norm = take()
        if norm is None:
            self.passes.sum_late()
            norm = take()
        assert norm is not None
        self.norm = norm
        self.passes.drop_gradients()
        helps = self.scale.update(overflow=not self.norm.finite)
        if self.applied:
            self.taken += 1
            self.optimizer.has_stepped()
            self.lookout.has_stepped()
            if self.rates is not None:
                self.rates.step(**rate_arguments)
        else:
            self.skipped += 1
            schedule.forget_plans()  # a parameter that the plan does not know to be used reads as NaN: find it
            _LOG.warning(self._story(self.norm, scale, helps=helps))

    def _story(self, norm: Norm, scale: float, *, helps: bool) -> str:
        story = f"step {self.taken + 1} was skipped on all ranks: its gradient norm is not finite"
        if any(unit.placement.param.split for unit in self.passes.schedule.units.values()):
            story += (
                ". At stage 3 a parameter that is used outside of the model's own forward (in a loss, in a method that is called "
                "directly) reads as NaN: use it inside the forward"
            )
        if norm.culprit is not None:
            story += f'; rank {self.passes.schedule.group.rank} has such a gradient of "{norm.culprit}"'
        if scale != self.scale.value:
            story += f"; the scale of the loss falls from {scale:g} to {self.scale.value:g}"
        elif not helps:
            story += (
                f"; the scale of the loss cannot fall below {scale:g}. Lower the learning rate, look at that parameter, or "
                "train in bf16, which needs no scale"
            )
        return story
