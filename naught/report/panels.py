"""Panels: bars and tables that set a run beside its plan, or two runs beside each other. They need no script."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from naught.quantity import show_bytes, show_seconds
from naught.report import words
from naught.report.bars import Pair, Scale, Stack, pairs, stacks
from naught.report.figures import figures_of, phases_of, settled
from naught.report.html import Html, joined, table
from naught.report.memory import OTHER, POSITIONS, Compared, by_position, compared_with_plan
from naught.report.page import panel
from naught.report.run_charts import MEMORY_COLORS, PHASE_COLORS, RUN_COLORS
from naught.report.run_data import Run
from naught.report.series import mean

__all__ = ["memory_panel", "phase_panel", "plan_panel", "traffic_panel"]

_SEEN = (
    "Measured is the most that was held after a forward, a backward or a step; the last row is the peak. Gathered weights and "
    "buffers also come and go in between, where only the peak sees them: there was at least as much."
)
_PLAN_COLORS = {"parameters": "blue", "gradients": "vermilion", "optimizer states": "green", OTHER: "grey", "total": "ink"}


def plan_panel(run: Run) -> Html | None:
    """Each category of the plan beside what was measured of it, and the total beside the peak."""
    if run.plan is None:
        return None
    peak = figures_of(run).peak_bytes
    rows = [*compared_with_plan(run), Compared("total", run.plan.total, peak, passing=False)]
    lines = [Pair(row.name, row.plan, row.measured, _values(row), color=_PLAN_COLORS.get(row.name, "sky")) for row in rows]
    return panel("Plan and measured", pairs(lines, Scale(show_bytes, ("plan", "measured", "plan off by"))), note=_SEEN)


def _values(row: Compared) -> tuple[str, str, str]:
    if not row.passing:
        return _beside(row.plan, row.measured)
    return show_bytes(row.plan), f"at least {show_bytes(row.measured)}" if row.measured else "-", "-"


def _beside(plan: float | None, measured: float | None) -> tuple[str, str, str]:
    error = plan / measured - 1 if plan is not None and measured else None
    return words.optional_bytes(plan), words.optional_bytes(measured), words.signed_percent(error)


def memory_panel(runs: Sequence[Run]) -> Html | None:
    """What each run held after each phase of its last step, on one scale."""
    rows = []
    for position in POSITIONS:
        for run in runs:
            held = {name: values[-1] for name, values in by_position(run.metrics.steps, position).items()}
            held = {name: held[name] for name in (*MEMORY_COLORS, *held) if math.isfinite(held.get(name, math.nan))}
            if held:
                rows.append(Stack(run.title, held, (show_bytes(sum(held.values())),), group=f"after {position}"))
    if not rows:
        return None
    return panel("Held after each phase of the last step", stacks(rows, MEMORY_COLORS, Scale(show_bytes, ("held",))))


def phase_panel(runs: Sequence[Run]) -> Html | None:
    """Where the time of a step goes."""
    phases = {run.title: found for run in runs if (found := phases_of(run.metrics.steps))}
    if not phases:
        return None
    alone = len(runs) == 1
    rows = [Stack("mean" if alone else title, parts, (show_seconds(sum(parts.values())),)) for title, parts in phases.items()]
    bars = stacks(rows, PHASE_COLORS, Scale(show_seconds, ("",)))
    names = dict.fromkeys(name for parts in phases.values() for name in parts)
    cells = [(name, *(cell for parts in phases.values() for cell in _share(parts, name))) for name in names]
    heads = [head for title in phases for head in ("mean" if alone else title, "share")]
    note = "Means over all logged steps but the first, which is slower than others."
    return panel(
        "Phases of a step", joined([bars, table(("phase", *heads), cells, class_="numbers")]), size=_size(runs), note=note
    )


def _size(runs: Sequence[Run]) -> str:
    return "half" if len(runs) == 1 else "wide"


def _share(parts: Mapping[str, float], name: str) -> tuple[str, str]:
    whole = sum(parts.values())
    return words.seconds(parts.get(name)), words.percent(parts[name] / whole if name in parts and whole else None)


def traffic_panel(runs: Sequence[Run]) -> Html | None:
    """What each collective sends in a step, beside the plan, and how long it is waited for."""
    known = [
        name for run in runs for table in (run.metrics.steps.under("sent"), run.metrics.steps.under("waited")) for name in table
    ]
    planned = [name for run in runs if run.plan for name in run.plan.sent]
    rows = [
        row
        for name in dict.fromkeys([*planned, *known])
        for run, color in zip(runs, RUN_COLORS, strict=False)
        if (row := _traffic(run, name, color=color, alone=len(runs) == 1))
    ]
    if not rows:
        return None
    scale = Scale(show_bytes, ("plan", "sent", "plan off by", "waited", "of a step"))
    note = "Bytes that one rank sends, and how long it waits for each collective."
    return panel("Communication of a step", pairs(rows, scale), size=_size(runs), note=note)


def _traffic(run: Run, name: str, *, color: str, alone: bool) -> Pair | None:
    warm = settled(run.metrics.steps)
    plan = run.plan.sent.get(name) if run.plan else None
    sent, waited = mean(warm.column("sent", name)), mean(warm.column("waited", name))
    step_s = mean(warm.column("seconds"))
    if not (plan or sent or waited):
        return None
    share = words.percent(waited / step_s if waited is not None and step_s else None)
    values = (*_beside(plan, sent), words.seconds(waited), share)
    return Pair(name if alone else run.title, plan, sent, values, color=color, group="" if alone else name)
