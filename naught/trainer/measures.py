"""Measures: what one step took and held, from what the engine has counted so far and had counted a step before."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

from naught.engine import Engine
from naught.trainer.forecasting import Expected

__all__ = ["PEAK_FLOPS", "Measures", "peak_flops"]

# Of dense 16-bit products without sparsity, by data sheet: what MFU is a share of.
PEAK_FLOPS = {
    "b200": 2250e12,
    "h200": 989e12,
    "gh200": 989e12,
    "h100": 989e12,
    "a100": 312e12,
    "v100": 125e12,
    "l40s": 362e12,
    "l4": 121e12,
    "a10": 125e12,
    "t4": 65e12,
    "4090": 165e12,
    "3090": 71e12,
}


def peak_flops(device: str) -> float | None:
    """What a device could compute by its name; None: it is not known, or no GPU."""
    words = device.lower().replace("-", " ").split()
    return next((flops for name, flops in PEAK_FLOPS.items() if name in words), None)


class _Counts(NamedTuple):
    """What had been counted when a step ended."""

    time_s: float
    seconds: Mapping[str, float]
    waited: Mapping[str, float]
    sent: Mapping[str, int]


class Measures:
    """Turns an engine's running counts into records of single steps."""

    def __init__(self, engine: Engine, expected: Expected, *, tokens: int, peak: float | None, bytes_per_token: float) -> None:
        self.engine, self.expected = engine, expected
        self.tokens, self.peak, self.bytes_per_token = tokens, peak, bytes_per_token
        self.data_s = 0.0  # that this step has waited for its samples
        self.most_bytes = 0  # that training has held so far
        self.before = self._counts()

    def begin(self) -> None:
        """A step begins here: what lies between two of them is not its own."""
        self.before, self.data_s = self._counts(), 0.0

    def bits(self, loss: float) -> float | None:
        """A loss in nats a token as bits a byte; None where nobody knows how many bytes a token has."""
        return loss / math.log(2) / self.bytes_per_token if self.bytes_per_token else None

    def step(self, loss: float) -> dict[str, Any]:
        """The record of the step that is over."""
        engine, before, after = self.engine, self.before, self._counts()
        seconds = after.time_s - before.time_s
        flops = self.expected.flops
        return {
            "loss": loss,
            "bpb": self.bits(loss),
            "grad_norm": engine.get_global_grad_norm(),
            "lr": engine.get_lr()[0],
            "loss_scale": engine.loss_scale(),
            "skipped": engine.skipped_steps,
            "samples": engine.global_samples,
            "tokens": engine.global_steps * self.tokens,
            "seconds": seconds,
            "tokens_s": self.tokens / seconds,
            "mfu": flops / seconds / self.peak if flops and self.peak else None,
            "phases": {"data": self.data_s, **_since(after.seconds, before.seconds)},
            "waited": _since(after.waited, before.waited),
            "sent": _since(after.sent, before.sent),
            "memory": self._memory(),
        }

    def _counts(self) -> _Counts:
        report = self.engine.report()
        waited: Counter[str] = Counter()
        alone = self.engine.world_size == 1
        for key, seconds in ({} if alone else report["waited"]).items():
            waited[key.partition(" ")[0]] += seconds
        sent: Counter[str] = Counter()
        for (collective, _, _), nbytes in self.engine.watch.ledger.sent.items():
            sent[collective] += nbytes
        return _Counts(time.perf_counter(), report["seconds"], waited, sent)

    def _memory(self) -> dict[str, Any]:
        report = self.engine.report()
        after = {phase: dict(held) for phase, held in report["after"].items()}
        base = report["base"] or 0
        allocated = {phase: held.pop("allocated") - base for phase, held in after.items() if "allocated" in held}
        self.most_bytes = (report["most"] or base) - base
        return {"after": after, "allocated": allocated or None, "peak": self.most_bytes or None}


def _since(now: Mapping[str, Any], before: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value - before.get(name, 0) for name, value in now.items() if value != before.get(name, 0)}
