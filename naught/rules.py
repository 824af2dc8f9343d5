"""Rules: elementwise updates on flat shards. A rule knows nothing of ranks, units or tiers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

__all__ = ["AdamW", "Part", "Rule", "Sgd"]


class Part(NamedTuple):
    """Neighbouring elements that are updated alike: weights, their gradient, what the rule remembers of them, and the
    count that this step has reached."""

    weights: Tensor
    grads: Tensor
    states: Mapping[str, Tensor]
    step: int


class Rule(Protocol):
    """What an optimizer must be to work on slices of flats: a function of single elements."""

    @property
    def states(self) -> tuple[str, ...]: ...

    def update(self, parts: Sequence[Part], hyper: Mapping[str, Any]) -> None: ...


class AdamW:
    """Adam with decoupled weight decay, by torch's fused kernel."""

    states = ("exp_avg", "exp_avg_sq")

    def update(self, parts: Sequence[Part], hyper: Mapping[str, Any]) -> None:
        if not parts:
            return
        beta1, beta2 = hyper["betas"]
        counts = {part.step: torch.full((), float(part.step), device=part.weights.device) for part in parts}
        torch._fused_adamw_(
            [part.weights for part in parts],
            [part.grads for part in parts],
            [part.states["exp_avg"] for part in parts],
            [part.states["exp_avg_sq"] for part in parts],
            [],
            [counts[part.step] for part in parts],
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

    def update(self, parts: Sequence[Part], hyper: Mapping[str, Any]) -> None:
        for weights, grads, states, step in parts:
            change = grads.add(weights, alpha=hyper["weight_decay"]) if hyper["weight_decay"] else grads
            if hyper["momentum"]:
                buffer = states["momentum_buffer"]
                if step == 1:
                    buffer.copy_(change)
                else:
                    buffer.mul_(hyper["momentum"]).add_(change, alpha=1 - hyper["dampening"])
                change = change.add(buffer, alpha=hyper["momentum"]) if hyper["nesterov"] else buffer
            weights.add_(change, alpha=-hyper["lr"])
