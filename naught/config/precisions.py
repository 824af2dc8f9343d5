"""Precisions: the blocks of a configuration that say in which types weights, gradients and sums are kept."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from naught.config.types import (
    Block,
    Flag,
    Key,
    Names,
    Positive,
    Precision,
    Real,
    Whole,
    idle,
)

__all__ = ["Autocast", "Bf16", "DataTypes", "Fp16"]


class Fp16(Block):
    enabled: Annotated[Flag, Key("16-bit floats for weights and gradients, 32-bit masters, scaled loss")] = False
    auto_cast: Annotated[Flag, Key("cast the model's floating inputs to fp16")] = False
    loss_scale: Annotated[Real, Field(ge=0), Key("fixed factor on the loss; 0 adapts it")] = 0.0
    initial_scale_power: Annotated[Whole, Field(ge=0, le=127), Key("the first adaptive scale is 2 to this power")] = 16
    loss_scale_window: Annotated[Positive, Key("steps without overflow before the scale doubles")] = 1000
    hysteresis: Annotated[Positive, Key("overflows that are forgiven before the scale halves")] = 2
    consecutive_hysteresis: Annotated[Flag, Key("a step without overflow restores the forgiveness")] = False
    min_loss_scale: Annotated[Real, Field(gt=0), Key("the adaptive scale never falls below this")] = 1.0
    fused_mode: Annotated[Flag, idle("there is one implementation")] = True
    fp16: Annotated[Flag, idle("enabled decides")] = True


class Bf16(Block):
    enabled: Annotated[Flag, Key("bfloat16 weights and gradients with 32-bit masters")] = False
    check_grad_overflow: Annotated[Flag, Key("skip a step whose gradients are not finite", also=("check_overflow",))] = True
    immediate_grad_update: Annotated[Flag, idle("gradients are always taken up as they are made")] = False


class Autocast(Block):
    enabled: Annotated[Flag, Key("run the forward under torch.autocast; weights keep their precision")] = False
    dtype: Annotated[Precision, Key("precision of autocast")] = "bf16"
    lower_precision_safe_modules: Annotated[Names | None, idle("weights travel in their own precision")] = None


class DataTypes(Block):
    grad_accum_dtype: Annotated[
        Precision | None,
        Key(
            "precision in which micro-batches are summed; null is fp32 when there are several",
            "sums of many bf16 gradients lose bits",
            peer="the model's",
        ),
    ] = None
    param_dtype: Annotated[Precision | None, Key("precision of weights in the forward; null follows fp16 and bf16")] = None
    buffer_dtype: Annotated[Precision | None, Key("precision of buffers; null leaves them as they are")] = None
    keep_in_fp32_modules: Annotated[
        Names | Literal["auto"] | None, Key("module names or classes that keep 32-bit weights; auto asks the model")
    ] = "auto"
