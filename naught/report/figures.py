"""Figures: the few numbers that say how a run went, from its records. Pure; says nothing of how they are shown."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from naught.report.records import Table
from naught.report.run_data import Run
from naught.report.series import mean

__all__ = ["REST", "Figures", "Point", "figures_of", "phases_of", "settled"]

REST = "rest"  # what is left of a step beside its phases


@dataclass(frozen=True)
class Point:
    """A loss in nats, and in bits per byte where the bytes of a token are known."""

    step: int
    loss: float
    bits: float


@dataclass(frozen=True)
class Figures:
    """None: nobody knows. Rates, shares and times are means over the settled steps."""

    loss: Point | None
    validation: Point | None
    tokens_s: float | None
    step_s: float | None
    peak_bytes: float | None
    waited_share: float | None
    sent_bytes: float | None
    mfu: float | None

    def plan_error(self, plan_bytes: float) -> float | None:
        """By how much the plan is above what was measured, as a share of that."""
        return plan_bytes / self.peak_bytes - 1 if self.peak_bytes else None


def figures_of(run: Run) -> Figures:
    steps, warm = run.metrics.steps, settled(run.metrics.steps)
    seconds = _total(warm.column("seconds"))
    waited = math.fsum(_total(column) for column in warm.under("waited").values())
    sent = [mean(column) or 0.0 for column in warm.under("sent").values()]
    tokens = _total([rate * took for rate, took in zip(warm.column("tokens_s"), warm.column("seconds"), strict=True)])
    return Figures(
        loss=_last(steps),
        validation=_last(run.metrics.evals),
        tokens_s=tokens / seconds if tokens and seconds else None,
        step_s=mean(warm.column("seconds")),
        peak_bytes=run.course.peak_bytes or _highest(steps),
        waited_share=waited / seconds if seconds and warm.under("waited") else None,
        sent_bytes=math.fsum(sent) if sent else None,
        mfu=mean(warm.column("mfu")),
    )


def settled(table: Table) -> Table:
    """All rows but the first, which is slower than others; that one too where there is no other."""
    if len(table.steps) < 2:
        return table
    return Table(table.steps[1:], {path: column[1:] for path, column in table.columns.items()})


def _total(column: Sequence[float]) -> float:
    return math.fsum(value for value in column if math.isfinite(value))


def _last(table: Table) -> Point | None:
    if not table.steps:
        return None
    return Point(table.steps[-1], table.column("loss")[-1], table.column("bpb")[-1])


def _highest(steps: Table) -> float | None:
    """The highest peak of any step; where nobody saw peaks, the most that was allocated at any position."""
    seen = [value for value in steps.column("memory", "peak") if math.isfinite(value)]
    seen = seen or [value for column in steps.under("memory", "allocated").values() for value in column if math.isfinite(value)]
    return max(seen, default=None)


def phases_of(steps: Table) -> dict[str, float]:
    """Mean seconds of a settled step by phase, and what is left of it."""
    warm = settled(steps)
    phases = {name: mean(column) or 0.0 for name, column in warm.under("phases").items()}
    whole = mean(warm.column("seconds"))
    if whole is not None and phases:
        phases[REST] = max(0.0, whole - math.fsum(phases.values()))
    return phases
