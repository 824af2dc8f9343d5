"""Adam: elements a second of the AdamW that training uses, on 32-bit weights and states."""

from __future__ import annotations

import torch

from naught.devices import free_host_bytes
from naught.measuring.rounds import median_round_s
from naught.rules import Adam, Part

__all__ = ["adam_numel_s"]

_HYPER = {"lr": 1e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "adam_w_mode": True}
_NUMEL, _BYTES = 2**26, 16  # those of an element: weight, gradient and two moments
_SHARE_OF_FREE = 4


def adam_numel_s(device: torch.device, *, numel: int = 0, budget_s: float = 1.5) -> float:
    """On as many threads as there are now. Without a number of elements, so many that they have no room in a CPU's caches."""
    numel = numel or min(_NUMEL, free_host_bytes() // _SHARE_OF_FREE // _BYTES)
    weights, grads, moments, squares = (torch.full((numel,), 0.5, device=device) for _ in range(4))
    states = {"exp_avg": moments, "exp_avg_sq": squares}
    rule = Adam()

    def update() -> None:
        rule.update([Part(weights, grads, states, {}, step=2, group=0)], _HYPER)

    return numel / median_round_s(update, device, budget_s=budget_s)
