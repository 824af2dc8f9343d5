"""Records: metrics.jsonl as columns, in which the last record of a step counts and superseded ones are gone. Draws nothing.

Columns, because a run of a million steps has fifty million numbers: as objects they would not fit.
"""

from __future__ import annotations

import json
import math
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from naught.report.documents import Document, number_of

__all__ = ["Metrics", "Resume", "Save", "Table", "read_metrics"]


@dataclass(frozen=True)
class Table:
    """Numbers by step, in ascending order. A value is NaN where it is missing or is none."""

    steps: Sequence[int]
    columns: Mapping[tuple[str, ...], Sequence[float]]

    def column(self, *path: str) -> Sequence[float]:
        found = self.columns.get(path)
        return array("d", [math.nan]) * len(self.steps) if found is None else found

    def has(self, *path: str) -> bool:
        """Whether a column has any finite number."""
        return any(math.isfinite(value) for value in self.columns.get(path, ()))

    def under(self, *path: str) -> dict[str, Sequence[float]]:
        """The columns one level below a path, by their last word."""
        depth = len(path)
        return {key[-1]: values for key, values in self.columns.items() if len(key) == depth + 1 and key[:depth] == path}


@dataclass(frozen=True)
class Save:
    step: int
    tag: str
    nbytes: float | None
    seconds: float | None


@dataclass(frozen=True)
class Resume:
    step: int
    tag: str
    world: int | None


@dataclass(frozen=True)
class Metrics:
    """All that a run has said of itself. `unreadable` lines are not the torn one at the end, which every killed run has."""

    steps: Table
    evals: Table
    saves: tuple[Save, ...]
    resumes: tuple[Resume, ...]
    time_s: float | None
    unreadable: int


def read_metrics(path: Path) -> Metrics:
    """Read the file line by line; one that does not exist yet has no lines."""
    if not path.exists():
        return _collect([])
    with path.open("rb") as file:
        return _collect(file)


def _collect(lines: Iterable[bytes]) -> Metrics:
    steps, evals = _Rows(), _Rows()
    saves: list[Save] = []
    resumes: list[Resume] = []
    time_s: float | None = None
    unreadable = 0
    for line in lines:
        record = _parse(line)
        if record is None:
            unreadable += line.endswith(b"\n") and bool(line.strip())
            continue
        step, values = record.count("step") or 0, record.values
        time_s = record.number("time_s") or time_s
        match record.text("kind"):
            case "step":
                steps.put(step, values)
            case "eval":
                evals.put(step, values)
            case "save":
                saves.append(Save(step, record.text("tag") or "", record.number("bytes"), record.number("seconds")))
            case "resume":
                steps.cut(step)
                evals.cut(step)
                saves = [save for save in saves if save.step <= step]
                resumes.append(Resume(step, record.text("from") or "", record.count("world")))
    return Metrics(steps.table(), evals.table(), tuple(saves), tuple(resumes), time_s, unreadable)


def _parse(line: bytes) -> Document | None:
    try:
        value = json.loads(line)
    except ValueError:
        return None
    record = Document(value if isinstance(value, dict) else {})
    return None if record.count("step") is None else record


class _Rows:
    """A table that is being filled."""

    def __init__(self) -> None:
        self.steps = array("q")
        self.columns: dict[tuple[str, ...], array[float]] = {}

    def put(self, step: int, values: Mapping[str, object]) -> None:
        row = bisect_left(self.steps, step)
        if row == len(self.steps):
            self.steps.append(step)
        else:  # an earlier record of this step, or steps beyond it, which is rare: make every column whole first
            self._fill()
            if self.steps[row] == step:
                for column in self.columns.values():
                    column[row] = math.nan
            else:
                self.steps.insert(row, step)
                for column in self.columns.values():
                    column.insert(row, math.nan)
        for path, value in _numbers(values):
            column = self.columns.setdefault(path, array("d"))
            if len(column) == row:
                column.append(value)
            else:
                column.extend([math.nan] * (row + 1 - len(column)))
                column[row] = value

    def cut(self, step: int) -> None:
        """Forget all beyond a step."""
        row = bisect_right(self.steps, step)
        del self.steps[row:]
        for column in self.columns.values():
            del column[row:]

    def table(self) -> Table:
        self._fill()
        return Table(self.steps, self.columns)

    def _fill(self) -> None:
        for column in self.columns.values():
            column.extend([math.nan] * (len(self.steps) - len(column)))


def _numbers(values: Mapping[str, object], prefix: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], float]]:
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _numbers(value, (*prefix, key))
        elif (number := number_of(value)) is not None:
            yield (*prefix, key), number
