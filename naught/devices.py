"""Devices: what differs between a CPU and an accelerator. With `streams`, the only file that calls
torch.cuda."""

from __future__ import annotations

import ctypes
import errno
import platform
import resource
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from naught.accelerator import get_accelerator
from naught.cpu import Cpu
from naught.errors import ModelError

__all__ = [
    "GpuFacts",
    "Mark",
    "Pool",
    "Room",
    "allocated_bytes",
    "device_for",
    "forget_peak",
    "free_host_bytes",
    "gpu_facts",
    "is_out_of_memory",
    "limit_memory",
    "mark",
    "nccl_version",
    "peak_bytes",
    "room_on",
]


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
    """Bytes that this process holds on a device: on an accelerator those of its tensors, on a CPU all that its allocator has
    handed out, tensors among them. None where nobody counts them."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else _handed_out()


class _Mallinfo(ctypes.Structure):
    """glibc's struct mallinfo2."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")
    ]


@cache
def _mallinfo() -> Callable[[], _Mallinfo] | None:
    """None: the C library is another one, or older than this count."""
    if platform.libc_ver()[0] != "glibc":
        return None
    try:
        count = ctypes.CDLL(None).mallinfo2
    except AttributeError:
        return None
    count.restype = _Mallinfo
    return count


def _handed_out() -> int | None:
    count = _mallinfo()
    if count is None:
        return None
    now = count()
    return int(now.uordblks + now.hblkhd)  # from its heaps, and as mappings of their own


def peak_bytes(device: torch.device) -> int | None:
    """The most that tensors held on an accelerator since `forget_peak`; None where nobody counts that."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None


def forget_peak(device: torch.device) -> None:
    """Count the peak from here on."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def limit_memory(device: torch.device, nbytes: int | None) -> None:
    """From here on an accelerator's allocator gives this process no more than so much; None: all that there is."""
    if device.type == "cuda":
        whole = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(1.0 if nbytes is None else min(1.0, nbytes / whole), device)


class Room(NamedTuple):
    """A device's memory: all of it, and what nobody has."""

    whole: int
    free: int
    kept: int | None = None  # by torch for tensors to come; None: it keeps nothing there
    limit: int | None = None  # to what this process alone may have; None: there is none


def room_on(device: torch.device) -> Room:
    if device.type == "cuda":
        free, whole = torch.cuda.mem_get_info(device)
        return Room(whole, free, torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    return Room(Cpu().mem_get_info()[1], free_host_bytes(), limit=None if limit == resource.RLIM_INFINITY else limit)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that a device or the host has no memory left."""
    refused = isinstance(error, OSError) and error.errno == errno.ENOMEM  # by the system, for pages of the host
    return refused or isinstance(error, torch.OutOfMemoryError | MemoryError) or "DefaultCPUAllocator: " in str(error)


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


class GpuFacts(NamedTuple):
    """A GPU that torch can use. `peers` are those whose memory it reaches without the host."""

    name: str
    total_bytes: int
    free_bytes: int
    peers: tuple[int, ...]


def gpu_facts() -> list[GpuFacts]:
    """Every GPU that this process sees; asking starts each of them."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    found = []
    for index in range(count):
        free, total = torch.cuda.mem_get_info(index)
        peers = (other for other in range(count) if other != index and torch.cuda.can_device_access_peer(index, other))
        found.append(GpuFacts(torch.cuda.get_device_name(index), total, free, tuple(peers)))
    return found


def nccl_version() -> str | None:
    """None: this torch was built without it."""
    if torch.version.cuda is None:
        return None
    return ".".join(str(part) for part in torch.cuda.nccl.version())  # type: ignore[no-untyped-call]


class Pool:
    """Memory of a device for what comes and goes in a few sizes, apart from what has any size: neither leaves gaps that only the
    other could fill. Without one, and where there is no such allocator, they share."""

    def __init__(self, device: torch.device, *, private: bool) -> None:
        self.device = device
        self.own = torch.cuda.MemPool(use_on_oom=True) if private and device.type == "cuda" else None

    def open(self) -> AbstractContextManager[None]:
        """Allocations of this thread come from it meanwhile."""
        return nullcontext() if self.own is None else torch.cuda.use_mem_pool(self.own, self.device)


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
