"""Flop counts: torch's own counter of operations, with the formulas that it lacks."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

__all__ = ["counting", "totals_of"]

_ATEN = torch.ops.aten


def counting() -> FlopCounterMode:
    """Counts while it is open."""
    return FlopCounterMode(display=False, custom_mapping=_MISSING)


def totals_of(counter: FlopCounterMode) -> dict[str, int]:
    """Of every module, by torch's name for it, with those inside of it."""
    return {name: sum(counts.values()) for name, counts in counter.get_flop_counts().items()}


def _attention(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return int(sdpa_flop_count(query, key, value))  # type: ignore[no-untyped-call]


def _attention_backward(grad: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return int(sdpa_backward_flop_count(grad, query, key, value))  # type: ignore[no-untyped-call]


_MISSING = {
    _ATEN._scaled_dot_product_flash_attention_for_cpu: _attention,
    _ATEN._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
}
