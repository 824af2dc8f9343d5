"""Stopping: a signal that asks a run to end is remembered, and heeded between two steps, when all ranks know of it."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

__all__ = ["Stop", "listening"]

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)  # Slurm can be told to send SIGUSR1 before a job's time is up


class Stop:
    """Whether this rank was asked to stop, and by what."""

    def __init__(self) -> None:
        self.signal: int | None = None  # None: nobody has asked

    def __call__(self, number: int, _frame: FrameType | None) -> None:
        if self.signal is not None and number == signal.SIGINT:
            raise KeyboardInterrupt  # asked a second time: at once, then
        self.signal = number


@contextmanager
def listening() -> Iterator[Stop]:
    """While open, signals that would end this process are remembered instead."""
    stop = Stop()
    before: dict[int, Any] = {number: signal.signal(number, stop) for number in _SIGNALS}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
