"""Ops: optimizers under DeepSpeed's names. They are torch's, with its fused kernels, on every device: nothing is compiled."""

from naught.ops import adagrad, adam, lion

__all__ = ["adagrad", "adam", "lion"]
