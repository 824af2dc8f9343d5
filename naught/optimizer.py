"""Optimizer: what training reads of an optimizer (parameter groups, a step) in torch's shape. The engine does the work."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MethodType
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from naught.errors import UsageError
from naught.foreign import Foreign
from naught.loss_scale import AdaptiveScale, LossScale
from naught.rules import RULES, Adam, Rule

__all__ = ["Groups", "LossScaler", "Optimizer", "Trainer", "groups_of", "optimizer_of", "rule_of"]

Groups = Iterable[nn.Parameter] | Iterable[dict[str, Any]]
Hand = torch.optim.Optimizer | Callable[[Any], torch.optim.Optimizer]


_READ_STATES = "read them with naught.utils.safe_get_full_optimizer_state, or save with engine.save_checkpoint"
_WRITE_STATES = "write them with naught.utils.safe_set_full_optimizer_state, or load with engine.load_checkpoint"


class Trainer(Protocol):
    """Who takes the steps."""

    def step(self) -> None: ...

    def zero_grad(self, set_to_none: bool = True) -> None: ...

    def get_global_grad_norm(self) -> float | None: ...

    def was_step_applied(self) -> bool: ...

    def override_loss_scale(self, scale: float) -> None: ...

    @property
    def scaling(self) -> LossScale: ...


class LossScaler(NamedTuple):
    """The scale of the loss by DeepSpeed's names; no window where it does not adapt."""

    loss_scale: float
    cur_scale: float
    cur_iter: int
    scale_window: int | None


class Optimizer(torch.optim.Optimizer):
    """Parameter groups with their hyperparameters. `optimizer` is the one that the user brought, if there is one: the
    groups are the same objects, so that a scheduler may hold either."""

    def __init__(
        self,
        rule: Rule,
        groups: Sequence[dict[str, Any]],
        defaults: dict[str, Any],
        optimizer: torch.optim.Optimizer | None = None,
    ) -> None:
        self.trainer: Trainer | None = None  # None: not part of an engine yet, or no longer
        super().__init__(list(groups), defaults)
        self.rule, self.optimizer = rule, optimizer
        if optimizer is not None:
            self.param_groups = optimizer.param_groups

    def belong_to(self, trainer: Trainer) -> None:
        """From here on an engine takes the steps: also those of the user's own, which would update what this process happens to
        have."""
        self.trainer = trainer
        if self.optimizer is not None:
            self._lend_step(self.optimizer)

    def _lend_step(self, theirs: torch.optim.Optimizer) -> None:
        def step(_: torch.optim.Optimizer, closure: None = None) -> None:
            self.step(closure)

        step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # schedulers need not wrap it: see has_stepped
        theirs.step = MethodType(step, theirs)  # type: ignore[method-assign]

    def _trainer(self) -> Trainer:
        if self.trainer is None:
            raise UsageError("the optimizer belongs to no engine", fix="make one with naught.initialize")
        return self.trainer

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """What engine.step() does."""
        if closure is not None:
            raise UsageError("step() takes no closure here", fix="run forward and backward yourself, then step()")
        self._trainer().step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._trainer().zero_grad(set_to_none)

    def will_step(self) -> None:
        """Hooks that the user has registered on their own optimizer's step are called around the engine's."""
        if self.optimizer is not None:
            for hook in self.optimizer._optimizer_step_pre_hooks.values():
                hook(self.optimizer, (), {})

    def has_stepped(self) -> None:
        """Torch's schedulers look here when they want to know whether an update has been."""
        for held in (self, self.optimizer):
            if held is not None:
                held._opt_called = True  # type: ignore[attr-defined]
        if isinstance(self.rule, Foreign):
            self.rule.commit()
        if self.optimizer is not None:
            for hook in self.optimizer._optimizer_step_post_hooks.values():
                hook(self.optimizer, (), {})

    def state_dict(self) -> dict[str, Any]:
        raise UsageError("an optimizer's states are in the engine, on all ranks", fix=_READ_STATES)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        del state_dict
        raise UsageError("an optimizer's states are in the engine, on all ranks", fix=_WRITE_STATES)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if self.trainer is not None:
            raise UsageError("parameter groups cannot be added to an engine", fix="give all of them to naught.initialize")
        super().add_param_group(param_group)

    # --- as DeepSpeed's wrapper has it ---

    @property
    def overflow(self) -> bool:
        """Whether the last step was skipped."""
        return not self._trainer().was_step_applied()

    @property
    def loss_scaler(self) -> LossScaler:
        """The scale of the loss as it is now."""
        scale = self._trainer().scaling
        window, steps = (scale.window, scale.steps) if isinstance(scale, AdaptiveScale) else (None, 0)
        return LossScaler(scale.value, scale.value, steps, window)

    @property
    def loss_scale(self) -> float:
        return self._trainer().scaling.value

    cur_scale = loss_scale

    @property
    def dynamic_loss_scale(self) -> bool:
        return self._trainer().scaling.adapts

    @property
    def _global_grad_norm(self) -> float | None:
        return self._trainer().get_global_grad_norm()

    def get_lr(self) -> list[float]:
        return [group["lr"] for group in self.param_groups]

    def set_lr(self, lr: float) -> None:
        for group in self.param_groups:
            group["lr"] = lr

    def override_loss_scale(self, loss_scale: float) -> None:
        """Go on with this scale of the loss, whatever comes."""
        self._trainer().override_loss_scale(loss_scale)

    def destroy(self) -> None:
        self.trainer = None
        if self.optimizer is not None:
            self.optimizer.__dict__.pop("step", None)


def groups_of(params: Groups | nn.Parameter, hyper: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Parameter groups as torch has them, each with hyperparameters of its own or those given."""
    if not isinstance(params, Iterable):
        raise UsageError(f"model_parameters is a {type(params).__name__}", fix="give model.parameters(), or groups of them")
    listed: list[Any] = [params] if isinstance(params, nn.Parameter | dict) else list(params)
    if not any(isinstance(member, dict) for member in listed):
        listed = [{"params": listed}]
    if not all(isinstance(member, dict) and "params" in member for member in listed):
        raise UsageError(
            "model_parameters is neither parameters nor groups of them",
            fix='give model.parameters(), or a list of {"params": [...], "lr": ...}',
        )
    groups = [{**hyper, **group, "params": _listed(group["params"])} for group in listed]
    homes: dict[nn.Parameter, int] = {}
    for at, group in enumerate(groups):
        for param in group["params"]:
            if homes.setdefault(param, at) != at:
                raise UsageError(
                    f"a parameter of shape {list(param.shape)} is in the parameter groups {homes[param]} and {at}",
                    fix="put every parameter into one group",
                )
    return groups


def _listed(params: Any) -> list[nn.Parameter]:
    listed = [params] if isinstance(params, nn.Parameter) else list(params)
    wrong = next((member for member in listed if not isinstance(member, nn.Parameter)), None)
    if wrong is not None:
        raise UsageError(f"model_parameters has a {type(wrong).__name__} where a parameter should be", fix="give parameters")
    return listed


def optimizer_of(given: Hand, params: Groups | None, device: torch.device) -> Optimizer:
    """The user's own optimizer, or what their function makes of the parameters, over the rule that it amounts to."""
    theirs = given(params) if callable(given) and not isinstance(given, torch.optim.Optimizer) else given
    if not isinstance(theirs, torch.optim.Optimizer):
        raise UsageError(
            f"the optimizer is a {type(theirs).__name__}, not a torch.optim.Optimizer",
            fix="give one, or a function of the parameters that makes one",
        )
    if isinstance(theirs, Optimizer):
        raise UsageError("the optimizer belongs to an engine already", fix="make a new one")
    rule = rule_of(theirs, device)
    theirs.state.clear()  # some make room for all parameters at once
    return Optimizer(rule, theirs.param_groups, theirs.defaults, theirs)


def rule_of(optimizer: torch.optim.Optimizer, device: torch.device) -> Rule:
    """Our own rule where it calls the very kernel that the optimizer would."""
    if not optimizer.state:
        for kind in type(optimizer).__mro__:
            if "naught_rule" in vars(kind) and _has_the_step_of(optimizer, kind):
                return RULES[vars(kind)["naught_rule"]]
        if _has_the_step_of(optimizer, torch.optim.Adam) and all(map(_is_plainly_fused, optimizer.param_groups)):
            return Adam("decoupled_weight_decay")
    return Foreign(optimizer, device)


def _has_the_step_of(optimizer: torch.optim.Optimizer, kind: type) -> bool:
    """Whether an optimizer is of this kind and has no step() of its own. Torch wraps the step of every class in use."""
    return isinstance(optimizer, kind) and inspect.unwrap(type(optimizer).step) is inspect.unwrap(kind.step)  # type: ignore[attr-defined]


def _is_plainly_fused(group: Mapping[str, Any]) -> bool:
    """Whether Adam's group asks for the fused kernel and for nothing that our call of it does not pass on."""
    extras = ("amsgrad", "maximize", "capturable", "differentiable")
    return bool(group["fused"]) and not any(group[extra] for extra in extras) and isinstance(group["lr"], float)
