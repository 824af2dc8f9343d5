"""Foreign: a torch optimizer that a user brings, as an update rule.

The optimizer itself never steps. A hand, which is the same optimizer with other parameters, is given slices of flats in
their place. That is exact for every optimizer that is a function of single elements, and whether one is, is tried out.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from naught.errors import UsageError
from naught.rules import Hyper, Part

__all__ = ["Foreign"]

_TRIAL_SHAPE = (8, 16)
_TRIAL_STEPS = 3
_PIECE = slice(32, 96)  # of the flattened trial


class Foreign:
    """The rule of a torch optimizer, once a trial has shown that it is one of single elements."""

    apart = True

    def __init__(self, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
        self.optimizer = optimizer
        self.moments = {name for hyper in optimizer.param_groups for name in _try_out(optimizer, hyper, device)}

    def states(self, hyper: Hyper) -> Mapping[str, float]:
        del hyper
        return dict.fromkeys(sorted(self.moments), 0.0)

    def update(self, parts: Sequence[Part], hyper: Hyper) -> None:
        proxies = [_proxy(part.weights, part.grads) for part in parts]
        states = {proxy: _before(part) for proxy, part in zip(proxies, parts, strict=True)}
        after = _step(self.optimizer, hyper, states)
        for proxy, part in zip(proxies, parts, strict=True):
            _keep(after[proxy], part)


def _proxy(weights: Tensor, grads: Tensor) -> nn.Parameter:
    proxy = nn.Parameter(weights)
    proxy.grad = grads
    return proxy


def _before(part: Part) -> dict[str, Any]:
    """What the optimizer left of these elements the last time; nothing before the first, so that it begins by itself."""
    if part.step == 1:
        return {}
    return {**part.numbers, **part.states}


def _keep(state: Mapping[str, Any], part: Part) -> None:
    for name, value in state.items():
        if name not in part.states:
            part.numbers[name] = value
        elif value is not part.states[name]:
            part.states[name].copy_(value)


def _step(optimizer: torch.optim.Optimizer, hyper: Hyper, states: Mapping[nn.Parameter, dict[str, Any]]) -> Any:
    """One step of a hand, on these parameters. A scheduler may have wrapped the optimizer's own step: the class has it."""
    kind = type(optimizer)
    hand = object.__new__(kind)
    hand.__dict__.update(optimizer.__dict__)
    hand.__dict__.pop("step", None)
    hand._optimizer_step_pre_hooks, hand._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
    hand.param_groups = [{**hyper, "params": list(states)}]
    hand.state = defaultdict(dict)
    for proxy, state in states.items():
        hand.state[proxy] = state
    kind.step(hand)
    return hand.state


class _Trial(NamedTuple):
    weights: Tensor
    state: Mapping[str, Any]


def _try_out(optimizer: torch.optim.Optimizer, hyper: Hyper, device: torch.device) -> set[str]:
    """The names of what the optimizer remembers of every element. Raises if slices of a parameter, on their own, do not
    become what they become as part of the whole."""
    dice = torch.Generator().manual_seed(0)
    drawn = [torch.randn(_TRIAL_SHAPE, generator=dice).to(device) for _ in range(1 + _TRIAL_STEPS)]
    pieces = [tensor.flatten()[_PIECE].clone() for tensor in drawn]
    try:
        whole, piece = (_rehearse(optimizer, hyper, weights.clone(), grads) for weights, *grads in (drawn, pieces))
    except Exception as error:
        raise _refusal(optimizer, f"its step() fails on a slice of a parameter: {error}") from error
    if torch.equal(whole.weights, drawn[0]):
        raise _refusal(optimizer, "its step() did not change parameters that are not its own")
    if not torch.equal(whole.weights.flatten()[_PIECE], piece.weights):
        raise _refusal(optimizer, "what it does to an element depends on other elements, and those may be on other ranks")
    moments = {name for name, value in piece.state.items() if isinstance(value, Tensor) and value.shape == piece.weights.shape}
    for name, value in piece.state.items():
        if name not in moments and not isinstance(value, int | float) and not (isinstance(value, Tensor) and value.numel() == 1):
            raise _refusal(optimizer, f'it remembers "{name}", which is neither one number for each element nor one for all')
    return moments


def _rehearse(optimizer: torch.optim.Optimizer, hyper: Hyper, weights: Tensor, grads: Sequence[Tensor]) -> _Trial:
    state: dict[str, Any] = {}
    for grad in grads:
        proxy = _proxy(weights, grad.clone())
        state = _step(optimizer, hyper, {proxy: state})[proxy]
    return _Trial(weights, state)


def _refusal(optimizer: torch.optim.Optimizer, why: str) -> UsageError:
    return UsageError(
        f"{type(optimizer).__name__} cannot train a model that is split over ranks: {why}",
        fix="use an optimizer that treats every element by itself: AdamW, Adam, SGD, Lion, Adagrad, RMSprop, NAdam and others",
    )
