"""Comparing: what two runs, or several, have in common and where they part. Pure."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from naught.report.records import Table
from naught.report.run_data import Run

__all__ = [
    "Difference",
    "Losses",
    "compare_columns",
    "compare_losses",
    "differing_settings",
    "say_groups",
    "say_losses",
    "show_value",
]


@dataclass(frozen=True)
class Losses:
    """Two losses beside each other, over the steps that both have. None: they never differ."""

    common: int
    first_step: int | None
    largest: float
    largest_step: int | None


def compare_losses(one: Table, other: Table) -> Losses:
    there = dict(zip(other.steps, other.column("loss"), strict=True))
    common = [(step, loss, there[step]) for step, loss in zip(one.steps, one.column("loss"), strict=True) if step in there]
    return compare_columns([step for step, _, _ in common], [mine for _, mine, _ in common], [theirs for _, _, theirs in common])


def compare_columns(steps: Sequence[int], mine: Sequence[float], theirs: Sequence[float]) -> Losses:
    """Equal means the same number; what is no number equals only its like."""
    first: int | None = None
    largest, largest_step = 0.0, None
    for step, one, other in zip(steps, mine, theirs, strict=True):
        if one == other or (math.isnan(one) and math.isnan(other)):
            continue
        first = step if first is None else first
        apart = abs(one - other)
        apart = math.inf if math.isnan(apart) else apart
        if apart > largest:
            largest, largest_step = apart, step
    return Losses(len(steps), first, largest, largest_step)


def say_losses(losses: Losses) -> str:
    """The comparison as a sentence."""
    if not losses.common:
        return "The two runs have no logged step in common."
    steps = "the one common step" if losses.common == 1 else f"every one of the {losses.common:,} common steps"
    if losses.first_step is None:
        return f"The losses are bitwise equal at {steps}."
    most = f"{losses.largest:.3g} nats" if math.isfinite(losses.largest) else "more than any number: one of them is not finite"
    return (
        f"The losses differ first at step {losses.first_step:,}, and most at step {losses.largest_step:,}, by {most} "
        f"({losses.common:,} common steps)."
    )


def say_groups(losses: Mapping[str, Sequence[float]]) -> str:
    """Which of several runs have the same losses, and how far the others are from the first of those."""
    if len(losses) < 2:
        return "There are no two runs to compare."
    length = min(len(values) for values in losses.values())
    alike = {name: sum(list(losses[name][:length]) == list(other[:length]) for other in losses.values()) for name in losses}
    first = max(alike, key=lambda name: alike[name])  # of as many likes, the one that comes first
    others = [name for name in losses if name != first]
    compared = {name: compare_columns(range(1, length + 1), losses[first][:length], losses[name][:length]) for name in others}
    same = [first, *(name for name, found in compared.items() if found.first_step is None)]
    said = [f"Bitwise equal in all {length:,} losses: {_listed(same)}."] if len(same) > 1 else []
    for name, found in compared.items():
        if found.first_step is not None:
            apart = f"by at most {found.largest:.3g} nats" if math.isfinite(found.largest) else "and one of them is not finite"
            said.append(f"{name} differs from {first} from loss {found.first_step:,} on, {apart}.")
    return " ".join(said)


def _listed(names: Sequence[str]) -> str:
    return f"{', '.join(names[:-1])} and {names[-1]}" if len(names) > 1 else names[0]


@dataclass(frozen=True)
class Difference:
    key: str
    values: tuple[str, str]
    origins: tuple[str, str]


def differing_settings(one: Run, other: Run) -> list[Difference]:
    """Keys whose values differ, in the order in which the runs have them."""
    keys = [*one.settings.values, *(key for key in other.settings.values if key not in one.settings.values)]
    pairs = [(key, [show_value(run.settings.values.get(key, "")) for run in (one, other)]) for key in keys]
    return [
        Difference(key, (mine, theirs), (_origin(one, key), _origin(other, key)))
        for key, (mine, theirs) in pairs
        if mine != theirs
    ]


def _origin(run: Run, key: str) -> str:
    return run.settings.origins.get(key, "default" if key in run.settings.values else "")


def show_value(value: object) -> str:
    """A value of a configuration as its file has it; a text without its quotes."""
    return value if isinstance(value, str) else json.dumps(value)
