"""Foreign: a torch optimizer that a user brings, as an update rule.

The optimizer itself never steps. A hand, which is the same optimizer with other parameters, is given slices of flats in
their place. That is exact for every optimizer that is a function of single elements, and whether one is, is tried out.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from naught.errors import UsageError
from naught.rules import Hyper, Part

__all__ = ["Foreign"]

_TRIAL_SHAPE = (8, 16)
_TRIAL_SIZES = (1.0, 1.0, 1e4, 1e-4)  # of weights and of gradients: a clipping of its own may only be seen by large ones
_TRIAL_RATE = 1e-2
_PIECE = slice(32, 96)  # of the flattened trial


class Foreign:
    """The rule of a torch optimizer, once a trial has shown that it is one of single elements."""

    apart = True
    signs: Mapping[str, bool] = {}  # nobody knows what they are
    defers = False  # its counters are counted once a step is over

    def __init__(self, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
        self.optimizer = optimizer
        self.beginnings = [_beginning(optimizer, group) for group in optimizer.param_groups]
        self.moments = {name for at, known in enumerate(self.beginnings) for name in _try_out(optimizer, at, known, device)}
        self.changes: dict[int, _Changes] = {}  # what this step has done to the groups, and to the optimizer itself

    def states(self, hyper: Hyper) -> Mapping[str, float]:
        group = next(at for at, known in enumerate(self.optimizer.param_groups) if known is hyper)
        return {name: self.beginnings[group].moments.get(name, 0.0) for name in sorted(self.moments)}

    def update(self, parts: Sequence[Part], hyper: Hyper) -> None:
        proxies = [_proxy(part.weights, part.grads) for part in parts]
        states = {proxy: self._before(part) for proxy, part in zip(proxies, parts, strict=True)}
        group = parts[0].group
        after, self.changes[group] = _step(self.optimizer, group, hyper, states)
        for proxy, part in zip(proxies, parts, strict=True):
            _keep(after[proxy], part)

    def _before(self, part: Part) -> dict[str, Any]:
        """What the optimizer left of these elements the last time, or what it began with. Mostly it begins with nothing,
        and makes what it needs in its first step."""
        if part.step > 1:
            return {**part.numbers, **part.states}
        beginning = self.beginnings[part.group]
        return deepcopy(beginning.numbers) | {name: part.states[name] for name in beginning.moments}

    def commit(self) -> None:
        """A step is over. It was many calls, each of which began with the same counters: now those are counted once."""
        for group, changes in self.changes.items():
            self.optimizer.param_groups[group].update(changes.group)
            self.optimizer.__dict__.update(changes.attributes)
        self.changes.clear()


class _Changes(NamedTuple):
    """What a step has changed of an optimizer beside weights and states."""

    group: dict[str, Any]
    attributes: dict[str, Any]


class _Beginning(NamedTuple):
    """What an optimizer has made of a parameter before its first step: numbers for all elements, and one for each."""

    numbers: dict[str, Any]
    moments: dict[str, float]


def _beginning(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> _Beginning:
    """Some optimizers make states when they are made: those of one parameter tell of all, if they are constant."""
    beginning = _Beginning({}, {})
    param = next((param for param in group["params"] if param.numel() > 1 and optimizer.state.get(param)), None)
    if param is None:
        return beginning
    state = optimizer.state[param]
    if float(state.get("step", 0)) > 0:
        raise UsageError("the optimizer has taken steps already", fix="give a new one; load its state once the engine is there")
    for name, value in state.items():
        if not isinstance(value, Tensor) or value.numel() == 1:
            beginning.numbers[name] = value
        elif value.shape != param.shape or bool((value != value.flatten()[0]).any()):
            raise _refusal(optimizer, f'it begins with a state "{name}" that is not the same number for every element')
        else:
            beginning.moments[name] = float(value.flatten()[0])
    return beginning


def _proxy(weights: Tensor, grads: Tensor) -> nn.Parameter:
    proxy = nn.Parameter(weights)
    proxy.grad = grads
    return proxy


def _keep(state: Mapping[str, Any], part: Part) -> None:
    for name, value in state.items():
        if name not in part.states:
            part.numbers[name] = value
        elif value is not part.states[name]:
            part.states[name].copy_(value)


def _step(
    optimizer: torch.optim.Optimizer,
    at: int,
    hyper: Hyper,
    states: Mapping[nn.Parameter, dict[str, Any]],
    attributes: Mapping[str, Any] | None = None,
) -> tuple[Mapping[nn.Parameter, Mapping[str, Any]], _Changes]:
    """One step of a hand, on these parameters. A scheduler may have wrapped the optimizer's own step: the class has it."""
    kind = type(optimizer)
    hand = object.__new__(kind)
    before = {name: value for name, value in {**optimizer.__dict__, **(attributes or {})}.items() if name != "step"}
    hand.__dict__.update(before)
    hand._optimizer_step_pre_hooks, hand._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
    # All groups are there, for some look at the first one; but only one of them has parameters now.
    hand.param_groups = [{**group, "params": []} for group in optimizer.param_groups]
    hand.param_groups[at] = {**hyper, "params": list(states)}
    hand.state = defaultdict(dict)
    for proxy, state in states.items():
        hand.state[proxy] = state
    kind.step(hand)
    attributes_after = {name: value for name, value in vars(hand).items() if name not in _TORCHS}
    changes = _Changes(_changed(hyper, hand.param_groups[at]), _changed(before, attributes_after))
    return {proxy: hand.state[proxy] for proxy in states}, changes


# Attributes that every optimizer has, and that a hand has of its own.
_TORCHS = {"state", "param_groups", "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"}


def _changed(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in after.items() if name != "params" and value is not before.get(name)}


class _Trial(NamedTuple):
    weights: Tensor
    state: Mapping[str, Any]


def _try_out(optimizer: torch.optim.Optimizer, at: int, beginning: _Beginning, device: torch.device) -> set[str]:
    """The names of what the optimizer remembers of every element. Raises if slices of a parameter, on their own, do not
    become what they become as part of the whole."""
    dice = torch.Generator().manual_seed(0)
    drawn = [size * torch.randn(_TRIAL_SHAPE, generator=dice).to(device) for size in _TRIAL_SIZES]
    pieces = [tensor.flatten()[_PIECE].clone() for tensor in drawn]
    try:
        whole, piece = (_rehearse(optimizer, at, beginning, *tensors) for tensors in (drawn, pieces))
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


def _rehearse(optimizer: torch.optim.Optimizer, at: int, beginning: _Beginning, given: Tensor, *grads: Tensor) -> _Trial:
    weights = given.clone()
    state: Mapping[str, Any] = deepcopy(beginning.numbers) | {
        name: torch.full_like(given, start) for name, start in beginning.moments.items()
    }
    attributes: dict[str, Any] = {}
    hyper: Hyper = optimizer.param_groups[at] | _trial_rate(optimizer.param_groups[at])
    for grad in grads:
        proxy = _proxy(weights, grad.clone())
        states, changes = _step(optimizer, at, hyper, {proxy: dict(state)}, attributes)
        state = states[proxy]
        hyper, attributes = {**hyper, **changes.group}, {**attributes, **changes.attributes}
    return _Trial(weights, state)


def _trial_rate(hyper: Hyper) -> dict[str, Any]:
    """A rate that can be seen: a warm-up may begin at zero."""
    rate = hyper.get("lr")
    if isinstance(rate, Tensor):
        return {"lr": torch.full_like(rate, _TRIAL_RATE)}
    return {"lr": _TRIAL_RATE} if isinstance(rate, int | float) else {}


def _refusal(optimizer: torch.optim.Optimizer, why: str) -> UsageError:
    return UsageError(
        f"{type(optimizer).__name__} cannot be used where parameters are updated in slices: {why}",
        fix="use an optimizer that treats every element by itself: AdamW, Adam, SGD, Lion, Adagrad, RMSprop, NAdam and others",
    )
