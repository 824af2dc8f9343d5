"""Devices: what differs between a CPU and an accelerator. The only file that calls torch.cuda."""

from __future__ import annotations

import ctypes
import os
import platform
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from naught.accelerator import get_accelerator
from naught.cpu import Cpu
from naught.errors import ModelError

__all__ = ["HostCopies", "Mark", "allocated_bytes", "device_for", "free_host_bytes", "keep_freed_pages", "mark"]


def device_for(model: nn.Module) -> torch.device:
    """Where a model will be trained: on the accelerator on which it lies, else on this process's, if it has one."""
    lies = _device_of(model)
    if lies is not None and lies.type != "cpu":
        return lies
    return torch.device(get_accelerator().current_device_name())


def _device_of(model: nn.Module) -> torch.device | None:
    """The one device on which a model's parameters lie; the meta device is none."""
    homes: dict[torch.device, str] = {}
    for name, param in model.named_parameters():
        if not param.is_meta:
            homes.setdefault(param.device, name)
    if len(homes) > 1:
        shown = ", ".join(f'"{name}" on {device}' for device, name in homes.items())
        raise ModelError(f"the model lies on several devices: {shown}", fix='move it to one: model.to("cuda") or model.to("cpu")')
    return next(iter(homes), None)


def allocated_bytes(device: torch.device) -> int | None:
    """Bytes that tensors of this process hold on an accelerator; None where nobody counts them."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else None


_CGROUPS = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)


def free_host_bytes() -> int:
    """Bytes of host memory that this process could still have: the system's, or less if a control group says so."""
    free = Cpu().mem_get_info()[0]
    for most, used in _CGROUPS:
        try:
            free = min(free, int(Path(most).read_text("ascii")) - int(Path(used).read_text("ascii")))
        except (OSError, ValueError):  # there is none, or it says "max"
            continue
    return max(free, 0)


class HostCopies:
    """Copies of tensors in host memory. Made inside of `beside`, in a thread, they come after all that the device had been
    asked before `follow`, and nothing waits for them."""

    def __init__(self, device: torch.device) -> None:
        self.stream: torch.cuda.Stream | None = None  # None: the device is the host
        if device.type == "cuda":
            self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def follow(self) -> None:
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))

    def beside(self) -> AbstractContextManager[None]:
        return nullcontext() if self.stream is None else torch.cuda.stream(self.stream)

    def copy(self, tensor: Tensor) -> Tensor:
        """Under way until `arrive`."""
        pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=self.stream is not None)
        return pinned.copy_(tensor, non_blocking=True)

    def arrive(self) -> None:
        """Wait for the copies that this thread has asked for."""
        if self.stream is not None:
            torch.cuda.current_stream(self.stream.device).synchronize()


# glibc's numbers for mallopt.
_TRIM_THRESHOLD, _MMAP_MAX = -1, -4


def keep_freed_pages(device: torch.device) -> None:
    """From here on let a CPU's allocator keep freed memory, as those of accelerators do: flats come and go with every
    unit, and pages that the system takes back cost a fault each when they return. What is free already goes back first.

    Whoever has set one of glibc's MALLOC_ variables is heeded.
    """
    tuned = any(name.startswith("MALLOC_") for name in os.environ)
    if device.type != "cpu" or tuned or platform.libc_ver()[0] != "glibc":
        return
    libc = ctypes.CDLL(None)
    libc.malloc_trim(0)
    libc.mallopt(_TRIM_THRESHOLD, -1)
    libc.mallopt(_MMAP_MAX, 0)


@dataclass(frozen=True)
class Mark:
    """A point in a device's time."""

    seconds: float
    event: torch.cuda.Event | None

    def until(self, later: Mark) -> float:
        """Seconds from this mark to a later one; on an accelerator this waits until the later one is reached."""
        if self.event is None or later.event is None:
            return later.seconds - self.seconds
        later.event.synchronize()
        return float(self.event.elapsed_time(later.event)) / 1000


def mark(device: torch.device) -> Mark:
    """Now, as the device sees it: on an accelerator once it has done all that was asked of it so far."""
    if device.type != "cuda":
        return Mark(time.perf_counter(), None)
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return Mark(time.perf_counter(), event)
