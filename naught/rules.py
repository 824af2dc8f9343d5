"""Rules: elementwise updates on flat shards. A rule knows nothing of ranks, units or tiers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

__all__ = ["RULES", "Adagrad", "Adam", "Hyper", "Lion", "Part", "Rule", "Sgd"]

Hyper = Mapping[str, Any]


class Part(NamedTuple):
    """Neighbouring elements that are updated alike: weights, their gradient, what the rule remembers of each and of all of
    them, the count that this step has reached, and the parameter group whose hyperparameters hold."""

    weights: Tensor
    grads: Tensor
    states: Mapping[str, Tensor]
    numbers: dict[str, Any]
    step: int
    group: int
    after: tuple[Callable[[], object], ...] = ()  # what is to be done once they are updated

    def split(self, numel: int) -> Iterator[Part]:
        """The same, so many elements at a time. What is to be done once all are updated is left to whoever splits them."""
        states = {name: torch.split(state, numel) for name, state in self.states.items()}
        for at, (weights, grads) in enumerate(zip(torch.split(self.weights, numel), torch.split(self.grads, numel), strict=True)):
            here = {name: pieces[at] for name, pieces in states.items()}
            yield Part(weights, grads, here, self.numbers, self.step, self.group)


class Rule(Protocol):
    """What an optimizer must be to work on slices of flats: a function of single elements. One that remembers numbers of
    its own of every parameter takes them up one by one, `apart`; else neighbours make one part."""

    apart: bool
    defers: bool  # an update on the host may go on when step() has returned: only hyperparameters tell it what to do
    signs: Mapping[str, bool]  # states that may be kept in 8 bits, and whether they have a sign

    def states(self, hyper: Hyper) -> Mapping[str, float]:
        """What the rule remembers, and the number that it starts from."""

    def update(self, parts: Sequence[Part], hyper: Hyper) -> None: ...


class Adam:
    """Adam by torch's fused kernels: with decoupled weight decay, or with a decay that is part of the gradient. A
    hyperparameter says which; configurations and torch have different names for it."""

    apart = False
    defers = True
    signs: Mapping[str, bool] = {"exp_avg": True, "exp_avg_sq": False}

    def __init__(self, decoupled: str = "adam_w_mode") -> None:
        self.decoupled = decoupled

    def states(self, hyper: Hyper) -> Mapping[str, float]:
        del hyper
        return {"exp_avg": 0.0, "exp_avg_sq": 0.0}

    def update(self, parts: Sequence[Part], hyper: Hyper) -> None:
        beta1, beta2 = hyper["betas"]
        counts = {part.step: torch.full((), float(part.step), device=part.weights.device) for part in parts}
        kernel = torch._fused_adamw_ if hyper[self.decoupled] else torch._fused_adam_
        kernel(
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

    apart = False
    defers = True
    signs: Mapping[str, bool] = {"momentum_buffer": True}

    def states(self, hyper: Hyper) -> Mapping[str, float]:
        return {"momentum_buffer": 0.0} if hyper["momentum"] else {}

    def update(self, parts: Sequence[Part], hyper: Hyper) -> None:
        for part in parts:
            change = _decayed(part, hyper)
            if hyper["momentum"]:
                buffer = part.states["momentum_buffer"]
                if part.step == 1:
                    buffer.copy_(change)
                else:
                    buffer.mul_(hyper["momentum"]).add_(change, alpha=1 - hyper["dampening"])
                change = change.add(buffer, alpha=hyper["momentum"]) if hyper["nesterov"] else buffer
            part.weights.add_(change, alpha=-hyper["lr"])


class Lion:
    """The sign of an interpolation between moment and gradient, with decoupled decay."""

    apart = False
    defers = True
    signs: Mapping[str, bool] = {"exp_avg": True}

    def states(self, hyper: Hyper) -> Mapping[str, float]:
        del hyper
        return {"exp_avg": 0.0}

    def update(self, parts: Sequence[Part], hyper: Hyper) -> None:
        beta1, beta2 = hyper["betas"]
        for part in parts:
            moment = part.states["exp_avg"]
            part.weights.mul_(1 - hyper["lr"] * hyper["weight_decay"])
            part.weights.add_(moment.lerp(part.grads, 1 - beta1).sign_(), alpha=-hyper["lr"])
            moment.lerp_(part.grads, 1 - beta2)


class Adagrad:
    """Descent scaled by the root of the sum of squares, as torch.optim.Adagrad computes it."""

    apart = False
    defers = True
    signs: Mapping[str, bool] = {}  # to a sum of squares less and less is added: 8 bits would not notice

    def states(self, hyper: Hyper) -> Mapping[str, float]:
        return {"sum": hyper["initial_accumulator_value"]}

    def update(self, parts: Sequence[Part], hyper: Hyper) -> None:
        for part in parts:
            change = _decayed(part, hyper)
            total = part.states["sum"].addcmul_(change, change, value=1)
            rate = hyper["lr"] / (1 + (part.step - 1) * hyper["lr_decay"])
            part.weights.addcdiv_(change, total.sqrt().add_(hyper["eps"]), value=-rate)


def _decayed(part: Part, hyper: Hyper) -> Tensor:
    """The gradient with the decay of the weights as a part of it."""
    return part.grads.add(part.weights, alpha=hyper["weight_decay"]) if hyper["weight_decay"] else part.grads


# By the names of a configuration.
RULES: Mapping[str, Rule] = {"AdamW": Adam(), "Adam": Adam(), "SGD": Sgd(), "Lion": Lion(), "Adagrad": Adagrad()}
