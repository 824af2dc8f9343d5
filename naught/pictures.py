"""Pictures: lines over numbers of devices, and figures of a paper beside them. Plain data, which naught.report draws."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

__all__ = ["Figure", "Line", "Picture", "Row", "Scales", "Spot", "Statement", "Stretch"]


class Spot(NamedTuple):
    devices: int
    value: float


class Line(NamedTuple):
    """`kind` is ours, most (ours if everything overlaps) or reference (nobody's forecast, to read the others by)."""

    name: str
    spots: tuple[Spot, ...]
    kind: str = "ours"

    def at(self, devices: int) -> float:
        return next(spot.value for spot in self.spots if spot.devices == devices)


class Figure(NamedTuple):
    """A number of a paper, to be read against the line of ours that it names. Its text stands beside it on a `side` where no
    line runs: left, right, above, below, or farther under it."""

    line: str
    spot: Spot
    text: str
    side: str
    at_least: bool = False


class Stretch(NamedTuple):
    """Numbers of devices of which a paper says something."""

    first: int
    last: int
    text: str


class Scales(NamedTuple):
    """The numbers of devices that are written below, what values are, and how one is written."""

    devices: tuple[int, ...]
    unit: str
    show: Callable[[float], str]
    log_devices: bool = True
    log_values: bool = True


class Picture(NamedTuple):
    name: str
    title: str
    scales: Scales
    lines: tuple[Line, ...]
    figures: tuple[Figure, ...]
    stretch: Stretch | None = None


class Row(NamedTuple):
    """One thing that a paper says, beside what this planner says of it."""

    what: str
    paper: str
    ours: str
    known: str


class Statement(NamedTuple):
    title: str
    paper: str
    ours: str
    pictures: tuple[Picture, ...]
    rows: tuple[Row, ...]
