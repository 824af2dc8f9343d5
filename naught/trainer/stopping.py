"""Stopping: a signal that asks a run to end is remembered, and heeded between two steps, when all ranks know of it."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

__all__ = ["Stop", "listening"]

_SIGNALS = (
    signal.SIGTERM,
    signal.SIGINT,
    signal.SIGHUP,
    signal.SIGUSR1,
)  # Slurm can be told to send SIGUSR1 before a job's time is up
_ECHO_S = 3.0  # a key on a terminal reaches all processes, and the agent passes on what it gets: that is one signal, not two


class Stop:
    """Whether this rank was asked to stop, and by what."""

    def __init__(self) -> None:
        self.signal: int | None = None  # None: nobody has asked
        self.time_s = 0.0  # when that was

    def __call__(self, number: int, _frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.signal is not None and number == signal.SIGINT and now - self.time_s > _ECHO_S:
            raise KeyboardInterrupt  # asked a second time: at once, then
        if self.signal is None:
            self.signal, self.time_s = number, now


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
