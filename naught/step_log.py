"""Step log: the lines that rank 0 logs between steps. How far training is, how fast, where its time goes and its memory."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from typing import NamedTuple

from naught.config import Config
from naught.quantity import show_bytes
from naught.watch import Watch

__all__ = ["StepFacts", "StepLog"]

_LOG = logging.getLogger("naught")

_PHASES = ("forward", "backward", "step")


class StepFacts(NamedTuple):
    """A step that is over. `samples` and `skipped` count from the start of training, the samples over all ranks."""

    step: int
    samples: int
    skipped: int
    rates: list[float]
    scale: float
    norm: float | None


class _Clock(NamedTuple):
    """When training had seen so many samples."""

    time_s: float
    samples: int


class StepLog:
    """Hears of every step, and speaks every `steps_per_print` steps; breakdowns without that key come with every step."""

    def __init__(self, config: Config, watch: Watch) -> None:
        self.config, self.watch = config, watch
        asked = config.wall_clock_breakdown or config.memory_breakdown
        self.every = config.steps_per_print or (1 if asked else None)  # None: there is nothing to say
        self.said = 0  # the step of the last line
        self.steps = 0  # since then, skipped ones too
        self.seconds: dict[str, float] = {}  # of each phase, up to then
        self.clock: _Clock | None = None  # None before the end of the first step, which is slower than others

    def stepped(self, facts: StepFacts) -> None:
        if self.every is None:
            return
        self.steps += 1
        now = _Clock(time.perf_counter(), facts.samples)
        # A skipped step has the number of the one before it, of which all was said.
        speaks = facts.step % self.every == 0 and facts.step != self.said
        if speaks:
            for line in self._lines(facts, now):
                _LOG.info("%s", line)
            self.said, self.steps = facts.step, 0
        if speaks or self.clock is None:
            self.clock = now

    def _lines(self, facts: StepFacts, now: _Clock) -> Iterator[str]:
        if self.config.steps_per_print is not None:
            yield self._progress(facts, now)
        if self.config.wall_clock_breakdown:
            yield f"time of step {facts.step}: {self._times()}"
        if self.config.memory_breakdown:
            for phase, held in self.watch.held_after.items():
                parts = [f"{category} {show_bytes(nbytes)}" for category, nbytes in held.items() if nbytes]
                yield f"memory after {phase} of step {facts.step}: {', '.join(parts) or 'nothing'}"

    def _progress(self, facts: StepFacts, now: _Clock) -> str:
        rates = ", ".join(f"{rate:g}" for rate in facts.rates)
        line = f"step {facts.step}: skipped {facts.skipped}, lr {rates}, loss scale {facts.scale:g}"
        if self.clock is not None and self.config.timers.throughput.enabled:
            line += f", {(now.samples - self.clock.samples) / (now.time_s - self.clock.time_s):.4g} samples/s"
        return line

    def _times(self) -> str:
        """The mean of each phase over the steps since the last line. To read the device's times is to wait for it."""
        seconds: dict[str, float] = self.watch.report()["seconds"]
        spent = {phase: seconds.get(phase, 0.0) - self.seconds.get(phase, 0.0) for phase in _PHASES}
        self.seconds = seconds
        return ", ".join(f"{phase} {1000 * spent[phase] / self.steps:.2f} ms" for phase in _PHASES)
