"""Curves: lines and marks over two axes, plain or logarithmic, as SVG that needs no script. Knows neither runs nor papers.

Note [shares]: all that is drawn lies at a share of the inside's width and height, so that a narrow window makes a picture
narrower and leaves its letters as they are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from naught.report.charts import legend
from naught.report.html import Html, element, joined

__all__ = ["Axis", "Band", "Curve", "Curves", "Dot", "axis_over", "draw_curves"]


@dataclass(frozen=True)
class Axis:
    """What lies between its first tick and its last."""

    title: str
    ticks: Sequence[float]
    show: Callable[[float], str]
    log: bool

    def share(self, value: float) -> float:
        low, high, at = (math.log(each) if self.log else each for each in (self.ticks[0], self.ticks[-1], value))
        return (at - low) / (high - low)


def axis_over(title: str, values: Sequence[float], *, show: Callable[[float], str], log: bool) -> Axis:
    """An axis with round ticks around all values; one that is not logarithmic starts at zero."""
    return Axis(title, _log_ticks(min(values), max(values)) if log else _plain_ticks(max(values)), show, log)


_MOST_TICKS = 10
_AROUND = 1.3  # times: a mark on the edge of a logarithmic axis would have no room for its text


def _plain_ticks(most: float) -> list[float]:
    step = next(step for step in _round_numbers(most / 100) if most / step < _MOST_TICKS - 1)
    return [step * count for count in range(math.ceil(most / step) + 1)]


def _log_ticks(least: float, most: float) -> list[float]:
    """Ones, twos and fives; powers of ten alone where that would be too many."""
    for digits in ((1, 2, 5), (1,)):
        numbers = _round_numbers(least / 100, digits)
        below = sum(number <= least / _AROUND for number in numbers)
        above = sum(number < most * _AROUND for number in numbers)
        ticks = numbers[below - 1 : above + 1]
        if len(ticks) <= _MOST_TICKS:
            break
    return ticks


def _round_numbers(start: float, digits: Sequence[int] = (1, 2, 5)) -> list[float]:
    first = math.floor(math.log10(start))
    return [digit * 10.0**power for power in range(first, first + 9) for digit in digits]


@dataclass(frozen=True)
class Curve:
    """`look` is line, thin or dashed. A line and a thin one show each point, and tell it where somebody points at it."""

    name: str
    color: str
    look: str
    points: Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Dot:
    """A mark of its own: `look` is diamond, or triangle for a value that is a least one. Its text is on a side of it: left,
    right, above, below, or farther under it."""

    x: float
    y: float
    color: str
    look: str
    text: str
    side: str


@dataclass(frozen=True)
class Band:
    first: float
    last: float
    text: str


@dataclass(frozen=True)
class Curves:
    """`marks` says what a look of its dots means."""

    name: str
    title: str
    x: Axis
    y: Axis
    curves: Sequence[Curve]
    dots: Sequence[Dot]
    marks: Mapping[str, str]
    band: Band | None = None


_SHAPES = {"diamond": "M0-7 7 0 0 7-7 0Z", "triangle": "M0-7 7 6H-7Z"}


def draw_curves(curves: Curves, *, size: str = "half") -> Html:
    """A figure with its legend."""
    looks = {dot.look for dot in curves.dots}
    marks = [(name, "ink", look) for look, name in curves.marks.items() if look in looks]
    key = legend([(curve.name, curve.color, curve.look) for curve in curves.curves] + marks)
    inside = element(
        "svg",
        _band(curves),
        *_grid(curves),
        element("svg", *(_path(curves, curve) for curve in curves.curves), viewBox="0 0 100 100", preserveAspectRatio="none"),
        *(spot for curve in curves.curves for spot in _spots(curves, curve)),
        *(_dot(curves, dot) for dot in curves.dots),
        class_="inside",
    )
    label = f"{curves.title}: {curves.y.title} by {curves.x.title}"
    plot = element("div", inside, class_="curves", role="img", aria_label=label, data_curves=curves.name)
    return element("figure", element("figcaption", element("h3", curves.title)), key, plot, class_=size)


def _percent(share: float) -> str:
    return f"{100 * share:.3f}%"


def _across(curves: Curves, x: float) -> str:
    return _percent(curves.x.share(x))


def _down(curves: Curves, y: float) -> str:
    return _percent(1 - curves.y.share(y))


def _band(curves: Curves) -> Html | None:
    if curves.band is None:
        return None
    first, last = curves.x.share(curves.band.first), curves.x.share(curves.band.last)
    area = element("rect", x=_percent(first), y="0", width=_percent(last - first), height="100%", class_="band")
    return joined([area, element("text", curves.band.text, x=_percent(last), dx="-4", y="100%", dy="-6", text_anchor="end")])


def _grid(curves: Curves) -> list[Html]:
    drawn = []
    for tick in curves.y.ticks:
        at = _down(curves, tick)
        drawn.append(element("line", x1="0", x2="100%", y1=at, y2=at))
        drawn.append(element("text", curves.y.show(tick), x="-7", y=at, dy="0.35em", text_anchor="end"))
    for tick in curves.x.ticks:
        at = _across(curves, tick)
        drawn.append(element("text", curves.x.show(tick), x=at, y="100%", dy="17", text_anchor="middle"))
    beside = element("text", curves.y.title, transform="translate(-66) rotate(-90)", text_anchor="middle")
    return [
        *drawn,
        element("text", curves.x.title, x="50%", y="100%", dy="34", text_anchor="middle"),
        element("svg", beside, y="50%", class_="spot"),
    ]


def _path(curves: Curves, curve: Curve) -> Html:
    points = " ".join(f"{100 * curves.x.share(x):.3f},{100 * (1 - curves.y.share(y)):.3f}" for x, y in curve.points)
    return element("polyline", points=points, class_=f"{curve.look} c-{curve.color}", data_name=curve.name)


def _spots(curves: Curves, curve: Curve) -> list[Html]:
    if curve.look == "dashed":
        return []
    return [
        element(
            "circle",
            element("title", f"{curve.name}: {curves.y.show(y)} ({curves.y.title}) at {curves.x.show(x)} {curves.x.title}"),
            cx=_across(curves, x),
            cy=_down(curves, y),
            r="2.5" if curve.look == "line" else "1.5",
            class_=f"c-{curve.color}",
        )
        for x, y in curve.points
    ]


def _dot(curves: Curves, dot: Dot) -> Html:
    shape = element(
        "path", element("title", f"{curves.marks[dot.look]}: {dot.text}"), d=_SHAPES[dot.look], class_=f"c-{dot.color}"
    )
    return element("svg", shape, _text(curves, dot), x=_across(curves, dot.x), y=_down(curves, dot.y), class_="spot")


def _text(curves: Curves, dot: Dot) -> Html:
    """Above and below, a text leans to the left, where a line that rises is not, unless the edge is there."""
    lean = "end" if curves.x.share(dot.x) > 0.25 else "start"
    x, y, anchor = {
        "left": (-11, 4, "end"),
        "right": (11, 4, "start"),
        "above": (0, -12, lean),
        "below": (0, 20, lean),
        "under": (0, 44, lean),
    }[dot.side]
    return element("text", dot.text, x=str(x), y=str(y), text_anchor=anchor)
