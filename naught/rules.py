"""Rules: elementwise updates on flat shards. A rule knows nothing of ranks, units or tiers."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

__all__ = ["AdamW", "Rule", "Sgd"]


class Rule(Protocol):
    """What an optimizer must be to work on slices of flats: a function of single elements."""

    @property
    def states(self) -> tuple[str, ...]: ...

    def update(self, weights: Tensor, grads: Tensor, states: dict[str, Tensor], *, step: int, hyper: dict[str, Any]) -> None: ...


class AdamW:
    """Adam with decoupled weight decay, by torch's fused kernel."""

    states = ("exp_avg", "exp_avg_sq")

    def update(self, weights: Tensor, grads: Tensor, states: dict[str, Tensor], *, step: int, hyper: dict[str, Any]) -> None:
        beta1, beta2 = hyper["betas"]
        torch._fused_adamw_(
            [weights],
            [grads],
            [states["exp_avg"]],
            [states["exp_avg_sq"]],
            [],
            # The kernel wants the count that this step has reached.
            [torch.tensor(float(step), device=weights.device)],
            lr=hyper["lr"],
            beta1=beta1,
            beta2=beta2,
            weight_decay=hyper["weight_decay"],
            eps=hyper["eps"],
            amsgrad=False,
            maximize=False,
            grad_scale=None,
            found_inf=None,
        )


class Sgd:
    """Gradient descent with momentum, as torch.optim.SGD computes it."""

    states = ("momentum_buffer",)

    def update(self, weights: Tensor, grads: Tensor, states: dict[str, Tensor], *, step: int, hyper: dict[str, Any]) -> None:
        if hyper["weight_decay"]:
            grads = grads.add(weights, alpha=hyper["weight_decay"])
        if hyper["momentum"]:
            buffer = states["momentum_buffer"]
            if step == 1:
                buffer.copy_(grads)
            else:
                buffer.mul_(hyper["momentum"]).add_(grads, alpha=1 - hyper["dampening"])
            grads = grads.add(buffer, alpha=hyper["momentum"]) if hyper["nesterov"] else buffer
        weights.add_(grads, alpha=-hyper["lr"])
