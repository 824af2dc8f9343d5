"""Engine: what the user holds. Calls the model, takes the steps, and says what happened."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

import naught
from naught.agreement import agree, facts_of
from naught.build import budgets_of, build_units, limits_of, refuse_what_is_not_there_yet, rule_of
from naught.comm import Group
from naught.config import Batch, Config, Source, derive_batch, load
from naught.devices import device_of, keep_freed_pages
from naught.flat import Meter
from naught.passes import Passes
from naught.rates import RateSchedule
from naught.rules import Rule
from naught.schedule import Schedule
from naught.update import Norm, update
from naught.watch import Watch

__all__ = ["Engine", "Optimizer", "initialize"]

_LOG = logging.getLogger("naught")


def initialize(*, model: nn.Module, config: Source) -> tuple[Engine, Optimizer, None, RateSchedule | None]:
    """Split a model as the configuration says. The process group, if there is one, must exist already.

    Returns the engine, its optimizer, a place for a data loader, which is not there yet, and the schedule of the learning
    rate if the configuration names one: the engine steps it.
    """
    loaded = load(config)
    refuse_what_is_not_there_yet(loaded)
    watch = Watch(device_of(model))
    group = Group(watch.ledger, watch.device, reduce_numel=loaded.zero_optimization.reduce_bucket_size)
    agree(group, facts_of(model, loaded, naught.__version__))
    batch = derive_batch(loaded, group.size)
    optimizer = Optimizer(*rule_of(loaded))
    units = build_units(model, loaded, group, watch.meter)
    schedule = Schedule(units, group, budgets_of(loaded, units))
    keep_freed_pages(watch.device)
    engine = Engine(model, loaded, batch, schedule, optimizer, watch)
    return engine, optimizer, None, engine.lr_scheduler


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
        """Nothing to do: a step lets go of its gradients."""
        del set_to_none


class Engine(nn.Module):
    """A model that trains as its configuration says. Call it, `backward` its loss, and `step`."""

    def __init__(
        self, module: nn.Module, config: Config, batch: Batch, schedule: Schedule, optimizer: Optimizer, watch: Watch
    ) -> None:
        super().__init__()
        self.module, self.config, self.batch, self.optimizer, self.watch = module, config, batch, optimizer, watch
        optimizer.engine = self
        self.lr_scheduler: RateSchedule | None = None
        if config.scheduler is not None:
            numbers = config.scheduler.params.model_dump()
            self.lr_scheduler = RateSchedule(config.scheduler.type, optimizer.param_groups, numbers)
        self.passes = Passes(module, schedule, watch, self._completes_step)
        self.micro_steps = self.global_steps = self.skipped_steps = 0
        self.norm: Norm | None = None  # of the last step; None before the first
        self.synced = True  # False inside no_sync

    @property
    def schedule(self) -> Schedule:
        return self.passes.schedule

    @property
    def meter(self) -> Meter:
        return self.watch.meter

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with self._all_or_nothing():
            return self.module(*args, **kwargs)

    def backward(self, loss: Tensor) -> None:
        """Compute gradients of a micro-batch; the loss is divided by the number of micro-batches in a step."""
        with self._all_or_nothing():
            torch.autograd.backward(loss / self.batch.accumulation)
        self.passes.close()

    def step(self) -> None:
        """Update the weights if this micro-batch completes a step."""
        self.passes.close()
        boundary = self.is_gradient_accumulation_boundary()
        self.micro_steps += 1
        if boundary:
            self._update()

    def _update(self) -> None:
        self.watch.enter("step")
        units = list(self.schedule.units.values())
        hyper, limits = self.optimizer.param_groups[0], limits_of(self.config)
        self.norm = update(units, self.schedule.group, self.optimizer.rule, hyper, limits)
        if self.norm.finite:
            self.global_steps += 1
            if self.lr_scheduler is not None:
                self.lr_scheduler.step()
        else:
            self._skip()
        self.watch.after("step")

    def _skip(self) -> None:
        """A parameter that the plan does not know to be used reads as NaN: the next pass is recorded anew to find it."""
        self.skipped_steps += 1
        self.schedule.forget_plans()
        _LOG.warning("step %d was skipped on all ranks: its gradient norm is not finite", self.global_steps + 1)

    def is_gradient_accumulation_boundary(self) -> bool:
        return (self.micro_steps + 1) % self.batch.accumulation == 0

    def get_lr(self) -> list[float]:
        return [group["lr"] for group in self.optimizer.param_groups]

    def get_global_grad_norm(self) -> float | None:
        return None if self.norm is None else self.norm.total

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside keep whole gradients to themselves; split ones are summed as always."""
        before, self.synced = self.synced, False
        try:
            yield
        finally:
            self.passes.close()
            self.synced = before

    def gathered(self) -> AbstractContextManager[None]:
        """While open, every parameter can be read and written. All ranks must open it, and write the same."""
        return self.passes.lending()

    def report(self) -> dict[str, Any]:
        """What this rank has sent, holds and spends: bytes by collective, unit and phase; bytes now, at the peak, and after
        each phase of the last step, by category; seconds by phase, on an accelerator its own."""
        return self.watch.report() | {"steps": self.global_steps, "skipped": self.skipped_steps}

    def destroy(self) -> None:
        """Give the model whole weights of its own again, and let go of everything."""
        self.passes.remove()

    def _completes_step(self) -> bool:
        every = self.config.naught.reduce_every_micro_batch
        return self.synced and (every or self.is_gradient_accumulation_boundary())

    @contextmanager
    def _all_or_nothing(self) -> Iterator[None]:
        """An exception ends not only its pass but the whole step, from its first micro-batch on."""
        try:
            yield
        except BaseException:
            self.passes.abort()
            self.micro_steps -= self.micro_steps % self.batch.accumulation
            raise
