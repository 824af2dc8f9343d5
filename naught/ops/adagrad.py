"""Adagrad under DeepSpeed's name: torch's own."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim.optimizer import ParamsT

__all__ = ["DeepSpeedCPUAdagrad"]


class DeepSpeedCPUAdagrad(torch.optim.Adagrad):
    """Descent scaled by the sum of squares."""

    def __init__(
        self,
        model_params: ParamsT,
        lr: float = 1e-2,
        eps: float = 1e-10,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        **_: Any,
    ) -> None:
        del amsgrad  # there is no such thing; the signature has it
        super().__init__(model_params, lr=lr, eps=eps, weight_decay=weight_decay, foreach=False)
