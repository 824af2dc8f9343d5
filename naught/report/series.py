"""Series: fewer points that look the same, and numbers that JSON can carry. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

__all__ = ["MOST_POINTS", "mean", "picked", "thin"]

MOST_POINTS = 4000  # of one line: more than any window has columns


def thin(columns: Sequence[Sequence[float]], most: int = MOST_POINTS) -> list[int] | None:
    """The rows to draw, or None where all of them may be.

    Rows are cut into stretches of equal length, and of each the lowest and the highest of every column stay: a single
    outlier among a million is seen. So does the first that is no number, for a gap must stay a gap.
    """
    length = len(columns[0]) if columns else 0
    stretches = max(1, most // (2 * max(1, len(columns))))
    if length <= max(most, stretches):
        return None
    kept = {0, length - 1}
    for at in range(stretches):
        start, stop = length * at // stretches, length * (at + 1) // stretches
        for column in columns:
            kept |= _extremes(column[start:stop], start)
    return sorted(kept)


def _extremes(part: Sequence[float], start: int) -> set[int]:
    finite = [value for value in part if math.isfinite(value)]
    kept = {start + part.index(choose(finite)) for choose in (min, max)} if finite else set()
    if len(finite) < len(part):
        kept.add(start + next(at for at, value in enumerate(part) if not math.isfinite(value)))
    return kept


def picked(column: Sequence[float], rows: Sequence[int] | None) -> list[float | None]:
    """A column's values at some rows, to six digits; what is not finite is None."""
    values = column if rows is None else [column[row] for row in rows]
    return [_short(value) if math.isfinite(value) else None for value in values]


def _short(value: float) -> float:
    short = float(f"{value:.6g}")
    return int(short) if short.is_integer() and abs(short) < 1e15 else short


def mean(column: Sequence[float]) -> float | None:
    """The mean of what is finite."""
    finite = [value for value in column if math.isfinite(value)]
    return math.fsum(finite) / len(finite) if finite else None
