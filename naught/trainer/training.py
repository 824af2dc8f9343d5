"""Training: the loop. Takes the steps of a run, and evaluates, saves and stops between them as its recipe says."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from naught.checkpoints import tag_of
from naught.config.recipe import Recipe
from naught.data import RepeatingLoader
from naught.engine import Engine
from naught.errors import NaughtError
from naught.quantity import show_count
from naught.trainer.evaluating import evaluate
from naught.trainer.measures import Measures
from naught.trainer.models import loss_of
from naught.trainer.stopping import Stop
from naught.trainer.telling import Teller
from naught.trainer.windows import Windows

__all__ = ["Outcome", "Training"]

_MOST_IN_VAIN = 100


@dataclass(frozen=True)
class Outcome:
    """How a run ended: after all of its steps, or before, by a signal. `loss` is the validation's, in nats a token."""

    stopped_by: int | None
    loss: float | None


@dataclass
class Training:
    """A run under way, on one rank."""

    engine: Engine
    recipe: Recipe
    validation: Windows
    checkpoints: Path
    measures: Measures
    teller: Teller
    stop: Stop
    in_vain: int = 0  # steps that were skipped since one was taken

    def go(self) -> Outcome:
        """Take the steps that are left."""
        train, engine = self.recipe.train, self.engine
        assert engine.training_dataloader is not None
        batches: Iterator[Tensor] = RepeatingLoader(engine.training_dataloader)
        engine.train()
        while engine.global_steps < train.steps:
            stopped_by = self._step(batches)
            step, last = engine.global_steps, engine.global_steps == train.steps
            self._refuse_standstill(last)
            if stopped_by is not None and not last:
                self._save()
                engine.wait_for_checkpoint()
                return Outcome(stopped_by, None)
            if train.eval_every and step % train.eval_every == 0 and not last:
                self._evaluate(train.eval_batches)
            if (train.save_every and step % train.save_every == 0) or (last and train.save_last):
                self._save()
        self.teller.console.say("eval", f"on all {show_count(self.validation.tokens.size)} tokens of the validation data ...")
        loss = self._evaluate(0)
        engine.wait_for_checkpoint()
        return Outcome(None, loss)

    def _refuse_standstill(self, last: bool) -> None:
        """A run that only skips its steps is not training."""
        engine = self.engine
        self.in_vain = 0 if engine.was_step_applied() else self.in_vain + 1
        if self.in_vain >= _MOST_IN_VAIN or (last and engine.skipped_steps == engine.global_steps):
            raise NaughtError(
                f"{self.in_vain} steps in a row were skipped, for their gradients are not finite",
                where=f"step {engine.global_steps}",
                fix="lower the learning rate, clip gradients, or train in bf16 or fp32; earlier checkpoints are as they were",
            )

    def _step(self, batches: Iterator[Tensor]) -> int | None:
        """One step on all ranks. Returns the signal by which any of them was asked to stop."""
        engine, losses = self.engine, []
        if not self.teller.silent:
            self.measures.begin()
        for _ in range(engine.gradient_accumulation_steps()):
            began = time.perf_counter()
            ids = next(batches).to(engine.device, non_blocking=True)
            self.measures.data_s += time.perf_counter() - began
            loss = loss_of(engine(input_ids=ids, labels=ids))
            engine.backward(loss)
            engine.step()
            losses.append(loss.detach())
        mine = [float(torch.stack(losses).double().mean()), float(self.stop.signal or 0)]
        rows = engine.schedule.group.exchange(torch.tensor(mine, dtype=torch.float64))
        if not self.teller.silent:
            measured = self.measures.step(float(rows[:, 0].mean()))
            self.teller.step(engine.global_steps, measured, planned_bytes=self.measures.expected.total)
        return int(rows[:, 1].max()) or None

    def _evaluate(self, batches: int) -> float:
        began = time.perf_counter()
        loss = evaluate(self.engine, self.validation, batches=batches)
        bpb, seconds = self.measures.bits(loss), time.perf_counter() - began
        scalars = {"loss": loss} if bpb is None else {"loss": loss, "bits_per_byte": bpb}
        self.engine.observer.write([(f"Eval/{name}", value, self.engine.global_samples) for name, value in scalars.items()])
        self.teller.evaluated(self.engine.global_steps, loss=loss, bpb=bpb, seconds=seconds)
        return loss

    def _save(self) -> None:
        step = self.engine.global_steps
        began = time.perf_counter()
        self.engine.save_checkpoint(str(self.checkpoints), tag_of(step))
        self.teller.saved(step, self.checkpoints / tag_of(step), time.perf_counter() - began)
