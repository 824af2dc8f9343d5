"""Rounding: how 16-bit weights are made of 32-bit masters. Rounded half up, a bf16 weight and a 16-bit rest restore their master
bit for bit: together they are its two halves, the upper one corrected by one where the lower one is negative. (Rounded half to
even, two masters may share a weight and a rest.)"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from naught.rooms import BERTH_NUMEL

__all__ = ["Rounds", "fold", "half_up", "misfits", "nearest", "unfold"]

Rounds = Callable[[Tensor, Tensor], object]  # into the first, what the second is

_HALF = 0x8000
_LOW, _HIGH = 0, 1  # of a master's bits, as they lie in memory


def nearest(into: Tensor, source: Tensor) -> None:
    """As torch rounds: half to even."""
    if source.device == into.device or source.dim() != 1:
        into.copy_(source)
        return
    # As much as comes up at a time, at once: each kernel may have to wait for others.
    for place, values in zip(torch.split(into, BERTH_NUMEL), torch.split(source, BERTH_NUMEL), strict=True):
        _put(place, values)


def half_up(into: Tensor, source: Tensor) -> None:
    """Half away from zero, to bf16. What is bf16 already, or is wider than that, is copied."""
    if into.dtype != torch.bfloat16 or source.dtype != torch.float32:
        into.copy_(source)
        return
    upper = into.view(torch.int16)
    if source.dim() != 1:
        upper.copy_(_upper(source.reshape(-1)).reshape(source.shape))
        return
    for place, values in zip(torch.split(upper, BERTH_NUMEL), torch.split(source, BERTH_NUMEL), strict=True):
        _put(place, _upper(values))


def _upper(values: Tensor) -> Tensor:
    """The upper halves of 32-bit numbers, rounded. Few kernels: each may have to wait for the device's others."""
    return _plain(values).view(torch.int32).add_(_HALF).view(torch.int16).view(-1, 2)[:, _HIGH]


def _put(place: Tensor, values: Tensor) -> None:
    """What goes to the host is cast before: else it would come down wide, into memory of torch's own, and be cast there."""
    place.copy_(values.to(place.dtype) if values.is_cuda and not place.is_cuda else values)


def _plain(values: Tensor) -> Tensor:
    """The same with one NaN for all: others may have bits that round to zero."""
    return values.nan_to_num(nan=math.nan, posinf=math.inf, neginf=-math.inf)


def fold(wide: Tensor, weights: Tensor, rest: Tensor) -> None:
    """Split 32-bit numbers into weights and rests; all that is not a number is one NaN."""
    halves = wide.nan_to_num_(nan=math.nan, posinf=math.inf, neginf=-math.inf).view(torch.int16).view(-1, 2)
    rest.copy_(halves[:, _LOW])
    torch.sub(halves[:, _HIGH], rest >> 15, out=weights.view(torch.int16))


def unfold(weights: Tensor, rest: Tensor) -> Tensor:
    """The 32-bit numbers that weights and rests are."""
    upper = weights.view(torch.int16).to(torch.int32)
    return torch.add(rest, upper, alpha=1 << 16, out=upper).view(torch.float32)


def misfits(weights: Tensor, rest: Tensor) -> Tensor:
    """Which rests no master has left beside such weights. Any rest goes with any weight, and moves it by less than it is rounded
    by, but for zero and what is infinite: no master that rounds to zero is below it, and none but itself rounds to infinity. Put
    together they would not be a number."""
    return ((weights == 0) & (rest < 0)) | (weights.isinf() & (rest != 0))
