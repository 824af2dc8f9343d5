"""Rules: elementwise updates on flat shards. A rule knows nothing of ranks, units or tiers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

__all__ = ["RULES", "Adagrad", "Adam", "Hyper", "Lion", "Part", "Rule", "Sgd"]

Hyper = Mapping[str, Any]


class Part(NamedTuple):
    """Neighbouring elements that are updated alike: weights, their gradient, what the rule remembers of them, and the
    count that this step has reached."""

    weights: Tensor
    grads: Tensor
    states: Mapping[str, Tensor]
    step: int


class Rule(Protocol):
    """What an optimizer must be to work on slices of flats: a function of single elements."""

    def states(self, hyper: Hyper) -> Mapping[str, float]:
        """What the rule remembers, and the number that it starts from."""

    def update(self, parts: Sequence[Part], hyper: Hyper) -> None: ...


class Adam:
    """Adam by torch's fused kernels: with decoupled weight decay, or with a decay that is part of the gradient."""

    def __init__(self, *, decoupled: bool) -> None:
        self.kernel = torch._fused_adamw_ if decoupled else torch._fused_adam_

    def states(self, hyper: Hyper) -> Mapping[str, float]:
        del hyper
        return {"exp_avg": 0.0, "exp_avg_sq": 0.0}

    def update(self, parts: Sequence[Part], hyper: Hyper) -> None:
        if not parts:
            return
        beta1, beta2 = hyper["betas"]
        counts = {part.step: torch.full((), float(part.step), device=part.weights.device) for part in parts}
        self.kernel(
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

    def states(self, hyper: Hyper) -> Mapping[str, float]:
        return {"momentum_buffer": 0.0} if hyper["momentum"] else {}

    def update(self, parts: Sequence[Part], hyper: Hyper) -> None:
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


class Lion:
    """The sign of an interpolation between moment and gradient, with decoupled decay."""

    def states(self, hyper: Hyper) -> Mapping[str, float]:
        del hyper
        return {"exp_avg": 0.0}

    def update(self, parts: Sequence[Part], hyper: Hyper) -> None:
        beta1, beta2 = hyper["betas"]
        for weights, grads, states, _ in parts:
            moment = states["exp_avg"]
            weights.mul_(1 - hyper["lr"] * hyper["weight_decay"])
            weights.add_(moment.lerp(grads, 1 - beta1).sign_(), alpha=-hyper["lr"])
            moment.lerp_(grads, 1 - beta2)


class Adagrad:
    """Descent scaled by the root of the sum of squares, as torch.optim.Adagrad computes it."""

    def states(self, hyper: Hyper) -> Mapping[str, float]:
        return {"sum": hyper["initial_accumulator_value"]}

    def update(self, parts: Sequence[Part], hyper: Hyper) -> None:
        for weights, grads, states, step in parts:
            change = grads.add(weights, alpha=hyper["weight_decay"]) if hyper["weight_decay"] else grads
            total = states["sum"].addcmul_(change, change, value=1)
            rate = hyper["lr"] / (1 + (step - 1) * hyper["lr_decay"])
            weights.addcdiv_(change, total.sqrt().add_(hyper["eps"]), value=-rate)


# By the names of a configuration.
RULES: Mapping[str, Callable[[Hyper], Rule]] = {
    "AdamW": lambda hyper: Adam(decoupled=hyper["adam_w_mode"]),
    "Adam": lambda hyper: Adam(decoupled=hyper["adam_w_mode"]),
    "SGD": lambda _: Sgd(),
    "Lion": lambda _: Lion(),
    "Adagrad": lambda _: Adagrad(),
}
