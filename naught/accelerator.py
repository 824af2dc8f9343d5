"""Accelerator: the device of this process under DeepSpeed's names, so that scripts need not ask which one it is."""

from __future__ import annotations

import os
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from naught.cpu import Cpu
from naught.errors import UsageError

__all__ = ["Accelerator", "get_accelerator"]

_BACKENDS = {"cuda": "nccl", "xpu": "xccl"}


def get_accelerator() -> Accelerator:
    """The accelerator that torch finds, else the CPU; DS_ACCELERATOR=cpu takes the CPU although there is another."""
    present = torch.accelerator.current_accelerator(check_available=True)
    found = ["cpu"] if present is None else [present.type, "cpu"]
    name = os.environ.get("DS_ACCELERATOR") or found[0]
    if name not in found:
        raise UsageError(
            f'there is no accelerator "{name[:80]}" here',
            where="DS_ACCELERATOR",
            fix=f"unset it, or choose {' or '.join(found)}",
        )
    return _accelerator(name)


@cache
def _accelerator(name: str) -> Accelerator:
    return Accelerator(name, Cpu() if name == "cpu" else torch.get_device_module(name))


class Accelerator:
    """What torch's modules for devices do not share. All else (streams, events, seeds, memory) is the module's own."""

    def __init__(self, name: str, module: ModuleType | Cpu) -> None:
        self.name, self.module = name, module

    def __getattr__(self, name: str) -> Any:
        if name in ("name", "module") or name.startswith("__"):
            raise AttributeError(name)  # a copy under way has neither yet
        return getattr(self.module, name)

    def device_name(self, device_index: int | None = None) -> str:
        """What torch calls the device, or one of several; the CPU has no number."""
        return self.name if device_index is None or self.name == "cpu" else f"{self.name}:{device_index}"

    def current_device_name(self) -> str:
        return self.device_name(self.module.current_device())

    def communication_backend_name(self) -> str:
        return _BACKENDS.get(self.name, "gloo")

    def on_accelerator(self, tensor: Tensor) -> bool:
        return tensor.device.type == self.name

    def pin_memory(self, tensor: Tensor) -> Tensor:
        """A tensor in memory that copies to the device need not wait for; for the CPU any memory is."""
        return tensor if self.name == "cpu" else tensor.pin_memory()

    def total_memory(self, device_index: int | None = None) -> int:
        return int(self.module.mem_get_info(device_index)[1])

    def available_memory(self, device_index: int | None = None) -> int:
        return int(self.module.mem_get_info(device_index)[0])

    def is_fp16_supported(self) -> bool:
        """Whether the device itself computes with 16-bit floats; a CPU that does not is slow, not wrong."""
        if self.name == "cpu":
            asks = getattr(torch.ops.mkldnn, "_is_mkldnn_fp16_supported", None)
            return asks is not None and bool(asks())
        return self.name != "cuda" or self.module.get_device_capability()[0] >= 7

    def supported_dtypes(self) -> list[torch.dtype]:
        """Types to train in, 32-bit floats first."""
        halves = {torch.bfloat16: self.module.is_bf16_supported(), torch.float16: self.is_fp16_supported()}
        return [torch.float32, *(dtype for dtype, supported in halves.items() if supported)]

    def random(self) -> ModuleType:
        return torch.random

    def range_push(self, msg: str) -> None:
        """Open a named range in the profile of the device, where profiles have ranges."""
        if self.name == "cuda":
            self.module.nvtx.range_push(msg)

    def range_pop(self) -> None:
        if self.name == "cuda":
            self.module.nvtx.range_pop()
