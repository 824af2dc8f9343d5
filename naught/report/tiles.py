"""Tiles: the headline figures of one run, each with what it is to be read against."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from naught.report import words
from naught.report.figures import Figures, Point, figures_of
from naught.report.html import Html, element
from naught.report.run_data import Plan, Run

__all__ = ["say_plan", "say_yardsticks", "tiles"]


class _Tile(NamedTuple):
    label: str
    value: str
    unit: str
    aside: str


def tiles(run: Run) -> Html:
    figures = figures_of(run)
    shown = [
        _loss(figures.loss),
        _validation(figures.validation, run.data.yardsticks),
        _speed(figures),
        _peak(figures, run.plan),
        _waiting(figures),
        _Tile("MFU", words.percent(figures.mfu), "", "of the device's FLOP/s, by the model's own")
        if figures.mfu is not None
        else None,
    ]
    return element("div", *(_html(tile) for tile in shown if tile), class_="tiles")


def _html(tile: _Tile) -> Html:
    value = element("div", tile.value, element("small", f" {tile.unit}") if tile.unit else None, class_="figure")
    return element(
        "div", element("div", tile.label, class_="label"), value, element("div", tile.aside, class_="aside"), class_="tile"
    )


def _loss(point: Point | None) -> _Tile:
    if point is None:
        return _Tile("training loss", "-", "", "no step is logged yet")
    known = math.isfinite(point.bits)
    return _Tile(
        "training loss",
        words.loss(point.loss),
        "nats",
        (f"{point.bits:.3f} bits per byte, " if known else "") + f"step {point.step:,}",
    )


def _validation(point: Point | None, yardsticks: Mapping[str, float]) -> _Tile | None:
    if point is None:
        return None
    if not math.isfinite(point.bits):
        return _Tile("validation loss", words.loss(point.loss), "nats", f"step {point.step:,}")
    return _Tile(
        "validation", words.bits(point.bits), "bits/byte", say_yardsticks(point.bits, yardsticks) or f"step {point.step:,}"
    )


def say_yardsticks(bits: float, yardsticks: Mapping[str, float]) -> str:
    """Which yardsticks a loss has passed, and which it has not."""
    passed = [f"{name} {value:.2f}" for name, value in yardsticks.items() if bits < value]
    ahead = [f"{name} {value:.2f}" for name, value in yardsticks.items() if bits >= value]
    said = [f"below {', '.join(passed)}"] if passed else []
    return "; ".join([*said, f"not yet below {', '.join(ahead)}"] if ahead else said)


def _speed(figures: Figures) -> _Tile:
    aside = f"{words.seconds(figures.step_s)} a step" if figures.step_s is not None else "not known"
    return _Tile("throughput", words.rate(figures.tokens_s), "tokens/s" if figures.tokens_s else "", aside)


def _peak(figures: Figures, plan: Plan | None) -> _Tile:
    number, _, unit = words.optional_bytes(figures.peak_bytes).partition(" ")
    return _Tile("peak memory of a rank", number, unit, say_plan(figures, plan))


def say_plan(figures: Figures, plan: Plan | None) -> str:
    if plan is None:
        return "there is no plan to hold it against"
    error = figures.plan_error(plan.total)
    return words.against_plan(plan.total, f", {words.signed_percent(error)}" if error is not None else "")


def _waiting(figures: Figures) -> _Tile | None:
    if figures.waited_share is None:
        return None
    sent = f"of a step is waiting; {words.optional_bytes(figures.sent_bytes)} sent a step"
    return _Tile("communication", words.percent(figures.waited_share), "", sent)
