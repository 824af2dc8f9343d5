"""Passes: opens and closes passes as the hooks say, and hands gradients to their segments."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import AbstractContextManager, ExitStack

import torch
from torch import nn

from naught.amiss import misused
from naught.claims import claimed
from naught.errors import NaughtError, UsageError
from naught.hints import loans_of
from naught.hooks import Hooks, keep_out_of_graphs
from naught.lending import Lending
from naught.schedule import Schedule
from naught.scout import Scout
from naught.steps import Moment
from naught.tiled import pieces_of
from naught.watch import Watch

__all__ = ["Passes"]

_LARGE_BYTES = 1 << 16


class Passes:
    """Listens to a module. `completes_step` tells of a pass that begins whether its gradients are summed over the ranks."""

    def __init__(self, module: nn.Module, schedule: Schedule, watch: Watch, completes_step: Callable[[], bool]) -> None:
        self.schedule, self.watch, self.completes_step = schedule, watch, completes_step
        # Units whose weights are absent at times.
        self.coming_and_going = {name for name, unit in schedule.units.items() if unit.placement.param.split or unit.lazy}
        self.all_summed = False  # no gradient of this step waits to be summed over the ranks
        self.away: NaughtError | None = None  # why the weights cannot be had now, where they cannot
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
        self.lends = Lending(schedule, self.homes)
        claimed.claim(self.homes, self)
        self.places: list[tuple[Mapping[str, object], str, object]] = [
            (holder, short, member)
            for inner in module.modules()
            for holder in (inner._parameters, inner._modules)
            for short, member in holder.items()
            if member is not None
        ]
        modules = dict(module.named_modules())
        frozen = {name for name, unit in schedule.units.items() if not unit.trained}
        inner = {name: modules[name] for name in schedule.units}
        divided = set(map(id, pieces_of(module)))
        pieces = {
            name: [param for segment in unit.trained for param in segment.weights.params]
            for name, unit in schedule.units.items()
            if id(inner[name]) in divided
        }
        self.hooks = Hooks(module, inner, self, frozen=frozen, large=self.large, pieces=pieces)
        if schedule.units[""].placement.param.split:
            self.hooks.add_doors("", _doors(modules, schedule.units))
        for name, param in loans_of(module):
            if param in self.homes:
                self.hooks.loans.expect(_unit_around(name, schedule.units), self.homes[param])

    # --- what the hooks say ---

    def begin(self) -> None:
        if self._is_the_users():
            return
        keep_out_of_graphs()  # the user may have compiled parts of the model since
        self._open(training=torch.is_grad_enabled())
        self.watch.enter("forward")
        if self.is_recording() and (self.coming_and_going or self.schedule.early is not None):
            running = self.schedule.current
            if running is not None and not running.events:
                running.touched = set()
            self.recording.enter_context(Scout(self.homes, self._found))

    @property
    def lent(self) -> set[str]:
        """Units whose parameters are the user's for a while."""
        return self.lends.lent

    def is_recording(self) -> bool:
        return self.schedule.current is not None and self.schedule.current.program is None

    def _is_the_users(self) -> bool:
        """Whether the user has all weights for a while and only computes with them: nothing is to be done."""
        whole = not self.coming_and_going or self.coming_and_going <= self.lent
        return bool(self.lent) and whole and not torch.is_grad_enabled()

    def _open(self, *, training: bool, careful: bool = False) -> None:
        if self.away is not None:
            raise self.away
        if self.lent:
            raise UsageError("the model was called inside engine.gathered()", fix="call it outside")
        running = self.schedule.current
        if running is not None and (running.uses.seen_backward or not running.training):
            self.close()
        self.refuse_midway()
        if self.schedule.current is None:
            alone = not training and not self.coming_and_going
            last = self.completes_step()
            if training and not last and self.schedule.early is not None:
                self.schedule.early.refuse_more()
            self.schedule.open(training=training, which=self.schedule.pass_of(last=last), careful=careful, alone=alone)

    def _found(self, param: nn.Parameter) -> None:
        """A parameter is about to be used, maybe where its unit is absent."""
        name, running = self.homes[param], self.schedule.current
        if running is not None and running.touched is not None:
            running.touched.add(param)
        matters = name in self.coming_and_going or self.schedule.early is not None  # for else it may be updated too soon
        if running is not None and matters and not running.uses.is_in_use(name):
            running.surprised = True
            self.hooks.borrow(name)

    def end(self) -> None:
        self.recording.close()
        if self._is_the_users():
            self.hooks.forget()
            return
        running = self.schedule.current
        self.watch.after("forward")
        if running is not None and not running.training:
            self.close()

    def happened(self, moment: Moment, unit: str) -> None:
        if self._is_the_users():
            return
        if self.schedule.current is None:  # a part of the model was called by itself: what follows is not the usual
            self._open(training=torch.is_grad_enabled(), careful=True)
        if moment is Moment.GRAD:
            self.watch.enter("backward")
        self.schedule.happened(moment, unit)

    def made(self, param: nn.Parameter) -> None:
        grads, index = self.large[param]
        grads.take(index)

    def in_backward(self, unit: str) -> bool:
        running = self.schedule.current
        return running is not None and unit in running.uses.backward

    def exported(self) -> None:
        self._refuse_absent("take the state_dict inside engine.gathered()")

    def imported(self) -> None:
        self._refuse_absent("load the state_dict inside engine.gathered()")

    def _refuse_absent(self, fix: str) -> None:
        if self.away is not None:
            raise self.away
        self.refuse_midway()
        absent = [unit for name, unit in self.schedule.units.items() if not unit.present and name not in self.lent]
        if absent and all(unit.lazy for unit in absent):
            raise UsageError("the weights of the last step are still to come", fix=f"{fix}, or set naught.lazy_weights to false")
        if absent:
            raise UsageError("the parameters are not here: each rank keeps its part of them", fix=fix)

    # --- what the engine says ---

    def close(self) -> None:
        """Finish the pass that is open, if one is."""
        running = self.schedule.current
        if running is None:
            return
        self.schedule.close()
        self.hooks.forget()
        if running.training:
            self.all_summed = running.which.last
        if running.uses.seen_backward:
            self.watch.after("backward")
        self.watch.rest()

    def complete(self) -> None:
        """Have the gradients of this step summed over the ranks, also where they were made unsynced. What has come since the pass
        was closed is not among them."""
        self.close()
        if not self.all_summed:
            self.sum_late()

    def sum_late(self) -> None:
        """Have what backwards have left since the pass was closed summed over the ranks, too. All ranks must do so."""
        self.schedule.open(training=True, which=self.schedule.pass_of(last=True), careful=True)
        self.close()

    def complete_late(self) -> None:
        """Complete the sums, late gradients of any rank among them; all ranks must ask. A step finds out by itself whether there
        are any."""
        self.complete()
        late = any(unit.owes(last=True) for unit in self.schedule.units.values())
        if bool(self.schedule.group.exchange(torch.tensor([int(late)])).any()):
            self.sum_late()

    def drop_gradients(self) -> None:
        """Begin a step anew: whatever has been collected so far is let go."""
        if self.schedule.current is not None and self.schedule.current.uses.seen_backward:
            self.close()
        for unit in self.schedule.units.values():
            for segment in unit.segments:
                segment.grads.drop()  # also what autograd makes for parameters that are in no group
        self.all_summed = False

    def forget_failures(self) -> bool:
        """Of updates on the host; whether there were any."""
        return any([segment.forget_failure() for unit in self.schedule.units.values() for segment in unit.segments])

    def collect(self) -> None:
        """Take up every gradient that has been made so far."""
        for unit in self.schedule.units.values():
            unit.collect()

    def amiss(self) -> UsageError | None:
        """What users may have done to parameters that makes a step wrong, as far as no device has to be asked."""
        for holder, short, member in self.places:
            if holder.get(short) is not member:
                what = "parameter" if isinstance(member, nn.Parameter) else "module"
                return UsageError(
                    f'the {what} "{short}" of a module was replaced after the engine was made, and the new one is not trained',
                    fix="replace it before naught.initialize; load_state_dict needs assign=False",
                )
        return misused(list(self.schedule.units.values()))

    def abort(self) -> None:
        """Forget the pass that an exception has ended, and with it its step: part of a sum is no gradient."""
        with ExitStack() as every:  # whatever befalls one of them, from the last one on
            every.callback(self.watch.rest)
            every.callback(self.drop_gradients)
            every.callback(self.hooks.forget)
            every.callback(self.schedule.abort)
            every.callback(self.recording.close)

    def catch_up(self) -> None:
        """Have all weights follow their last update: not in the middle of a step, which is taken with those that are there."""
        units = [unit for unit in self.schedule.units.values() if unit.behind]
        if units and self.schedule.is_midway:
            raise UsageError(
                "a step is under way with weights that its update has still to reach (naught.delay_update_after)",
                fix="look at weights, write to them and save between step() and the next forward",
            )
        for unit in units:
            unit.catch_up()

    def drain(self) -> None:
        """Until nothing is on its way up: it may come from what somebody is about to write to."""
        hosts = dict.fromkeys(segment.home.host for unit in self.schedule.units.values() for segment in unit.segments)
        for host in hosts:
            if host is not None:
                host.ferry.drain()

    def lending(
        self, params: Iterable[nn.Parameter] | None = None, writer: int | None = None, *, keeps: bool = True
    ) -> AbstractContextManager[None]:
        """Lend the units of these parameters, or all; for reading, unless what is written is kept."""
        self.refuse_midway()
        running = self.schedule.current
        if running is not None and (running.uses.seen_backward or not running.training):
            self.close()
        return self.lends.open(params, writer, keeps=keeps)

    def end_backward(self) -> None:
        """Where units are updated in the backward, have all of them updated that one has reached."""
        running = self.schedule.current
        if self.schedule.early is not None and running is not None and running.uses.seen_backward:
            self.close()

    def refuse_midway(self) -> None:
        """Where units are updated in the backward, weights and states are those of no step until it is over."""
        self.end_backward()  # of a user's own: all ranks have updated the same units then
        if self.schedule.early is not None:
            self.schedule.early.refuse_midway()

    def remove(self) -> None:
        """Give the model whole weights of its own again, and stop to listen."""
        self.close()
        try:
            for unit in self.schedule.units.values():
                unit.make_whole()
                for segment in unit.segments:
                    segment.close()
        finally:  # also where an update has failed, and its weights cannot be had
            self._let_go()

    def _let_go(self) -> None:
        homes = [segment.home for unit in self.schedule.units.values() for segment in unit.segments]
        for side in dict.fromkeys(side for home in homes for side in (home.disk, home.host)):
            if side is not None:
                side.close()
        self.hooks.remove()
        claimed.drop(self.homes)
        self.homes.clear()
        self.places.clear()
        self.large.clear()


def _doors(modules: Mapping[str, nn.Module], units: Collection[str]) -> list[nn.Module]:
    """Parts of the root that have parameters of their own."""
    return [
        module
        for name, module in modules.items()
        if name and _unit_around(name, units) == "" and any(True for _ in module.parameters(recurse=False))
    ]


def _unit_around(module: str, units: Collection[str]) -> str:
    """The innermost unit that a module lies in."""
    while module not in units:
        module = module.rpartition(".")[0]
    return module
