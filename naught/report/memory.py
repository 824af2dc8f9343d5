"""Memory: what a rank held after each phase, by category, and beside it what the plan said. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from naught.report.records import Table
from naught.report.run_data import Run

__all__ = ["OTHER", "POSITIONS", "Compared", "by_position", "compared_with_plan"]

POSITIONS = ("forward", "backward", "step")  # after which memory is looked at
OTHER = "activations and other"


@dataclass(frozen=True)
class Compared:
    """A category of the plan. `measured` is the most that was held at any position; None where nobody looked. What is
    `passing` comes and goes within a phase too, so that there was at least as much of it."""

    name: str
    plan: float
    measured: float | None
    passing: bool


def by_position(steps: Table, position: str) -> dict[str, Sequence[float]]:
    """Bytes held after a phase, by category, with all that no category counts as one more. What is never held is left out."""
    metered = steps.under("memory", "after", position)
    held = {name: values for name, values in metered.items() if any(value > 0 for value in values)}
    if steps.has("memory", "allocated", position):
        allocated = steps.column("memory", "allocated", position)
        held[OTHER] = [_less(whole, [values[row] for values in held.values()]) for row, whole in enumerate(allocated)]
    return held


def _less(whole: float, parts: Sequence[float]) -> float:
    rest = whole - math.fsum(part for part in parts if math.isfinite(part))
    return 0.0 if rest < 0 else rest  # NaN stays NaN


class _Group(NamedTuple):
    name: str
    planned: tuple[str, ...]
    metered: tuple[str, ...]
    passing: bool = False


_GROUPS = (
    _Group("parameters", ("parameters",), ("weights",)),
    _Group("gradients", ("gradients",), ("whole gradients", "owned gradients")),
    _Group("optimizer states", ("optimizer",), ("states", "masters")),
    _Group("gathered", ("gathered",), ("gathered weights", "gradient flats"), passing=True),
    _Group(OTHER, ("activations", "checkpoints"), (OTHER,)),
    _Group("buffers", ("buffers",), ("reduce scratch", "loaded weights", "loaded gradients"), passing=True),
)


def compared_with_plan(run: Run) -> list[Compared]:
    """Every category of the plan that is in it or was seen."""
    plan = run.plan.memory if run.plan else {}
    known = {category for group in _GROUPS for category in group.planned}
    groups = [*_GROUPS, *(_Group(name, (name,), (name,)) for name in plan if name not in known)]
    held = [by_position(run.metrics.steps, position) for position in POSITIONS]
    rows = [
        Compared(group.name, sum(plan.get(name, 0) for name in group.planned), _most(held, group.metered), group.passing)
        for group in groups
    ]
    return [row for row in rows if row.plan or row.measured]


def _most(held: Sequence[dict[str, Sequence[float]]], parts: tuple[str, ...]) -> float | None:
    if not any(held):
        return None
    counts = OTHER not in parts or any(OTHER in position for position in held)
    sums = [
        math.fsum(row) for position in held for row in zip(*(position[part] for part in parts if part in position), strict=True)
    ]
    return max((value for value in sums if math.isfinite(value)), default=0.0 if counts else None)
