"""Cpu: a CPU's answers to what scripts ask of an accelerator's module. Memory is that of the process."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from naught.freed_pages import give_back_freed_pages

__all__ = ["Cpu", "Event"]


class Event:
    """A point in a CPU's time, for scripts that time with a device's events. There is never anything to wait for."""

    def __init__(self, enable_timing: bool = False, **_: object) -> None:
        self.enable_timing = enable_timing
        self.seconds = 0.0

    def record(self, _stream: object = None) -> None:
        self.seconds = time.perf_counter()

    def elapsed_time(self, later: Event) -> float:
        """Milliseconds until a later event."""
        return (later.seconds - self.seconds) * 1000

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        """Nothing: what was asked of a CPU before is done."""

    def wait(self, _stream: object = None) -> None:
        """Nothing, likewise."""


class Cpu:
    """The functions of an accelerator's module, for a CPU; what is not here is torch's own.

    Indices are taken and ignored: there is one CPU.
    """

    Event = Event

    def current_device(self) -> int:
        return 0

    def is_bf16_supported(self) -> bool:
        return True

    def empty_cache(self) -> None:
        """Give the system what glibc keeps of freed memory, much where an engine is (freed_pages.keep_freed_pages)."""
        give_back_freed_pages()

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)

    def memory_allocated(self, _index: int | None = None) -> int:
        """Bytes of this process in memory: nobody counts a CPU's tensors."""
        return _status_bytes("VmRSS")

    def max_memory_allocated(self, _index: int | None = None) -> int:
        """The most bytes that this process had in memory since the last reset."""
        return _status_bytes("VmHWM")

    def reset_peak_memory_stats(self, _index: int | None = None) -> None:
        """Count the peak from here on, where the system lets it go."""
        with suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")

    memory_reserved = memory_cached = memory_allocated
    max_memory_reserved = max_memory_cached = max_memory_allocated
    reset_max_memory_allocated = reset_max_memory_cached = reset_peak_memory_stats

    def mem_get_info(self, _index: int | None = None) -> tuple[int, int]:
        """Bytes of the host that are available, and all of them."""
        page = os.sysconf("SC_PAGE_SIZE")
        free, whole = os.sysconf("SC_AVPHYS_PAGES") * page, os.sysconf("SC_PHYS_PAGES") * page
        return _kib_of(Path("/proc/meminfo"), "MemAvailable") or free, whole

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)  # copying and pickling ask for names that modules have for themselves
        return getattr(torch.cpu, name) if name in dir(torch.cpu) else getattr(torch, name)


def _status_bytes(name: str) -> int:
    return _kib_of(Path("/proc/self/status"), name)


def _kib_of(path: Path, name: str) -> int:
    """Bytes of the line "name:  123 kB" of one of Linux's files; 0 where there is none."""
    try:
        lines = path.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:")), 0)
