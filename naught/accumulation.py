"""Accumulation: how many micro-batches make a step, and where in a step training is. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from naught.config import Batch
from naught.errors import UsageError
from naught.running import Own

__all__ = ["Accumulation", "by_an_engine"]


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
    synced: bool = True  # False while the user wants gradients to stay on their rank
    declared: bool | None = None
    micro_steps: int = 0  # since the start of training
    samples: int = 0  # since then, over all ranks
    ended: int = 0  # micro-batches of this step that are over, and are not its last

    @property
    def steps(self) -> int:
        return self.batch.accumulation

    @property
    def at_start(self) -> bool:
        """Whether gradients may be let go: no micro-batch of this step waits for others. Who counts himself decides."""
        return not self.managed or (self.ended == 0 and self.declared is not False)

    @property
    def at_boundary(self) -> bool:
        """Whether the micro-batch under way is the last of its step."""
        if self.declared is not None:
            return self.declared
        return not self.managed or self.ended + 1 >= self.steps

    def sums_over_ranks(self) -> bool:
        """Whether the gradients of the micro-batch under way are summed over the ranks, where they are whole."""
        return self.synced and (self.every or (self.at_boundary and self.managed))

    def share(self) -> float:
        """The share of a gradient in that of its step, where no engine has divided the loss."""
        return 1.0 if _BACKWARDS() else 1.0 / self.steps

    def declare(self, *, last: bool) -> None:
        """The caller says whether the micro-batch that now begins is the last of its step."""
        if self.declared is False:
            self.ended += 1
        self.declared = last

    def backward(self) -> None:
        """A backward of a caller who counts himself is over."""
        if not self.managed:
            self.ended += 1

    def step(self) -> None:
        """The caller has called step() for a micro-batch."""
        if self.at_boundary:
            counted = self.declared is None and self.managed
            done = self.steps if counted else max(1, self.ended if not self.managed else self.ended + 1)
            self.samples += done * self.batch.micro * self.world
            self.ended = 0
        elif self.declared is None:
            self.ended += 1
        self.micro_steps += 1

    def start_over(self) -> None:
        """Give up the step under way."""
        self.ended = 0

    def resized(self, *, train: int | None = None, micro: int | None = None) -> Batch:
        """The batch with another number of samples in a step, which changes the number of micro-batches; or in a
        micro-batch, which changes the step."""
        if self.ended or self.declared is False:
            raise UsageError("the batch cannot change in the middle of a step", fix="change it after engine.step()")
        micro = self.batch.micro if micro is None else micro
        if micro < 1 or (train is not None and (train < 1 or train % (micro * self.world))):
            wanted = train if train is not None else micro
            raise UsageError(
                f"a batch of {wanted} cannot be made of micro-batches of {micro} on {self.world} ranks",
                fix=f"choose a multiple of {max(1, micro) * self.world}",
            )
        steps = self.steps if train is None else train // (micro * self.world)
        return Batch(micro * steps * self.world, micro, steps)


_BACKWARDS: Own[list[None]] = Own(list)  # of engines, under way


@contextmanager
def by_an_engine() -> Iterator[None]:
    """The backward inside is of an engine, which has divided its loss; also for others that the loss depends on."""
    _BACKWARDS().append(None)
    try:
        yield
    finally:
        _BACKWARDS().pop()
