"""Precision: in which types weights, gradients and their sums are kept. A recipe is a value here and nowhere else."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from naught.config import Config
from naught.errors import UsageError
from naught.loss_scale import AdaptiveScale, FixedScale, LossScale, Unscaled
from naught.placement import Placement

__all__ = ["DTYPES", "Precision", "kept_in_fp32", "loss_scale_of", "precision_of"]

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Precision:
    """Types of the weights that modules compute with, of gradients on the wire, and of their sum over micro-batches.

    Where weights have 16 bits there are 32-bit masters, and an update works on those. `wire` is None where gradients
    travel as they are. If they all `leave` after each micro-batch, no sum is taken where they are collected. On the host sums
    are kept `wide`, in the 32 bits that an update needs; None: where a pool has room for that.
    """

    weights: torch.dtype
    sums: torch.dtype
    wire: torch.dtype | None = None
    leave: bool = False
    wide: bool | None = False

    def weights_of(self, param: torch.Tensor) -> torch.dtype:
        """The type of a parameter's weights: only 32-bit floats are lowered."""
        return self.weights if param.dtype == torch.float32 else param.dtype

    def flat_of(self, weights: torch.dtype, placement: Placement) -> torch.dtype:
        """The type in which a rank collects gradients. Whole ones are summed over micro-batches where they are collected,
        split ones leave after each."""
        return (self.wire or weights) if placement.grad.split or self.leave else self.sums_of(weights)

    def sums_of(self, weights: torch.dtype) -> torch.dtype:
        """The type of a sum over micro-batches; never less than the weights' own."""
        return torch.float32 if torch.float32 in (weights, self.sums) else self.sums

    def on_host_of(self, weights: torch.dtype) -> torch.dtype:
        """The type of a sum that waits on the host."""
        return torch.float32 if self.wide else self.sums_of(weights)


def precision_of(config: Config, accumulation: int) -> Precision:
    low = torch.float16 if config.fp16.enabled else torch.bfloat16 if config.bf16.enabled else torch.float32
    named = config.data_types.param_dtype
    weights = DTYPES[named] if named else low
    accumulated = config.data_types.grad_accum_dtype
    sums = DTYPES[accumulated] if accumulated else (torch.float32 if accumulation > 1 else weights)
    wire = config.communication_data_type
    ours = config.naught
    wide = True if ours.wide_gradients is None and ours.placement == "stage" else ours.wide_gradients
    return Precision(weights, sums, DTYPES[wire] if wire else None, leave=ours.reduce_every_micro_batch, wide=wide)


def loss_scale_of(config: Config) -> LossScale:
    fp16 = config.fp16
    if not fp16.enabled:
        return Unscaled()
    if fp16.loss_scale:
        return FixedScale(fp16.loss_scale)
    return AdaptiveScale(
        2.0**fp16.initial_scale_power,
        window=fp16.loss_scale_window,
        hysteresis=fp16.hysteresis,
        consecutive=fp16.consecutive_hysteresis,
        minimum=fp16.min_loss_scale,
    )


def kept_in_fp32(model: nn.Module, config: Config) -> Iterator[nn.Parameter]:
    """Parameters of the modules that the configuration, or the model itself, wants in 32 bits.

    Left alone, layers with running statistics are among them: those are sums of many small numbers.
    """
    named = config.data_types.keep_in_fp32_modules
    wanted = getattr(model, "_keep_in_fp32_modules", None) if named == "auto" else named
    found: set[str] = set()
    for name, module in model.named_modules():
        match = {part for part in wanted or () if part == type(module).__name__ or part in name.split(".")}
        found |= match
        if match or (named == "auto" and isinstance(module, _BatchNorm)):
            yield from module.parameters()
    missing = set(wanted or ()) - found
    if missing and named != "auto":
        raise UsageError(
            f"data_types.keep_in_fp32_modules names {', '.join(sorted(missing))}, and the model has no such module",
            fix="give names or classes of modules",
        )
