"""Stepping: what follows the last backward of a step. The scale of the loss, the update, the schedule of the rate, and what
is said of a step that is skipped."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from typing import Any, Protocol

from torch import Tensor

from naught.applying import Courier
from naught.early import Early
from naught.errors import UsageError
from naught.loss_scale import FixedScale, LossScale
from naught.optimizer import Optimizer
from naught.passes import Passes
from naught.states import updating
from naught.strays import Lookout
from naught.torn import IN_THE_BACKWARD, half_updated, has_torn
from naught.unit import Unit
from naught.update import Norm, UpdateLimits, update, verdict_on

__all__ = ["Scheduler", "Stepping"]

_LOG = logging.getLogger("naught")


class Scheduler(Protocol):
    """What the engine calls of a schedule: ours, torch's, or a user's own."""

    def step(self, *args: Any, **kwargs: Any) -> None: ...


class Stepping:
    """Takes the steps of training once their gradients are there, and counts them."""

    def __init__(
        self,
        passes: Passes,
        optimizer: Optimizer | None,
        limits: UpdateLimits,
        scale: LossScale,
        rates: Scheduler | None,
        early: Early | None = None,
    ) -> None:
        self.passes, self.optimizer, self.limits, self.scale, self.rates = passes, optimizer, limits, scale, rates
        self.early = early  # None: all units are updated in the step
        self.scaled = False  # a loss of this step was multiplied by the scale
        self.taken = self.skipped = 0
        self.norm: Norm | None = None  # of the last step; None before the first
        self.lookout = Lookout() if early is None else early.lookout
        self.courier = Courier(limits.flight_bytes) if early is None else early.courier  # of new weights that may be under way

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
        schedule, scale = self.passes.schedule, self.scale.value
        if self.early is None:
            self.norm = self._update(self.optimizer, list(schedule.units.values()), scale)
        else:
            self.norm = self.early.finish(list(schedule.units.values()), self.passes.amiss)
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

    def arrive(self) -> None:
        """Wait for new weights where they are to be there after the step. Those that do not come are asked for again."""
        try:
            self.courier.arrive()
        except BaseException as error:
            error.add_note("naught: the step was taken all the same. New weights have not come, and whoever uses them asks again")
            raise
        finally:
            self.courier.forget()
            if self.early is not None:
                self.early.show()

    def _update(self, optimizer: Optimizer, units: Sequence[Unit], scale: float) -> Norm:
        optimizer.will_step()
        how = updating(optimizer.rule, optimizer.param_groups, self.limits.part_numel)
        ask = partial(verdict_on, units, self.passes.schedule.group, how, tell=self.passes.amiss, lookout=self.lookout)
        verdict = ask()
        if verdict is None:
            self.passes.sum_late()
            self.passes.watch.enter("step")  # which closing a pass has left
            verdict = ask()
        assert verdict is not None
        delayed = self.limits.delay_after is not None and self.taken >= self.limits.delay_after
        return update(units, how, self.limits, verdict, scale=scale, courier=self.courier, delayed=delayed)

    def override_scale(self, scale: float) -> None:
        """Go on with this scale of the loss, whatever comes."""
        if self.early is not None and scale != 1.0:
            raise UsageError(
                f"a scale of {scale:g} is undone before an update, and naught.update_in_backward does not wait for that",
                fix="leave the scale at 1, or leave the key out",
            )
        self.scale = FixedScale(scale)

    def refuse_to_look(self) -> None:
        """Gradients of a step cannot be looked at where they are let go in the backward."""
        if self.early is not None:
            self.early.refuse_to_look()

    def give_up(self, error: BaseException) -> None:
        """An exception has ended the step. Where weights have changed nobody goes on with them."""
        self.courier.forget()
        told = has_torn(error)
        begun = self.early is not None and self.early.begun
        if begun and not told:
            error.add_note(IN_THE_BACKWARD)
        if self.early is not None:
            self.early.forget()
        if begun or told:
            self.passes.away = half_updated()

    def abandon(self) -> None:
        """Nobody takes this step any more."""
        if self.early is not None:
            if self.early.begun:
                _LOG.warning(
                    "the engine is let go between a backward and its step(), and the backward has updated weights already "
                    "(naught.update_in_backward): some are new and some are old"
                )
            self.early.forget()

    def _story(self, norm: Norm, scale: float, *, helps: bool) -> str:
        story = f"step {self.taken + 1} was skipped on all ranks: its gradient norm is not finite"
        if self.passes.coming_and_going:
            story += (
                ". Where weights come and go, a parameter that is used outside of its own module for the first time reads as "
                "NaN: inside the model's forward the next pass finds such a use, elsewhere (in a loss, say) none does"
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
