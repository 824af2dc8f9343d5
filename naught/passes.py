"""Passes: opens and closes passes as the hooks say, and hands gradients to their segments."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import nn

from naught.errors import UsageError
from naught.hooks import Hooks, keep_out_of_graphs
from naught.schedule import Schedule
from naught.scout import Scout
from naught.steps import Moment, Pass
from naught.watch import Watch
from naught.weights import check_husks

__all__ = ["Passes"]

_LARGE_BYTES = 1 << 16


class Passes:
    """Listens to a module. `completes_step` tells of a pass that begins whether its gradients are summed over the ranks."""

    def __init__(self, module: nn.Module, schedule: Schedule, watch: Watch, completes_step: Callable[[], bool]) -> None:
        self.schedule, self.watch, self.completes_step = schedule, watch, completes_step
        self.lent = False  # the parameters are the user's for a while
        self.recording = ExitStack()  # holds a scout while a forward is recorded
        self.homes = {
            param: unit.name for unit in schedule.units.values() for segment in unit.segments for param in segment.weights.params
        }
        # Large gradients are taken up as they are made, so that each is held twice for a moment only; small ones are not
        # worth a hook.
        self.large = {
            param: (segment.grads, index)
            for unit in schedule.units.values()
            for segment in unit.trained
            for index, param in enumerate(segment.weights.params)
            if param.nbytes >= _LARGE_BYTES
        }
        modules = dict(module.named_modules())
        frozen = {name for name, unit in schedule.units.items() if not unit.trained}
        inner = {name: modules[name] for name in schedule.units}
        self.hooks = Hooks(module, inner, self, frozen=frozen, large=self.large)

    # --- what the hooks say ---

    def begin(self) -> None:
        keep_out_of_graphs()  # the user may have compiled parts of the model since
        self._open()
        assert self.schedule.current is not None
        if self.schedule.current.program is None and any(not unit.present for unit in self.schedule.units.values()):
            self.recording.enter_context(Scout(self.homes, self._found))

    def _open(self) -> None:
        if self.lent:
            raise UsageError("the model was called inside engine.gathered()", fix="call it outside")
        running = self.schedule.current
        if running is not None and (running.seen_backward or not running.training):
            self.close()
        if self.schedule.current is None:
            self.schedule.open(training=torch.is_grad_enabled(), which=Pass(last=self.completes_step()))
            self.watch.enter("forward")

    def _found(self, param: nn.Parameter) -> None:
        """A parameter is about to be used where its unit is absent."""
        unit = self.schedule.units[self.homes[param]]
        if not unit.present and self.schedule.current is not None:
            self.schedule.current.surprised = True
            self.hooks.borrow(unit.name)

    def end(self) -> None:
        self.recording.close()
        running = self.schedule.current
        self.watch.after("forward")
        if running is not None and not running.training:
            self.close()
            self._check_husks()

    def happened(self, moment: Moment, unit: str) -> None:
        if self.schedule.current is None:
            self._open()
        if moment is Moment.GRAD:
            self.watch.enter("backward")
        self.schedule.happened(moment, unit)

    def made(self, param: nn.Parameter) -> None:
        if self.schedule.current is None:
            self._open()
        grads, index = self.large[param]
        grads.take(index)

    def in_backward(self, unit: str) -> bool:
        running = self.schedule.current
        return running is not None and unit in running.backward

    def exported(self) -> None:
        self._refuse_absent("take the state_dict inside engine.gathered()")

    def imported(self) -> None:
        self._refuse_absent("load the state_dict inside engine.gathered()")

    def _refuse_absent(self, fix: str) -> None:
        if not self.lent and any(not unit.present for unit in self.schedule.units.values()):
            raise UsageError("the parameters are not here: each rank keeps its part of them", fix=fix)

    # --- what the engine says ---

    def close(self) -> None:
        """Finish the pass that is open, if one is."""
        running = self.schedule.current
        if running is None:
            return
        self.schedule.close()
        self.hooks.forget()
        if running.seen_backward:
            self.watch.after("backward")
        self.watch.rest()

    def abort(self) -> None:
        """Forget the pass that an exception has ended, and with it its step: part of a sum is no gradient."""
        self.recording.close()
        self.schedule.abort()
        self.hooks.forget()
        for unit in self.schedule.units.values():
            for segment in unit.trained:
                segment.grads.drop()
        self.watch.rest()

    @contextmanager
    def lending(self) -> Iterator[None]:
        """While open, every parameter is whole and the user's. Within itself it is open already."""
        if self.lent:
            yield
            return
        self.close()
        self._check_husks()
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

    def _check_husks(self) -> None:
        check_husks(segment.weights for unit in self.schedule.units.values() if not unit.present for segment in unit.segments)

    def remove(self) -> None:
        """Give the model whole weights of its own again, and stop to listen."""
        self.close()
        for unit in self.schedule.units.values():
            unit.fetch()
            for segment in unit.segments:
                segment.close()
        self.hooks.remove()
        self.homes.clear()
        self.large.clear()
