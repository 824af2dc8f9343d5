"""Observing: what a run says of itself while it trains. Scalars for the monitor, lines for the log, one count of operations.

The engine says what happens; nothing here changes a result, and nothing waits for the device unless it was asked for.
"""

from __future__ import annotations

import logging
import time
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

from naught.comm.summary import listen
from naught.config import Config
from naught.flops import Profiler
from naught.monitors import Event, Monitor
from naught.step_log import StepFacts, StepLog
from naught.watch import Watch

__all__ = ["Observer", "StepFacts", "Throughput", "be_heard"]

_LOG = logging.getLogger("naught")


class Throughput:
    """Samples a second, from the end of the first step to that of the last."""

    def __init__(self) -> None:
        self.first: tuple[float, int] | None = None  # None: before the first step
        self.last = (0.0, 0)

    def note(self, samples: int) -> None:
        self.last = (time.perf_counter(), samples)
        self.first = self.first or self.last

    def avg_samples_per_sec(self) -> float:
        """Zero before the second step."""
        if self.first is None or self.first == self.last:
            return 0.0
        return (self.last[1] - self.first[1]) / (self.last[0] - self.first[0])


class Observer:
    """Hears of every forward, loss and step of an engine, and writes what the configuration asks for. Rank 0 speaks for all."""

    def __init__(self, config: Config, watch: Watch, rank: int) -> None:
        self.config, self.watch = config, watch
        self.monitor = Monitor(config, rank)
        self.log = StepLog(config, watch) if rank == 0 else None
        self.throughput = Throughput()
        self.losses: list[Tensor] = []  # of the step under way, on the device
        self.profiler = Profiler(config.flops_profiler, watch.device) if config.flops_profiler.enabled and rank == 0 else None
        if rank == 0 and _asks_for_lines(config):
            be_heard()
        comms = config.comms_logger
        if comms.enabled and rank == 0:
            listen(watch.ledger, ops=None if comms.prof_all else comms.prof_ops, verbose=comms.verbose, debug=comms.debug)

    def forward(self, module: nn.Module, step: int) -> AbstractContextManager[None]:
        """Open this around every forward; it does something around two of them."""
        return nullcontext() if self.profiler is None else self.profiler.forward(module, step)

    def lost(self, loss: Tensor) -> None:
        """The loss of a micro-batch, as its user knows it: not scaled, not divided."""
        if self.monitor.enabled:
            # A copy, for the user may go on computing with the loss in place.
            self.losses.append(loss.detach().to(torch.float32, copy=True).reshape(()))

    def stepped(self, facts: StepFacts) -> None:
        """A step is over, taken or skipped."""
        self.throughput.note(facts.samples)
        if self.monitor.enabled:
            self.write(self._events(facts))
            self.losses.clear()
        if self.log is not None:
            self.log.stepped(facts)

    def forget(self) -> None:
        """The step under way is given up."""
        self.losses.clear()

    def write(self, events: list[Event]) -> None:
        """Only this rank writes, and the others go on: a disk that is full must not part them. It is said, once."""
        try:
            self.monitor.write_events(events)
        except Exception:
            _LOG.exception("the monitor failed and is switched off; training goes on")
            self.monitor.sinks.clear()

    def _events(self, facts: StepFacts) -> list[Event]:
        values = {"lr": facts.rates[0]} if facts.rates else {}
        if self.losses:
            # One wait for the device is enough for all.
            losses = torch.stack(self.losses).tolist()
            values["train_loss"] = sum(losses) / len(losses)
        if self.config.fp16.enabled:
            values["loss_scale"] = facts.scale
        if facts.norm is not None:
            values["grad_norm"] = facts.norm
        return [(f"Train/Samples/{name}", value, facts.samples) for name, value in values.items()]

    def close(self) -> None:
        self.monitor.close()


def _asks_for_lines(config: Config) -> bool:
    asked = (config.steps_per_print, config.wall_clock_breakdown, config.memory_breakdown, config.comms_logger.enabled)
    return any(asked) or config.flops_profiler.enabled


def be_heard(level: int = logging.INFO) -> None:
    """Somebody has asked for lines: let them be seen also where nobody has set logging up."""
    if not _LOG.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("naught: %(message)s"))
        _LOG.addHandler(handler)
        _LOG.setLevel(level)
