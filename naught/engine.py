"""Engine: what the user holds. Calls the model, takes the steps, and says what happened."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from naught.accumulation import Accumulation, by_an_engine
from naught.between import Between
from naught.claims import Claims
from naught.config import Batch, Config, refuse_accumulation
from naught.data import Loader
from naught.devices import is_out_of_memory, limit_memory
from naught.dividing import replace_in_groups
from naught.errors import ScheduleError, UsageError
from naught.hooks import recomputing
from naught.inputs import Inputs
from naught.local_parts import put_back
from naught.observing import Observer, StepFacts
from naught.parking import Parking
from naught.passes import Passes
from naught.planned import is_recomputing, whole_units
from naught.precision import DTYPES, precision_of
from naught.running import Own
from naught.saved import Saves
from naught.saves.background import Background
from naught.shortage import Setup, changes_of, note_of
from naught.stepping import Stepping
from naught.watchdog import Watchdog

__all__ = ["Engine", "engines"]

# The engine that trains a parameter, for functions that are given only that.
engines: Claims[Engine] = Claims()
_LIVING: Own[weakref.WeakSet[Engine]] = Own(weakref.WeakSet)


class Engine(Between):
    """A model that trains as its configuration says. Call it, `backward` its loss, and `step`."""

    def __init__(
        self,
        module: nn.Module,
        settings: Config,
        accumulation: Accumulation,
        passes: Passes,
        stepping: Stepping,
        observer: Observer,
        background: Background,
        saves: Saves | None = None,
    ) -> None:
        super().__init__()
        self.saves = saves  # what a backward needs rests elsewhere until then; None: where it was made
        self.module, self.settings, self.accumulation = module, settings, accumulation
        self.passes, self.stepping, self.observer = passes, stepping, observer
        self.parking = Parking(passes.schedule.units.values())
        self.background = background
        self.inputs = Inputs(passes.schedule.group)
        self.watchdog = Watchdog(passes.schedule.group, passes.watch, settings.naught.watchdog_s)
        weakref.finalize(self, self.watchdog.stop)  # also where a script just ends
        self.training_dataloader: Loader | None = None  # None: no training_data was given
        self.destroyed = False
        engines.claim(passes.homes, self)
        _LIVING().add(self)
        if stepping.optimizer is not None:
            stepping.optimizer.belong_to(self)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":
                raise
            return getattr(self.module, name)

    # --- training ---

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not recomputing():
            with self._all_or_nothing("backward"):
                self.passes.end_backward()
            self.passes.refuse_midway()  # not as a fault of the step, which may still be taken
        cast = self.settings.torch_autocast
        if self.settings.fp16.auto_cast:
            args, kwargs = tree_map_only(Tensor, _to_half, (args, kwargs))
        # A caller's own autocast holds unless the configuration has one.
        casting = torch.autocast(self.device.type, DTYPES[cast.dtype]) if cast.enabled else nullcontext()
        saving = self.saves.open() if self.saves is not None and torch.is_grad_enabled() else nullcontext()
        observed = self.observer.forward(self.module, self.global_steps + 1)
        with self._all_or_nothing("forward"), casting, saving, observed, self._hinting():
            self.inputs.look((args, kwargs), self.global_steps + 1)
            return self.module(*args, **kwargs)

    @contextmanager
    def _hinting(self) -> Iterator[None]:
        """Inputs of another precision than the weights fail deep inside of the model: say what to do about it."""
        try:
            yield
        except RuntimeError as error:
            if "dtype" in str(error) or "expected scalar type" in str(error):
                error.add_note(
                    "naught: if this is about the precision of an input, cast it to that of the weights, set "
                    "fp16.auto_cast if they are fp16, or "
                    "keep weights in 32 bits and set torch_autocast.enabled"
                )
            raise

    def backward(self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> Tensor:
        """Compute gradients of a micro-batch. The loss is divided by the number of micro-batches in a step, unless told
        otherwise, and multiplied by the scale of the loss. Returns it divided, without the scale."""
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            what = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
            raise UsageError(f"the loss is {what}, not one number", fix="take its mean or its sum first")
        if self.stepping.early is not None:
            self.stepping.early.refuse_midway()
        share = loss / self.accumulation.steps if scale_wrt_gas else loss
        _collect_everywhere()  # what users' own backwards have made is still to be divided
        with self._all_or_nothing("backward"), self._explaining(), by_an_engine():
            torch.autograd.backward(self.scale(share), retain_graph=retain_graph)
            self.passes.collect()
            _collect_everywhere()
            self.passes.end_backward()
        self.accumulation.backward()
        self.observer.lost(loss)
        return share.detach()

    def scale(self, loss: Tensor) -> Tensor:
        """The loss as its own `backward()` needs it under fp16: `engine.scale(loss).backward()`."""
        return self.stepping.scale_loss(loss)

    def step(self, lr_kwargs: dict[str, Any] | None = None) -> None:
        """Update the weights if this micro-batch completes a step, and then the learning rate."""
        self.refuse_inside_gathered()
        completes = self.accumulation.at_boundary
        with self._all_or_nothing("step"):
            if completes:
                self.passes.complete()
                self.background.settle()
                self.watch.enter("step")
                self.stepping.take(**(lr_kwargs or {}))
            else:
                self.passes.close()
            self.accumulation.step()
            if completes:  # and counts, whether its weights arrive or not
                self.stepping.arrive()
                self.watch.after("step")
        if completes:
            self.watchdog.step = self.global_steps + 1
            self.observer.stepped(self._facts())
            if self.saves is not None:
                self.saves.look_back()
            self.background.look()

    def _facts(self) -> StepFacts:
        return StepFacts(
            step=self.global_steps,
            samples=self.global_samples,
            skipped=self.skipped_steps,
            rates=self.get_lr(),
            scale=self.scaling.value,
            norm=self.get_global_grad_norm(),
        )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Let go of the gradients of this step so far. Between the micro-batches of a step that the engine counts, or of
        which the caller has said that it goes on, this does nothing: the engine begins every step without gradients."""
        del set_to_none
        if self.accumulation.at_start:
            self.passes.refuse_midway()
            self.passes.drop_gradients()
            self._start_over()

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Say whether the micro-batch under way is the last of its step. From here on the caller counts, not the engine."""
        if not is_boundary and self.stepping.early is not None:
            self.stepping.early.refuse_more()
        self.accumulation.declare(last=is_boundary)

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Another number of samples in a step, by another number of micro-batches. Between steps."""
        self._resize(self.accumulation.resized(train=train_batch_size))

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Another number of samples in a micro-batch, and as many times more in a step. Between steps."""
        self._resize(self.accumulation.resized(micro=micro_batch_size))

    def _resize(self, batch: Batch) -> None:
        refuse_accumulation(self.settings, batch.accumulation)
        if precision_of(self.settings, batch.accumulation) != precision_of(self.settings, self.accumulation.steps):
            raise UsageError(
                "the engine was made for another kind of sum: of one micro-batch in 16 bits, or of several in 32",
                fix='set data_types.grad_accum_dtype to "fp32", and both are summed alike',
            )
        self.accumulation.batch = batch

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside keep whole gradients to themselves; split ones are summed as always."""
        before, self.accumulation.synced = self.accumulation.synced, False
        try:
            yield
        finally:
            running = self.schedule.current
            if running is not None and running.uses.seen_backward:
                self.passes.close()
            self.accumulation.synced = before

    def coalesce_grad_reduction(self) -> AbstractContextManager[None]:
        """Several backwards inside are summed over the ranks once, with the step."""
        return self.no_sync()

    def override_loss_scale(self, scale: float) -> None:
        """Go on with this scale of the loss, whatever comes."""
        self.stepping.override_scale(scale)

    def allreduce_gradients(self, bucket_size: int | None = None) -> None:
        """Sum the gradients of this step so far over the ranks now; a step does so by itself."""
        del bucket_size
        self.refuse_away()
        self.passes.complete_late()

    def empty_partition_cache(self) -> None:
        """Release what is gathered; between passes nothing is."""
        self.refuse_away()
        self.passes.close()

    def destroy(self) -> None:
        """Give the model whole weights of its own again, and let go of everything. The engine is of no use afterwards."""
        self.refuse_inside_gathered()
        if not self.destroyed:
            self.passes.close()
            self.passes.drop_gradients()  # of a step that nobody takes any more
            self.stepping.abandon()
            self.before_a_change()
            _LIVING().discard(self)
            if self.settings.naught.gpu_memory is not None and not any(other.settings.naught.gpu_memory for other in _LIVING()):
                limit_memory(self.device, None)
            self.reload_states()
            self.destroyed = True
            engines.drop(self.passes.homes)
            with ExitStack() as every:  # also where an update has failed, from the last one on
                every.callback(self.watchdog.stop)
                every.callback(self.background.wait)
                if self.optimizer is not None:
                    every.callback(self.optimizer.destroy)
                if self.saves is not None:
                    every.callback(self.saves.rest.close)
                every.callback(self.observer.close)
                every.callback(self._hand_back)
                every.callback(self.passes.remove)

    def _hand_back(self) -> None:
        wholes = put_back(self.module)
        replace_in_groups([] if self.optimizer is None else self.optimizer.param_groups, wholes)

    @contextmanager
    def _all_or_nothing(self, phase: str) -> Iterator[None]:
        """An exception ends not only its pass but the whole step, from its first micro-batch on."""
        self.refuse_away()
        try:
            with self.watchdog.within(phase, self.global_steps + 1):
                yield
        except BaseException as error:
            if recomputing():  # a checkpoint around the engine ends its recompute so
                raise
            try:
                if is_out_of_memory(error):
                    self.schedule.lacked_memory()
                    error.add_note(self._shortage())
            except Exception as another:  # where there is no memory left even for this
                error.add_note(f"naught: out of memory, and no more can be said of it: {another}")
            finally:
                try:
                    self.passes.abort()
                finally:
                    self.stepping.give_up(error)
                    self._start_over()
            raise

    @contextmanager
    def _explaining(self) -> Iterator[None]:
        """Say what it means if autograd finds weights that are not there, or are not those of its forward."""
        try:
            yield
        except RuntimeError as error:
            early = self.stepping.early
            if "storage of size 0" in str(error):
                raise ScheduleError(
                    "a backward reached weights that are not gathered: its forward is of an earlier pass, or its gradient did "
                    "not come through the output of the unit",
                    fix="run the backwards of a step before its next forward, and return what has a gradient from the forward",
                ) from error
            if "modified by an inplace operation" in str(error) and early is not None and early.begun:
                raise ScheduleError(
                    "a backward needs weights that it has updated already (naught.update_in_backward): they are used outside of "
                    "their own module, and no forward had shown that so far. Or else the model writes to what its backward needs",
                    fix="before naught.initialize, say who uses them: naught.zero.register_external_parameter(module, "
                    "parameter); or leave the key out",
                ) from error
            raise

    def _shortage(self) -> str:
        """What there is to say while everything is still held."""
        setup = Setup(
            units=whole_units(self.schedule, self.optimizer),
            stage=self.zero_optimization_stage(),
            world=self.dp_world_size,
            micro=self.accumulation.batch.micro,
            wide=precision_of(self.settings, 1).weights is torch.float32 and not self.settings.torch_autocast.enabled,
            recomputes=is_recomputing(self.schedule),
        )
        where, steps = self.watchdog.past, self.accumulation.steps
        if steps > 1:
            where += f" (micro-batch {self.accumulation.ended + 1} of {steps})"
        held, running = self.watch.held(), self.schedule.current
        kept = held.other if running is not None and running.training else 0  # else no backward waits for activations
        return note_of(where, held, self.planned() if self.schedule.programs else None, changes_of(setup, kept or 0))


def _collect_everywhere() -> None:
    """Take up gradients while it is known who has divided them. A loss may go through several engines."""
    for engine in _LIVING():
        if engine.accumulation.steps > 1:
            engine.passes.collect()


def _to_half(tensor: Tensor) -> Tensor:
    return tensor.half() if tensor.is_floating_point() else tensor
