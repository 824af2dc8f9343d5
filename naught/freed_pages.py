"""What becomes of a CPU's freed memory: glibc keeps it, or gives it back to the system."""

from __future__ import annotations

import ctypes
import os
import platform

import torch

__all__ = ["give_back_freed_pages", "keep_freed_pages"]

# glibc's numbers for mallopt.
_TRIM_THRESHOLD, _MMAP_MAX = -1, -4


def keep_freed_pages(device: torch.device) -> None:
    """From here on let a CPU's allocator keep freed memory, as those of accelerators do: flats come and go with every
    unit, and pages that the system takes back cost a fault each when they return. What is free already goes back first.

    Whoever has set one of glibc's MALLOC_ variables is heeded.
    """
    tuned = any(name.startswith("MALLOC_") for name in os.environ)
    if device.type != "cpu" or tuned or not _has_glibc():
        return
    give_back_freed_pages()
    libc = ctypes.CDLL(None)
    libc.mallopt(_TRIM_THRESHOLD, -1)
    libc.mallopt(_MMAP_MAX, 0)


def give_back_freed_pages() -> None:
    """Nothing where the C library is another: glibc alone has a call for it."""
    if _has_glibc():
        ctypes.CDLL(None).malloc_trim(0)


def _has_glibc() -> bool:
    return platform.libc_ver()[0] == "glibc"
