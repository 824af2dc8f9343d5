"""Bars: lengths side by side, drawn by the style sheet alone. Knows neither runs nor scripts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from naught.report.charts import legend
from naught.report.html import Html, element, joined

__all__ = ["Pair", "Scale", "Stack", "pairs", "stacks"]


@dataclass(frozen=True)
class Scale:
    """How a length is written, what the values behind the bars are called, and what a mark is."""

    show: Callable[[float], str]
    heads: tuple[str, ...]
    mark: str = ""


@dataclass(frozen=True)
class Stack:
    """Parts behind one another. `mark` is a length of its own, such as a peak; `aside` is a word on the row, `absent` says
    why there is none. Rows of one `group` stand under its name."""

    name: str
    parts: Mapping[str, float]
    values: tuple[str, ...] = ()
    mark: float | None = None
    aside: str = ""
    absent: str = ""
    group: str = ""


def stacks(rows: Sequence[Stack], colors: Mapping[str, str], scale: Scale) -> Html:
    """All rows on one scale, under a legend in the order of the colours."""
    longest = max((length for row in rows for length in (sum(row.parts.values()), row.mark or 0)), default=0)
    there = {name for row in rows for name, length in row.parts.items() if length}
    names = [name for name in colors if name in there] + sorted(there - set(colors))
    entries = [(name, colors.get(name, "other"), "area") for name in names] + (
        [(scale.mark, "ink", "mark")] if scale.mark else []
    )
    cells = [[_stack(row, colors, scale, longest=longest), *row.values] if not row.absent else row.absent for row in rows]
    return joined([legend(entries) if len(entries) > 1 else None, _grid([(row.group, row.name) for row in rows], cells, scale)])


def _stack(row: Stack, colors: Mapping[str, str], scale: Scale, *, longest: float) -> Html:
    parts = [
        element(
            "i",
            class_=f"c-{colors.get(name, 'other')}",
            style=f"width:{_percent(length, longest)}",
            title=f"{name}: {scale.show(length)}",
        )
        for name, length in row.parts.items()
        if length
    ]
    label = ", ".join(f"{name} {scale.show(length)}" for name, length in row.parts.items() if length)
    mark = (
        element("b", style=f"width:{_percent(row.mark, longest)}", title=f"{scale.mark}: {scale.show(row.mark)}")
        if row.mark
        else None
    )
    bar = element("div", mark, *parts, class_="bar", role="img", aria_label=label or "nothing")
    return joined([bar, element("small", row.aside) if row.aside else None])


@dataclass(frozen=True)
class Pair:
    """What was planned and what was measured. None: nobody knows."""

    name: str
    planned: float | None
    measured: float | None
    values: tuple[str, ...]
    color: str = "blue"
    group: str = ""


def pairs(rows: Sequence[Pair], scale: Scale) -> Html:
    """The plan above, what was measured below, all rows on one scale."""
    longest = max((length or 0 for row in rows for length in (row.planned, row.measured)), default=0)
    key = legend(
        [("plan", "ink", "plan"), ("measured", rows[0].color if len({row.color for row in rows}) == 1 else "grey", "area")]
    )
    cells = [[_pair(row, scale, longest), *row.values] for row in rows]
    return joined([key, _grid([(row.group, row.name) for row in rows], cells, scale)])


def _pair(row: Pair, scale: Scale, longest: float) -> Html:
    bars = [
        element("div", element("i", class_=look, style=f"width:{_percent(length, longest)}"), class_="bar thin", title=title)
        for length, look, title in (
            (row.planned, "plan", f"{row.name}, plan: {scale.show(row.planned or 0)}"),
            (row.measured, f"c-{row.color}", f"{row.name}, measured: {scale.show(row.measured or 0)}"),
        )
        if length is not None
    ]
    return joined(bars)


def _grid(names: Sequence[tuple[str, str]], rows: Sequence[Sequence[Html | str] | str], scale: Scale) -> Html:
    """Names, bars, values. A row that is one text has no bar: the text says why."""
    cells = [element("div", text, class_="head") for text in ("", "", *scale.heads)] if any(scale.heads) else []
    last = ""
    for (group, name), row in zip(names, rows, strict=True):
        if group != last:
            cells.append(element("div", group, class_="group"))
            last = group
        if isinstance(row, str):
            reason = element("div", row, class_="absent")
            cells += [element("div", name, class_="name faint"), reason]
        else:
            cells += [element("div", name, class_="name"), element("div", row[0], class_="track")]
            cells += [element("div", value, class_="value") for value in row[1:]]
    return element("div", *cells, class_="bars", style=f"--values:{len(scale.heads)}")


def _percent(length: float, longest: float) -> str:
    return f"{100 * length / longest if longest else 0:.3f}%"
