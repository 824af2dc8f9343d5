"""Engine: what the user holds. Calls the model, takes the steps, and says what happened."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

import naught
from naught.accumulation import Accumulation
from naught.agreement import agree, facts_of
from naught.build import budgets_of, build_units, limits_of, rates_of, refuse_what_is_not_there_yet, rule_of
from naught.comm import Group
from naught.config import Config, Source, derive_batch, load
from naught.devices import device_of, keep_freed_pages
from naught.errors import ScheduleError, UsageError
from naught.flat import Meter
from naught.hooks import recomputing
from naught.loss_scale import LossScale
from naught.passes import Passes, refuse_claimed
from naught.precision import DTYPES, loss_scale_of, precision_of
from naught.rates import RateSchedule
from naught.rules import Rule
from naught.schedule import Schedule
from naught.stepping import Stepping
from naught.watch import Watch

__all__ = ["Engine", "Optimizer", "initialize"]


def initialize(*, model: nn.Module, config: Source) -> tuple[Engine, Optimizer, None, RateSchedule | None]:
    """Split a model as the configuration says. The process group, if there is one, must exist already.

    Returns the engine, its optimizer, a place for a data loader, which is not there yet, and the schedule of the learning
    rate if the configuration names one: the engine steps it.
    """
    loaded = load(config)
    refuse_what_is_not_there_yet(loaded)
    refuse_claimed(model)
    watch = Watch(device_of(model))
    averages = loaded.gradient_allreduce_op == "mean"
    group = Group(watch.ledger, watch.device, reduce_numel=loaded.zero_optimization.reduce_bucket_size, averages=averages)
    agree(group, facts_of(model, loaded, naught.__version__))
    batch = derive_batch(loaded, group.size)
    optimizer = Optimizer(*rule_of(loaded))
    precision = precision_of(loaded, batch.accumulation)
    units = build_units(model, loaded, precision, group, watch.meter)
    schedule = Schedule(units, group, budgets_of(loaded, units, precision.weights.itemsize))
    keep_freed_pages(watch.device)
    accumulation = Accumulation(batch.accumulation, every=loaded.naught.reduce_every_micro_batch)
    passes = Passes(model, schedule, watch, accumulation.sums_over_ranks, lazy=loaded.naught.lazy_weights)
    rates = rates_of(loaded, optimizer.param_groups)
    limits = limits_of(loaded, precision.weights.itemsize)
    stepping = Stepping(passes, optimizer.rule, limits, loss_scale_of(loaded), rates)
    return Engine(model, loaded, accumulation, passes, stepping, optimizer), optimizer, None, rates


def _to_half(tensor: Tensor) -> Tensor:
    return tensor.half() if tensor.is_floating_point() else tensor


class Optimizer:
    """The update rule and its hyperparameters, in the shape of a torch optimizer."""

    def __init__(self, rule: Rule, hyper: dict[str, Any]) -> None:
        self.rule = rule
        self.param_groups: list[dict[str, Any]] = [hyper]
        self.engine: Engine | None = None

    def step(self) -> None:
        assert self.engine is not None
        self.engine.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        assert self.engine is not None
        self.engine.zero_grad(set_to_none)


class Engine(nn.Module):
    """A model that trains as its configuration says. Call it, `backward` its loss, and `step`."""

    def __init__(
        self,
        module: nn.Module,
        config: Config,
        accumulation: Accumulation,
        passes: Passes,
        stepping: Stepping,
        optimizer: Optimizer,
    ) -> None:
        super().__init__()
        self.module, self.config, self.accumulation = module, config, accumulation
        self.passes, self.stepping, self.optimizer = passes, stepping, optimizer
        self.destroyed = False
        optimizer.engine = self

    @property
    def schedule(self) -> Schedule:
        return self.passes.schedule

    @property
    def watch(self) -> Watch:
        return self.passes.watch

    @property
    def meter(self) -> Meter:
        return self.watch.meter

    @property
    def lr_scheduler(self) -> RateSchedule | None:
        return self.stepping.rates

    @property
    def loss_scale(self) -> LossScale:
        return self.stepping.scale

    @property
    def micro_steps(self) -> int:
        return self.accumulation.micro_steps

    @property
    def global_steps(self) -> int:
        return self.stepping.taken

    @property
    def skipped_steps(self) -> int:
        return self.stepping.skipped

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        cast = self.config.torch_autocast
        if self.config.fp16.auto_cast:
            args, kwargs = tree_map_only(Tensor, _to_half, (args, kwargs))
        with self._all_or_nothing(), torch.autocast(self.watch.device.type, DTYPES[cast.dtype], enabled=cast.enabled):
            return self.module(*args, **kwargs)

    def backward(self, loss: Tensor) -> None:
        """Compute gradients of a micro-batch. The loss is divided by the number of micro-batches in a step, and multiplied
        by the scale of the loss."""
        with self._all_or_nothing(), _explaining():
            torch.autograd.backward(self.scale(loss / self.accumulation.steps))

    def scale(self, loss: Tensor) -> Tensor:
        """The loss as its own `backward()` needs it under fp16: `engine.scale(loss).backward()`."""
        return self.stepping.scale_loss(loss)

    def step(self) -> None:
        """Update the weights if this micro-batch completes a step."""
        self._refuse_inside_gathered()
        with self._all_or_nothing():
            if self.accumulation.at_boundary:
                self.passes.complete()
                self.watch.enter("step")
                self.stepping.take(self.optimizer.param_groups[0])
                self.watch.after("step")
            else:
                self.passes.close()
        self.accumulation.micro_steps += 1

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Let go of the gradients of this step so far. Between the micro-batches of a step this does nothing, as with
        DeepSpeed: the engine begins every step without gradients."""
        del set_to_none
        if self.accumulation.at_start:
            self.passes.drop_gradients()

    def is_gradient_accumulation_boundary(self) -> bool:
        return self.accumulation.at_boundary

    def get_lr(self) -> list[float]:
        return [group["lr"] for group in self.optimizer.param_groups]

    def get_global_grad_norm(self) -> float | None:
        return None if self.stepping.norm is None else self.stepping.norm.total

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside keep whole gradients to themselves; split ones are summed as always."""
        before, self.accumulation.synced = self.accumulation.synced, False
        try:
            yield
        finally:
            running = self.schedule.current
            if running is not None and running.seen_backward:
                self.passes.close()
            self.accumulation.synced = before

    def gathered(self) -> AbstractContextManager[None]:
        """While open, every parameter can be read and written. All ranks must open it, and write the same."""
        return nullcontext() if self.destroyed else self.passes.lending()

    def report(self) -> dict[str, Any]:
        """What this rank has sent, holds and spends: bytes by collective, unit and phase; bytes now, at the peak, and after
        each phase of the last step, by category; seconds by phase, on an accelerator its own."""
        return self.watch.report() | {"steps": self.global_steps, "skipped": self.skipped_steps}

    def destroy(self) -> None:
        """Give the model whole weights of its own again, and let go of everything. The engine is of no use afterwards."""
        self._refuse_inside_gathered()
        if not self.destroyed:
            self.destroyed = True
            self.passes.remove()

    def _refuse_inside_gathered(self) -> None:
        if self.passes.lent:
            raise UsageError("this cannot be done inside engine.gathered()", fix="do it outside")

    @contextmanager
    def _all_or_nothing(self) -> Iterator[None]:
        """An exception ends not only its pass but the whole step, from its first micro-batch on."""
        if self.destroyed:
            raise UsageError("the engine was destroyed", fix="make another one with naught.initialize")
        try:
            yield
        except BaseException:
            if recomputing():  # a checkpoint around the engine ends its recompute so
                raise
            self.passes.abort()
            self.accumulation.start_over()
            raise


@contextmanager
def _explaining() -> Iterator[None]:
    """Say what it means if autograd finds weights that are not there."""
    try:
        yield
    except RuntimeError as error:
        if "storage of size 0" not in str(error):
            raise
        raise ScheduleError(
            "a backward reached weights that are not gathered: its forward is of an earlier pass, or its gradient did not come "
            "through the output of the unit",
            fix="run the backwards of a step before its next forward, and return what has a gradient from the forward",
        ) from error
