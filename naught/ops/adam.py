"""Adam under DeepSpeed's names: torch's own, fused."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim.optimizer import ParamsT

from naught.errors import UsageError

__all__ = ["DeepSpeedCPUAdam", "FusedAdam"]


class FusedAdam(torch.optim.Adam):
    """Adam by torch's fused kernel, with decoupled weight decay unless `adam_w_mode` is false."""

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
    ) -> None:
        del set_grad_none  # gradients are always let go
        if not bias_correction:
            raise UsageError("Adam without bias correction is not available", fix="leave bias_correction out")
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad, fused=True, decoupled_weight_decay=adam_w_mode)


class DeepSpeedCPUAdam(FusedAdam):
    """The same rule under the name that scripts use with states in host memory."""

    def __init__(
        self,
        model_params: ParamsT,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        adamw_mode: bool = True,
        fp32_optimizer_states: bool = True,
        **_: Any,
    ) -> None:
        del fp32_optimizer_states  # states are always 32-bit
        super().__init__(model_params, lr, bias_correction, betas, eps, adamw_mode, weight_decay, amsgrad)
