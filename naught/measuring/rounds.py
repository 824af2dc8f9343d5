"""Rounds: how long one round of some work takes on a device, and in which precision such work is done there."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from naught.accelerator import get_accelerator
from naught.devices import mark
from naught.machine import recognise

__all__ = ["CPU", "all_cores", "median_round_s", "present_device", "usual_dtype"]

CPU = torch.device("cpu")
_FEWEST, _MOST = 3, 1000


def median_round_s(work: Callable[[], object], device: torch.device, *, budget_s: float) -> float:
    """The median of as many rounds as the budget allows, at least three, after one that is not counted."""
    work()
    mark(device).until(mark(device))  # what the first round has set going must not count for the next
    rounds: list[float] = []
    deadline = time.perf_counter() + budget_s
    while len(rounds) < _FEWEST or (time.perf_counter() < deadline and len(rounds) < _MOST):
        start = mark(device)
        work()
        rounds.append(start.until(mark(device)))
    return statistics.median(rounds)


def present_device() -> torch.device:
    """Where this process would train."""
    return torch.device(get_accelerator().current_device_name())


def usual_dtype(device: torch.device) -> torch.dtype:
    """What the planner takes for granted: 16 bits on a GPU, bfloat16 if it has that, and 32 on a CPU."""
    if device.type != "cuda":
        return torch.float32
    return torch.bfloat16 if recognise(get_accelerator().get_device_name(device)).has_bf16 else torch.float16


@contextmanager
def all_cores() -> Iterator[int]:
    """As many threads as this process may have cores."""
    before, cores = torch.get_num_threads(), len(os.sched_getaffinity(0))
    torch.set_num_threads(cores)
    try:
        yield cores
    finally:
        torch.set_num_threads(before)
