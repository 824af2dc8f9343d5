"""Charts: what a chart over steps is made of, as data for the script that draws it and as the figure around it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from naught.report.html import Html, element, joined
from naught.report.series import MOST_POINTS, picked, thin

__all__ = ["Chart", "Drawn", "Level", "Line", "Mark", "Trace", "draw", "key_of", "legend"]


@dataclass(frozen=True)
class Line:
    """One quantity. `look` is line, wide, broad, dashed, points, area (stacked on those before it), or none: seen at the
    cursor only."""

    name: str
    color: str
    values: Sequence[float]
    look: str = "line"
    unit: str | None = None  # None: that of its chart


@dataclass(frozen=True)
class Trace:
    """Lines that share their steps."""

    steps: Sequence[int]
    lines: Sequence[Line]


@dataclass(frozen=True)
class Level:
    """A horizontal line, to read the others by."""

    name: str
    value: float


@dataclass(frozen=True)
class Mark:
    """Something that happened at a step: a save, or a resume."""

    kind: str
    step: int
    text: str


@dataclass(frozen=True)
class Chart:
    """`unit` is bits, nats, bytes, rate or number; `top` is a height that charts beside each other share."""

    name: str
    title: str
    unit: str
    traces: Sequence[Trace]
    levels: Sequence[Level] = ()
    marks: Sequence[Mark] = ()
    note: str = ""
    top: float | None = None


_UNITS = {"bits": "bits per byte", "nats": "nats", "rate": "tokens/s"}  # bytes have theirs at each tick
_MARKS = {"save": "checkpoint saved", "resume": "resumed"}


@dataclass(frozen=True)
class Drawn:
    """A figure, and what the script needs to fill it."""

    figure: Html
    data: dict[str, object]


def draw(chart: Chart, *, size: str = "wide", group: str | None = None, key: bool = True) -> Drawn:
    """Charts of one `group` move their cursors together; without a `key` the legend stands elsewhere."""
    thinned = [_thin(trace) for trace in chart.traces]
    notes = [chart.note, *(_say_thinned(trace, rows) for trace, rows in zip(chart.traces, thinned, strict=True))]
    shown = list(dict.fromkeys(note for note in notes if note))
    data: dict[str, object] = {
        "title": chart.title,
        "unit": chart.unit,
        "group": group,
        "top": chart.top,
        "traces": [_trace(trace, rows) for trace, rows in zip(chart.traces, thinned, strict=True)],
        "levels": [{"name": level.name, "value": level.value} for level in chart.levels],
        "marks": [{"kind": mark.kind, "step": mark.step, "text": mark.text} for mark in chart.marks],
    }
    caption = element(
        "figcaption", element("h3", chart.title, element("small", _UNITS.get(chart.unit))), key_of(chart) if key else None
    )
    plot = element("div", class_="plot", data_chart=chart.name, role="img", aria_label=f"{chart.title} by step")
    note = element("p", " ".join(shown), class_="note") if shown else None
    return Drawn(element("figure", caption, plot, note, class_=size), {chart.name: data})


def _thin(trace: Trace) -> list[int] | None:
    seen = [line for line in trace.lines if line.look != "none"]
    stacked = any(line.look == "area" for line in seen)
    return thin([line.values for line in seen], MOST_POINTS // 4 if stacked else MOST_POINTS)


def _say_thinned(trace: Trace, rows: list[int] | None) -> str:
    if rows is None:
        return ""
    return f"{len(rows):,} of {len(trace.steps):,} steps are drawn: the lowest and the highest of each stretch."


def _trace(trace: Trace, rows: list[int] | None) -> dict[str, object]:
    steps = list(trace.steps) if rows is None else [trace.steps[row] for row in rows]
    lines = [
        {"name": line.name, "color": line.color, "look": line.look, "unit": line.unit, "values": picked(line.values, rows)}
        for line in trace.lines
    ]
    return {"steps": steps, "lines": lines}


def key_of(chart: Chart) -> Html:
    """The legend of a chart; one of a single entry would say what its title says."""
    lines = [line for trace in chart.traces for line in trace.lines if line.look != "none"]
    marks = [(_MARKS[kind], "ink", kind) for kind in _MARKS if any(mark.kind == kind for mark in chart.marks)]
    levels = [(level.name, "ink", "level") for level in chart.levels[:1]] if len(chart.levels) == 1 else []
    entries = [(line.name, line.color, line.look) for line in lines] + levels + marks
    return legend(entries) if len(entries) > 1 else Html("")


def legend(entries: Sequence[tuple[str, str, str]]) -> Html:
    """Names with their colour and the look of it."""
    return element("div", joined(_entry(*entry) for entry in entries), class_="legend")


def _entry(name: str, color: str, look: str) -> Html:
    return element("span", element("i", class_=f"swatch {look} c-{color}"), name)
