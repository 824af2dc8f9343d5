"""Passes: opens and closes passes as the hooks say, and hands gradients to their segments."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from naught.errors import UsageError
from naught.hooks import Hooks
from naught.schedule import Schedule
from naught.steps import Moment, Pass
from naught.unit import Segment
from naught.watch import Watch

__all__ = ["Passes"]


class Passes:
    """Listens to a module. `completes_step` tells of a pass that begins whether it is the last of its step."""

    def __init__(self, module: nn.Module, schedule: Schedule, watch: Watch, completes_step: Callable[[], bool]) -> None:
        self.schedule, self.watch, self.completes_step = schedule, watch, completes_step
        self.lent = False  # the parameters are the user's for a while
        self.homes: dict[nn.Parameter, tuple[Segment, int]] = {
            param: (segment, index)
            for unit in schedule.units.values()
            for segment in unit.segments
            for index, param in enumerate(segment.weights.params)
        }
        modules = dict(module.named_modules())
        self.hooks = Hooks(module, {name: modules[name] for name in schedule.units}, self)

    # --- what the hooks say ---

    def begin(self) -> None:
        if self.lent:
            raise UsageError("the model was called inside engine.gathered()", fix="call it outside")
        running = self.schedule.current
        if running is not None and (running.seen_backward or not running.training):
            self.close()
        if self.schedule.current is None:
            self.schedule.open(training=torch.is_grad_enabled(), which=Pass(last=self.completes_step()))
            self.watch.enter("forward")

    def end(self) -> None:
        running = self.schedule.current
        self.watch.after("forward")
        if running is not None and not running.training:
            self.close()

    def happened(self, moment: Moment, unit: str) -> None:
        if self.schedule.current is None:
            self.begin()
        if moment is Moment.GRAD:
            self.watch.enter("backward")
        self.schedule.happened(moment, unit)

    def collect(self, param: nn.Parameter) -> None:
        segment, index = self.homes[param]
        assert param.grad is not None
        if param.grad.layout is not torch.strided:
            raise UsageError(f'the gradient of "{segment.layout.slots[index].name}" is sparse', fix="set sparse=False")
        if self.schedule.current is None:
            self.begin()
        assert self.schedule.current is not None
        self.schedule.current.seen_backward = True  # also where no unit was called by its name
        segment.grads.collect(index, param.grad)
        segment.used[index] = True
        param.grad = None

    def in_backward(self, unit: str) -> bool:
        running = self.schedule.current
        return running is not None and unit in running.backward

    def exported(self) -> None:
        if not self.lent and any(unit.placement.param.split for unit in self.schedule.units.values()):
            raise UsageError("the parameters are split over the ranks", fix="take the state_dict inside engine.gathered()")

    # --- what the engine says ---

    def close(self) -> None:
        """Finish the pass that is open, if one is."""
        running = self.schedule.current
        self.schedule.close()
        self.hooks.forget()
        if running is not None and running.seen_backward:
            self.watch.after("backward")
        self.watch.enter("idle")

    def abort(self) -> None:
        """Forget the pass that an exception has ended, and with it its step: part of a sum is no gradient."""
        self.schedule.abort()
        self.hooks.forget()
        for unit in self.schedule.units.values():
            for segment in unit.trained:
                segment.forget()
        self.watch.enter("idle")

    @contextmanager
    def lending(self) -> Iterator[None]:
        """While open, every parameter is whole and the user's. Within itself it is open already."""
        if self.lent:
            yield
            return
        self.close()
        units = list(self.schedule.units.values())
        for unit in units:
            unit.lend()
        self.lent = True
        try:
            yield
        finally:
            self.lent = False
            for unit in units:
                unit.take_back()

    def remove(self) -> None:
        """Give the model whole weights of its own again, and stop to listen."""
        self.close()
        for unit in self.schedule.units.values():
            unit.gather()
            unit.ready()
            for segment in unit.segments:
                segment.close()
        self.hooks.remove()
        self.homes.clear()
