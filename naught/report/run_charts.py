"""Run charts: which lines of one run, or of two, make a chart. Says what is drawn; `charts` says how."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from naught.quantity import show_bytes, show_seconds
from naught.report.charts import Chart, Level, Line, Mark, Trace
from naught.report.memory import OTHER, POSITIONS, by_position
from naught.report.records import Table
from naught.report.run_data import Run

__all__ = ["MEMORY_COLORS", "PHASE_COLORS", "RUN_COLORS", "loss_chart", "memory_charts", "simple_chart"]

RUN_COLORS = ("blue", "vermilion")

# A hue for each kind of state: weights are blue, gradients orange, the optimizer's states green.
MEMORY_COLORS: Mapping[str, str] = {
    "weights": "blue",
    "gathered weights": "sky",
    "states": "green",
    "owned gradients": "vermilion",
    "whole gradients": "orange",
    "gradient flats": "brown",
    "reduce scratch": "purple",
    OTHER: "grey",
}
PHASE_COLORS: Mapping[str, str] = {
    "data": "purple",
    "forward": "sky",
    "backward": "blue",
    "step": "green",
    "rest": "grey",
}


def loss_chart(runs: Sequence[Run]) -> Chart:
    """Training as lines, validation as points; in bits per byte where all of them are known."""
    tables = [table for run in runs for table in (run.metrics.steps, run.metrics.evals) if table.steps]
    bits = all(table.has("bpb") for table in tables)
    unit, key = ("bits", "bpb") if bits else ("nats", "loss")
    yardsticks = {name: value for run in runs for name, value in run.data.yardsticks.items()} if bits else {}
    traces: list[Trace] = []
    for run, look, color in zip(runs, _looks(runs, overlaid=True), RUN_COLORS, strict=False):
        prefix = f"{run.title} " if len(runs) > 1 else ""
        training = _losses(run.metrics.steps, f"{prefix}training", color=color, look=look, key=key)
        color = color if len(runs) > 1 else "vermilion"
        validation = _losses(run.metrics.evals, f"{prefix}validation", color=color, look="points", key=key)
        traces += [trace for trace in (training, validation) if trace.steps]
    return Chart(
        name="loss",
        title="Loss",
        unit=unit,
        traces=traces,
        levels=[Level(name, value) for name, value in yardsticks.items()],
        marks=_marks(runs[0]) if len(runs) == 1 else (),
        note=" ".join(filter(None, (_not_finite(run, alone=len(runs) == 1) for run in runs))),
    )


def _looks(runs: Sequence[Run], *, overlaid: bool) -> tuple[str, str]:
    """Lines that may lie on one another are told apart by more than their colour."""
    return ("wide", "dashed") if overlaid and len(runs) > 1 else ("line", "line")


def _losses(table: Table, name: str, *, color: str, look: str, key: str) -> Trace:
    lines = [Line(name, color, table.column(key), look)]
    also = [] if key == "loss" else [Line(name, color, table.column("loss"), "none", "nats")]
    return Trace(table.steps, lines + also)


def _marks(run: Run) -> list[Mark]:
    saves = [
        Mark("save", save.step, " ".join(["saved", save.tag, *_facts(save.nbytes, save.seconds)])) for save in run.metrics.saves
    ]
    resumes = [
        Mark("resume", resume.step, f"resumed from {resume.tag}" + (f" on {resume.world} ranks" if resume.world else ""))
        for resume in run.metrics.resumes
    ]
    return saves + resumes


def _facts(nbytes: float | None, seconds: float | None) -> list[str]:
    facts = ([show_bytes(nbytes)] if nbytes is not None else []) + (
        [f"in {show_seconds(seconds)}"] if seconds is not None else []
    )
    return [f"({' '.join(facts)})"] if facts else []


def _not_finite(run: Run, *, alone: bool) -> str:
    table = run.metrics.steps
    found = [step for step, loss in zip(table.steps, table.column("loss"), strict=True) if not math.isfinite(loss)]
    if not found:
        return ""
    where = f"at step {found[0]:,}" if len(found) == 1 else f"at {len(found):,} steps, the first of them {found[0]:,}"
    return f"The loss {'' if alone else f'of {run.title} '}is not finite {where}: the line has gaps there."


def simple_chart(runs: Sequence[Run], key: str, *, title: str, unit: str = "number") -> Chart | None:
    """One quantity over the steps of each run, or None where no run has it."""
    if not any(run.metrics.steps.has(key) for run in runs):
        return None
    alone = len(runs) == 1
    looks = _looks(runs, overlaid=unit == "number")
    traces = [
        Trace(run.metrics.steps.steps, [Line(title if alone else run.title, color, run.metrics.steps.column(key), look)])
        for run, look, color in zip(runs, looks, RUN_COLORS, strict=False)
    ]
    return Chart(name=key, title=title, unit=unit, traces=traces)


def memory_charts(run: Run) -> list[Chart]:
    """What is held after each phase, stacked; the three share their height, and the plan's total is a line in each."""
    steps = run.metrics.steps
    held = {position: columns for position in POSITIONS if (columns := by_position(steps, position))}
    names = {name for columns in held.values() for name in columns} - {OTHER}
    order = [*(name for name in MEMORY_COLORS if name in names), *sorted(names - set(MEMORY_COLORS))]
    peaks = [Line("peak within the step", "ink", steps.column("memory", "peak"))] if steps.has("memory", "peak") else []
    plan = [Level("plan", run.plan.total)] if run.plan else []
    heights = [_height(columns.values()) for columns in held.values()]
    top = max([*heights, *(level.value for level in plan), *(_height([line.values]) for line in peaks)], default=0.0)
    charts = []
    for position, columns in held.items():
        areas = [
            Line(name, MEMORY_COLORS.get(name, "other"), columns[name], "area") for name in (*order, OTHER) if name in columns
        ]
        trace = Trace(steps.steps, [*areas, *peaks])
        charts.append(Chart(f"memory-{position}", f"After {position}", "bytes", [trace], levels=plan, top=top or None))
    return charts


def _height(columns: Iterable[Sequence[float]]) -> float:
    sums = (sum(value for value in row if math.isfinite(value)) for row in zip(*columns, strict=True))
    return max(sums, default=0.0)
