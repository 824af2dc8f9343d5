"""Accumulation: how many micro-batches make a step, and where in a step training is. Pure."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Accumulation"]


@dataclass
class Accumulation:
    """Counts micro-batches. `every` sums gradients over the ranks after each of them, not only after the last."""

    steps: int
    every: bool
    micro_steps: int = 0
    synced: bool = True  # False while the user wants gradients to stay on their rank

    @property
    def at_start(self) -> bool:
        return self.micro_steps % self.steps == 0

    @property
    def at_boundary(self) -> bool:
        """Whether the micro-batch under way is the last of its step."""
        return (self.micro_steps + 1) % self.steps == 0

    def sums_over_ranks(self) -> bool:
        """Whether the gradients of the micro-batch under way are summed over the ranks, where they are whole."""
        return self.synced and (self.every or self.at_boundary)

    def start_over(self) -> None:
        """Give up the step under way."""
        self.micro_steps -= self.micro_steps % self.steps
