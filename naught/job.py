"""Job: one step of training on one rank, and the activations that it keeps. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from naught.errors import UsageError
from naught.formulas import Recipe, block_activation_bytes, checkpoint_bytes, full_activation_bytes, recipe
from naught.placement import Tier
from naught.shapes import Transformer

__all__ = ["ActivationBytes", "Checkpointing", "Job", "transformer_activations"]

_MIXED_ADAM = recipe()
_LOSS = 3 * 4  # bytes of a logit while its loss goes back


class Checkpointing(StrEnum):
    """What is kept of a block's activations between forward and backward."""

    NONE = "none"  # everything
    BLOCK = "block"  # its input, on the device
    HOST = "host"  # its input, on the host
    DISK = "disk"  # its input, on disk

    @property
    def tier(self) -> Tier:
        """Where inputs rest."""
        return _TIERS.get(self, Tier.DEVICE)


_TIERS = {Checkpointing.HOST: Tier.HOST, Checkpointing.DISK: Tier.DISK}


@dataclass(frozen=True)
class Job:
    """One step of training on one rank."""

    micro_batch: int = 1
    seq: int = 1024
    accumulation: int = 1
    recipe: Recipe = _MIXED_ADAM
    checkpointing: Checkpointing = Checkpointing.BLOCK
    fused_attention: bool = True
    summed_grad: int = 4
    host_sums: int = 1  # that the host has room for
    update_in_backward: bool = False  # a unit's gradients are gone before the next unit has its own
    wide_gradients: bool | None = None  # on the host, as its update needs them; None: in a pool only where there is room

    def __post_init__(self) -> None:
        if min(self.micro_batch, self.seq, self.accumulation) < 1:
            raise UsageError("micro-batch, sequence length and accumulation are at least 1")

    @property
    def kept_grad(self) -> int:
        """Bytes of a gradient that waits for the update: 32-bit when micro-batches are summed, unless told otherwise."""
        return self.summed_grad if self.accumulation > 1 else self.recipe.grad

    @property
    def kept_host_grad(self) -> int:
        """The same on the host."""
        return (self.kept_grad if self.wide_gradients is False else 4) * self.host_sums


class ActivationBytes(NamedTuple):
    """Activations of one micro-batch: all of them, those alive while one block is recomputed, and the checkpoints.

    `forward_flops` is what the forward computes; None is two for each parameter and token. `gradient` is what a backward makes
    of the widest of them, while all of them are still there. `checkpoint` is the largest one. `loss` is what is gone before the
    first gradient of a parameter comes.
    """

    full: int
    working: int
    checkpoints: int
    source: str
    forward_flops: int | None = None
    gradient: int = 0
    checkpoint: int = 0
    loss: int = 0

    @property
    def block(self) -> int:
        """Of those alive while one block is recomputed, its own."""
        return max(0, self.working - self.loss)


def transformer_activations(shape: Transformer, job: Job) -> ActivationBytes:
    """The papers' formulas, plus what a loss makes of the logits, which the papers leave out: in 32 bits their logarithms and the
    gradients of those and of themselves.

    Without checkpoints the larger of the two papers' formulas counts; a real block keeps more than either.
    """
    wide = job.recipe.weight // 2
    tokens = job.micro_batch * job.seq
    block = wide * block_activation_bytes(
        shape.hidden, shape.heads, batch=job.micro_batch, seq=job.seq, fused_attention=job.fused_attention
    )
    logits = tokens * shape.vocab * _LOSS
    checkpoints = wide * checkpoint_bytes(shape.layers, shape.hidden, batch=job.micro_batch, seq=job.seq)
    everything = max(
        shape.layers * block,
        wide * full_activation_bytes(shape.layers, shape.hidden, batch=job.micro_batch, seq=job.seq),
    )
    scores = "without" if job.fused_attention else "with"
    source = f"ZeRO-Infinity's formula ({scores} attention scores) and the logits"
    if job.checkpointing is Checkpointing.NONE:
        source = "the papers' formulas and the logits: a lower bound, as gated layers keep up to twice as much"
    largest = checkpoints // shape.layers
    return ActivationBytes(everything + logits, block + logits, checkpoints, source, checkpoint=largest, loss=logits)
