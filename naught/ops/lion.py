"""Lion under DeepSpeed's names; torch has none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import ParamsT

from naught.rules import RULES, Part

__all__ = ["DeepSpeedCPULion", "FusedLion"]


class FusedLion(torch.optim.Optimizer):
    """Sign descent with one moment, by the rule that a configuration calls Lion."""

    naught_rule = "Lion"

    def __init__(
        self, params: ParamsT, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.99), weight_decay: float = 0.0, **_: Any
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Without an engine: the same rule, on whole parameters."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        rule = RULES[self.naught_rule]
        for at, group in enumerate(self.param_groups):
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                for name, start in rule.states(group).items():
                    state.setdefault(name, torch.full_like(param, start))
                rule.update([Part(param, param.grad, state, {}, 0, at)], group)
        return loss


class DeepSpeedCPULion(FusedLion):
    """The same under the name that scripts use with states in host memory."""
