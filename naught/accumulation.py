"""Accumulation: how many micro-batches make a step, and where in a step training is. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from naught.config import Batch
from naught.errors import UsageError

__all__ = ["Accumulation"]


@dataclass
class Accumulation:
    """Counts micro-batches. `every` sums gradients over the ranks after each of them, not only after the last.

    `declared` is what the caller has said of the micro-batch under way: that it is the last of its step, or not. None
    where nobody has said anything, and counting decides. Unless `managed`, every step() of the caller ends a step.
    """

    batch: Batch
    world: int
    every: bool
    managed: bool = True
    micro_steps: int = 0
    samples: int = 0  # of all steps so far, over all ranks
    synced: bool = True  # False while the user wants gradients to stay on their rank
    declared: bool | None = None
    waiting: bool = False  # gradients of a micro-batch that was declared not to be the last

    @property
    def steps(self) -> int:
        return self.batch.accumulation

    @property
    def at_start(self) -> bool:
        return not self.waiting and self.micro_steps % self.steps == 0

    @property
    def at_boundary(self) -> bool:
        """Whether the micro-batch under way is the last of its step."""
        if self.declared is not None:
            return self.declared
        return not self.managed or (self.micro_steps + 1) % self.steps == 0

    def sums_over_ranks(self) -> bool:
        """Whether the gradients of the micro-batch under way are summed over the ranks, where they are whole."""
        return self.synced and (self.every or (self.at_boundary and self.managed))

    def backward(self) -> None:
        """A backward has been."""
        self.waiting = not self.at_boundary if self.declared is not None else self.waiting

    def step(self) -> None:
        """A micro-batch is over."""
        self.micro_steps += 1
        self.waiting = False

    def start_over(self) -> None:
        """Give up the step under way."""
        self.micro_steps -= self.micro_steps % self.steps
        self.waiting = False

    def resize(self, *, train: int | None = None, micro: int | None = None) -> None:
        """Another number of samples in a step, which changes the number of micro-batches; or in a micro-batch, which
        changes the step."""
        if not self.at_start:
            raise UsageError("the batch cannot change in the middle of a step", fix="change it after engine.step()")
        micro = micro or self.batch.micro
        if micro < 1 or (train is not None and (train < 1 or train % (micro * self.world))):
            wanted = train if train is not None else micro
            raise UsageError(
                f"a batch of {wanted} cannot be made of micro-batches of {micro} on {self.world} ranks",
                fix=f"choose a multiple of {max(1, micro) * self.world}",
            )
        steps = self.steps if train is None else train // (micro * self.world)
        self.batch = Batch(micro * steps * self.world, micro, steps)
        self.micro_steps = 0 if steps == 1 else self.micro_steps - self.micro_steps % steps
