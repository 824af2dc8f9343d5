"""Words: numbers of a run as people read them. A number that nobody knows is a dash."""

from __future__ import annotations

import math
from datetime import UTC, datetime

from naught.quantity import show_bytes, show_count, show_seconds

__all__ = ["against_plan", "bits", "counted", "loss", "moment", "optional_bytes", "percent", "rate", "seconds", "signed_percent"]

_NONE = "-"
_LEAST_TELLING_BYTES = 16 << 20  # libraries take a MB or two by themselves


def loss(value: float | None) -> str:
    return _NONE if value is None else f"{value:.4f}" if math.isfinite(value) else "not finite"


def bits(value: float | None) -> str:
    return f"{value:.3f}" if value is not None and math.isfinite(value) else _NONE


def rate(value: float | None) -> str:
    return _NONE if value is None else f"{value:,.0f}" if value < 99_999.5 else show_count(value)


def percent(share: float | None) -> str:
    return _NONE if share is None else f"{100 * share:.1f}%"


def signed_percent(share: float | None) -> str:
    """A plan that is exact says so: +0.0% would leave it open."""
    return _NONE if share is None else "exact" if share == 0 else f"{100 * share:+.1f}%"


def optional_bytes(nbytes: float | None) -> str:
    return _NONE if nbytes is None else show_bytes(nbytes)


def seconds(value: float | None) -> str:
    return _NONE if value is None else show_seconds(value)


def counted(count: float | None, word: str) -> str | None:
    """`1 unit`, `5 units`; None where there is nothing to say."""
    return None if count is None else f"{show_count(count)} {word}{'' if count == 1 else 's'}"


def moment(text: str) -> str:
    """A time of the run's file, to the minute and in UTC; what cannot be read stays as it is."""
    try:
        when = datetime.fromisoformat(text)
    except ValueError:
        return text
    return f"{when.astimezone(UTC):%Y-%m-%d %H:%M} UTC" if when.tzinfo else f"{when:%Y-%m-%d %H:%M}"


def against_plan(plan_bytes: float, told: str) -> str:
    """A plan, and what was told of how far off it is; but not where nobody could tell."""
    plan = f"plan {show_bytes(plan_bytes)}"
    return f"{plan}: too little to tell from what libraries take" if plan_bytes < _LEAST_TELLING_BYTES else plan + told
