"""Batch: the triple train = micro x accumulation x ranks, derived once the number of ranks is known."""

from __future__ import annotations

from typing import NamedTuple

from naught.config.schema import Config
from naught.errors import ConfigError, Problem, UsageError

__all__ = ["Batch", "derive_batch", "refuse_accumulation"]


class Batch(NamedTuple):
    """Samples in a step over all ranks, samples in one forward of one rank, forwards before an update."""

    train: int
    micro: int
    accumulation: int


def derive_batch(config: Config, world: int) -> Batch:
    """The whole triple from any two of it, or from one with an accumulation of 1."""
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    unfilled = [name for name in names if name in config.auto]
    train, micro, steps = config.train_batch_size, config.train_micro_batch_size_per_gpu, config.gradient_accumulation_steps
    if unfilled and train is None and micro is None:
        raise _wrong(unfilled[0], '"auto" can only be filled by an integration that knows the batch', "give a number")
    if train is None and micro is None:
        raise _wrong("train_batch_size", "the batch size is not set", "set train_batch_size or train_micro_batch_size_per_gpu")
    if train is None:
        assert micro is not None
        return Batch(micro * (steps or 1) * world, micro, steps or 1)
    if micro is None:
        steps = steps or 1
        micro = train // (steps * world)
    elif steps is None:
        steps = train // (micro * world)
    if min(micro, steps) < 1 or train != micro * steps * world:
        product = f"{micro} x {steps} x {world} = {micro * steps * world}"
        raise _wrong(
            "train_batch_size",
            f"{train} is not micro-batch x accumulation x ranks = {product}",
            "set any two of the three, or one that the number of ranks divides",
        )
    return Batch(train, micro, steps)


def refuse_accumulation(config: Config, accumulation: int) -> None:
    """What a number of micro-batches, known only now or changed, does not allow."""
    if config.naught.update_in_backward and accumulation > 1:
        raise UsageError(
            f"naught.update_in_backward lets gradients go in every backward, and a step has {accumulation} of them",
            fix="set gradient_accumulation_steps to 1 (zero.Vertical has one backward for all of them), or leave the key out",
        )


def _wrong(path: str, what: str, fix: str) -> ConfigError:
    return ConfigError("the configuration", [Problem(path, what, fix=fix)])
