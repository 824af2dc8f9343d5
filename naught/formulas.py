"""Formulas: what the papers say of memory and bandwidth, as functions of numbers. Pure."""

from __future__ import annotations

from typing import NamedTuple

from naught.errors import UsageError
from naught.layout import ALIGN_NUMEL
from naught.placement import Placement

__all__ = [
    "SMALL_MOMENT",
    "Recipe",
    "arithmetic_intensity",
    "block_activation_bytes",
    "checkpoint_bytes",
    "efficiency",
    "full_activation_bytes",
    "recipe",
    "state_bytes",
]


class Recipe(NamedTuple):
    """Bytes that a precision and an optimizer take for each parameter."""

    weight: int
    grad: int
    master: int
    moments: float  # those of 8 bits have a share of a scale

    @property
    def state(self) -> float:
        return self.master + self.moments


_WEIGHTS = {"bf16": Recipe(2, 2, 4, 0), "fp16": Recipe(2, 2, 4, 0), "fp32": Recipe(4, 4, 0, 0)}
_MOMENTS = {"adamw": 8, "adam": 8, "lion": 4, "adagrad": 4, "sgd": 0, "sgd-momentum": 4}


SMALL_MOMENT = 1 + 4 / ALIGN_NUMEL  # bytes of an 8-bit moment: a code, and its share of its block's scale


def recipe(dtype: str = "bf16", optimizer: str = "adamw", *, small_masters: bool = False, small_moments: bool = False) -> Recipe:
    """Mixed precision keeps a 32-bit master of each 16-bit weight, or a 16-bit rest; moments have 32 bits, or 8."""
    if dtype not in _WEIGHTS:
        raise UsageError(f'no precision "{dtype}"', fix=f"choose {', '.join(_WEIGHTS)}")
    if optimizer not in _MOMENTS:
        raise UsageError(f'no optimizer "{optimizer}"', fix=f"choose {', '.join(_MOMENTS)}")
    found = _WEIGHTS[dtype]._replace(moments=_MOMENTS[optimizer] * (SMALL_MOMENT / 4 if small_moments else 1))
    return found._replace(master=2) if small_masters and dtype == "bf16" else found


def state_bytes(numel: float, placement: Placement, world: int, recipe: Recipe) -> float:
    """Model states of one rank as the ZeRO paper counts them: no padding, no working set."""
    sizes = (
        (placement.param, recipe.weight),
        (placement.grad, recipe.grad),
        (placement.optim, recipe.state),
    )
    return sum(numel * size / (world if place.split else 1) for place, size in sizes)


def block_activation_bytes(hidden: int, heads: int, *, batch: int, seq: int, fused_attention: bool = False) -> int:
    """Activations of one 16-bit block (ZeRO-Infinity's AWM); fused attention never holds the seq x seq scores."""
    scores = 0 if fused_attention else 2 * heads * seq
    return batch * seq * (16 * hidden + scores)


def full_activation_bytes(layers: int, hidden: int, *, batch: int, seq: int) -> int:
    """Everything that 16-bit blocks keep without checkpoints (ZeRO, section 3.2: 12 elements of hidden a token)."""
    return 2 * 12 * hidden * batch * seq * layers


def checkpoint_bytes(layers: int, hidden: int, *, batch: int, seq: int) -> int:
    """One 16-bit checkpoint before each block."""
    return 2 * batch * seq * hidden * layers


def arithmetic_intensity(data: str, *, batch: int, seq: int, hidden: int = 0) -> float:
    """Operations for each byte moved, with activation recompute (ZeRO-Infinity, section 3)."""
    return {
        "params and grads": batch * seq,
        "optimizer states": batch * seq / 4,
        "activation checkpoints": 24 * hidden,
    }[data]


def efficiency(intensity: float, *, bytes_s: float, flops: float) -> float:
    """The share of the time that computes when nothing overlaps."""
    return intensity * bytes_s / (intensity * bytes_s + flops)
