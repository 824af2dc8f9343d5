"""Fused attention: on tensors without contents, the kernel that a device would take. Torch has none of its own for them and would
keep all scores, which no device does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

__all__ = ["fused_attention"]

_ATEN = torch.ops.aten
_STEP = 8  # heads of GPUs' kernels have a multiple of so many elements


@contextmanager
def fused_attention(*, apart: bool) -> Iterator[None]:
    """While open, also in backwards that compute a forward anew, where torch's own modes end. `apart`: the device is a GPU, not
    the host's cores."""
    torchs = functional.scaled_dot_product_attention
    functional.scaled_dot_product_attention = partial(_attend, torchs, apart)
    try:
        yield
    finally:
        functional.scaled_dot_product_attention = torchs


def _attend(
    torchs: Any,
    apart: bool,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **more: Any,
) -> Any:
    """What has a mask goes torch's own way."""
    fits = query.is_meta and attn_mask is None and query.dim() == 4 and query.shape[-1] == value.shape[-1]
    given, scale, grouped = (query, key, value), more.get("scale"), more.get("enable_gqa", False)
    if fits and not apart and not dropout_p and not grouped:
        return _ATEN._scaled_dot_product_flash_attention_for_cpu(*given, 0.0, is_causal, scale=scale)[0]
    if fits and apart and query.dtype != torch.float32 and query.shape[-1] % _STEP == 0:
        return _ATEN._scaled_dot_product_flash_attention(*given, dropout_p, is_causal, scale=scale)[0]
    if fits and apart and not grouped:
        keeps = torch.is_grad_enabled() and query.requires_grad
        return _ATEN._scaled_dot_product_efficient_attention(*given, None, keeps, dropout_p, is_causal, scale=scale)[0]
    return torchs(*given, attn_mask, dropout_p, is_causal, **more)
