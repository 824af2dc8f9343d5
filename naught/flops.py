"""Flops: counts what one forward computes: products of matrices, convolutions and attention, as torch counts them.

Counting is a dispatch mode around the forward, which changes no result.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Literal

import torch
from torch import nn

from naught.config.observation import FlopsProfiler
from naught.costs import costs_of, listing
from naught.devices import mark
from naught.flop_counts import counting, totals_of
from naught.quantity import show_count, show_seconds

__all__ = ["Profiler"]

_LOG = logging.getLogger("naught")


class Profiler:
    """Counts one forward and times the next, for counting slows a forward down. Its listing goes where the settings say."""

    def __init__(self, settings: FlopsProfiler, device: torch.device) -> None:
        self.settings, self.device = settings, device
        self.flops: int | None = None  # of the forward that was counted; None: none was yet
        self.over = False

    def forward(self, module: nn.Module, step: int) -> AbstractContextManager[None]:
        """Open this around a forward of a step. The first one of `profile_step` that trains is counted."""
        if self.over or not torch.is_grad_enabled():
            return nullcontext()
        if self.flops is not None:
            return self._timed(self.flops)
        return self._counted(module) if step == self.settings.profile_step else nullcontext()

    @contextmanager
    def _counted(self, module: nn.Module) -> Iterator[None]:
        with counting() as counter:
            yield
        totals = totals_of(counter)
        self.flops = totals.get("Global", 0)
        self._say(listing(costs_of(module, totals), self.settings, flops=self.flops), "w")

    @contextmanager
    def _timed(self, flops: int) -> Iterator[None]:
        began = mark(self.device)
        yield
        seconds = began.until(mark(self.device))
        self.over = True
        self._say(f"the next forward, which was not counted: {show_seconds(seconds)}, {show_count(flops / seconds)} FLOP/s", "a")

    def _say(self, text: str, mode: Literal["w", "a"]) -> None:
        if self.settings.output_file is None:
            _LOG.info("%s", text)
            return
        path = Path(self.settings.output_file)
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open(mode, encoding="utf-8") as file:
            file.write(text + "\n")
