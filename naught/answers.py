"""Answers: what scripts ask of an engine by DeepSpeed's names. They change nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn

from naught.comm import get_local_rank
from naught.config import Batch, placement_of, to_document
from naught.errors import UsageError
from naught.planned import planned_of

if TYPE_CHECKING:
    from naught.accumulation import Accumulation
    from naught.comm import Group
    from naught.config import Config
    from naught.data import Loader
    from naught.flat import Meter
    from naught.loss_scale import LossScale
    from naught.monitors import Monitor
    from naught.observing import Observer, Throughput
    from naught.optimizer import Optimizer
    from naught.passes import Passes
    from naught.schedule import Schedule
    from naught.stepping import Scheduler, Stepping
    from naught.watch import Watch

__all__ = ["Answers"]


class _Background(Protocol):
    """Saves that go on beside training."""

    def settle(self) -> None:
        """Wait until they copy nothing any more."""


class Answers(nn.Module):
    """The part of an engine that only tells."""

    module: nn.Module
    settings: Config
    accumulation: Accumulation
    passes: Passes
    stepping: Stepping
    observer: Observer
    training_dataloader: Loader | None
    background: _Background
    destroyed: bool

    # --- whether there is anything to ask ---

    def refuse_inside_gathered(self) -> None:
        if self.passes.lent:
            raise UsageError("this cannot be done inside engine.gathered()", fix="do it outside")

    def before_a_change(self) -> None:
        """What changes states comes here first: not inside of gathered(), not in the middle of an update, not while a save or a
        device still copies them, and not before weights have followed the last update, and masters what users have written."""
        self.refuse_inside_gathered()
        self.passes.refuse_midway()
        self.background.settle()
        self.passes.catch_up()
        self.passes.drain()
        self.heed_writes()

    def heed_writes(self) -> None:
        """Let masters follow what users have written to weights."""
        self.stepping.lookout.heed_all([segment for unit in self.schedule.units.values() for segment in unit.trained])

    def refuse_away(self) -> None:
        """Nothing can be done to states that are not there."""
        if self.destroyed:
            raise UsageError("the engine was destroyed", fix="make another one with naught.initialize")
        if self.passes.away is not None:
            raise self.passes.away

    # --- the parts ---

    @property
    def optimizer(self) -> Optimizer | None:
        return self.stepping.optimizer

    @property
    def lr_scheduler(self) -> Scheduler | None:
        return self.stepping.rates

    @property
    def scaling(self) -> LossScale:
        return self.stepping.scale

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
    def monitor(self) -> Monitor:
        return self.observer.monitor

    @property
    def config(self) -> dict[str, Any]:
        """The configuration as a document, every key with the value that holds. `settings` is the same, typed."""
        return to_document(self.settings)

    # --- where ---

    @property
    def _group(self) -> Group:
        return self.schedule.group

    @property
    def device(self) -> torch.device:
        return self.watch.device

    @property
    def local_rank(self) -> int:
        return get_local_rank()

    @property
    def global_rank(self) -> int:
        return self._group.rank

    @property
    def world_size(self) -> int:
        return self._group.size

    @property
    def dp_world_size(self) -> int:
        """Ranks that have the same part of the model: all, unless several have a model together."""
        return self._group.parts

    @property
    def mp_world_size(self) -> int:
        """Ranks that have a model together."""
        return self._group.size // self._group.parts

    # --- how far ---

    @property
    def micro_steps(self) -> int:
        return self.accumulation.micro_steps

    @property
    def global_steps(self) -> int:
        """Steps so far, those that were skipped among them."""
        return self.stepping.taken + self.stepping.skipped

    @property
    def global_samples(self) -> int:
        return self.accumulation.samples

    @property
    def skipped_steps(self) -> int:
        return self.stepping.skipped

    @property
    def tput_timer(self) -> Throughput:
        return self.observer.throughput

    @property
    def timers(self) -> dict[str, float]:
        """Seconds of each phase so far, on an accelerator its own."""
        return dict(self.watch.report()["seconds"])

    def get_wall_clock_timers(self) -> dict[str, float]:
        return self.timers

    def planned(self) -> dict[str, int]:
        """The most that a step holds of each category of the meter, as its plans say: what is at rest, and beyond that what
        those passes hold that have been recorded."""
        return planned_of(self.schedule, self.accumulation, self.optimizer)

    def was_step_applied(self) -> bool:
        """Whether the last step changed the weights, and was not skipped for an overflow."""
        return self.stepping.applied

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the micro-batch under way is the last of its step."""
        return self.accumulation.at_boundary

    def get_global_grad_norm(self) -> float | None:
        """The norm of the last step's gradients, before clipping."""
        return None if self.stepping.norm is None else self.stepping.norm.total

    # --- with which numbers ---

    def _hyper(self, key: str) -> list[Any]:
        return [group[key] for group in self.optimizer.param_groups if key in group] if self.optimizer is not None else []

    def get_lr(self) -> list[float]:
        return self._hyper("lr")

    def get_mom(self) -> list[Any]:
        return self._hyper("betas") or self._hyper("momentum")

    def get_batch_info(self) -> Batch:
        return self.accumulation.batch

    def train_batch_size(self) -> int:
        return self.accumulation.batch.train

    def train_micro_batch_size_per_gpu(self) -> int:
        return self.accumulation.batch.micro

    def gradient_accumulation_steps(self) -> int:
        return self.accumulation.batch.accumulation

    def gradient_clipping(self) -> float:
        return self.settings.gradient_clipping

    def steps_per_print(self) -> int | None:
        return self.settings.steps_per_print

    def zero_optimization(self) -> bool:
        return self.zero_optimization_stage() > 0

    def zero_optimization_stage(self) -> int:
        return self.settings.zero_optimization.stage

    def zero_optimization_partition_gradients(self) -> bool:
        return placement_of(self.settings).grad.split

    def zero_optimization_partition_weights(self) -> bool:
        return placement_of(self.settings).param.split

    def zero_gather_16bit_weights_on_model_save(self) -> bool:
        return self.settings.zero_optimization.stage3_gather_16bit_weights_on_model_save

    def fp16_enabled(self) -> bool:
        return self.settings.fp16.enabled

    def bfloat16_enabled(self) -> bool:
        return self.settings.bf16.enabled

    def loss_scale(self) -> float:
        """As it is now; 1 where no loss is scaled."""
        return self.scaling.value

    def dynamic_loss_scale(self) -> bool:
        return self.scaling.adapts
