"""Every exception that Naught raises on purpose.

    NaughtError
    ├── UsageError        a call or a command line that cannot be meant
    │   └── HalfUpdated         of an engine whose update was ended in the middle, until a checkpoint is loaded
    ├── ConfigError       a configuration with problems: all of them at once
    ├── PlacementError    a placement in which some rank would miss what it needs
    ├── ModelError        a model that cannot be described, split or planned
    ├── PlanError         a record that no plan can serve
    ├── RankMismatch      ranks that were started with different things
    ├── ScheduleError     ranks that run different modules and cannot go on
    ├── StorageError      a disk that refused or failed
    └── CheckpointError   a checkpoint that is not there, not whole, or not of this model
        └── CheckpointDamaged   bytes that are not those that were written

A message has three parts: what is wrong, where, and what to do. `assert` is for what cannot happen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = [
    "CheckpointDamaged",
    "CheckpointError",
    "ConfigError",
    "HalfUpdated",
    "ModelError",
    "NaughtError",
    "PlacementError",
    "PlanError",
    "Problem",
    "RankMismatch",
    "ScheduleError",
    "StorageError",
    "UsageError",
]


class NaughtError(Exception):
    """A mistake that a user can correct."""

    def __init__(self, what: str, *, where: str = "", fix: str = "") -> None:
        self.what, self.where, self.fix = what, where, fix
        said = what + (f" [{where}]" if where else "")
        stop = "" if said.endswith((".", "?", "!")) else "."
        super().__init__(f"{said}{stop} {fix[:1].upper()}{fix[1:]}" if fix else said)

    def __reduce__(self) -> tuple[object, ...]:
        # Exceptions cross process borders in launchers and test harnesses; keyword arguments would be lost.
        return _rebuild, (type(self), self.what, self.where, self.fix)


def _rebuild(kind: type[NaughtError], what: str, where: str, fix: str) -> NaughtError:
    return kind(what, where=where, fix=fix)


class UsageError(NaughtError):
    """A call or command line that cannot be meant."""


class HalfUpdated(UsageError):  # noqa: N818 - it names what is wrong
    """Some weights are new and some are old: nothing can be meant by them."""


class PlacementError(NaughtError):
    """A placement in which some rank would miss what it needs."""


class ModelError(NaughtError):
    """A model that cannot be described, split or planned."""


class PlanError(NaughtError):
    """A record that no plan can serve."""


class RankMismatch(NaughtError):  # noqa: N818 - it names what is wrong
    """Ranks that were started with different versions, configurations or models."""


class ScheduleError(NaughtError):
    """Ranks that run different modules and cannot go on."""


class StorageError(NaughtError):
    """A disk that refused or failed."""


class CheckpointError(NaughtError):
    """A checkpoint that is not there, not whole, or not of this model."""


class CheckpointDamaged(CheckpointError):  # noqa: N818 - it names what is wrong
    """Bytes that are not those that were written."""


@dataclass(frozen=True)
class Problem:
    """One thing wrong with a configuration: where it stands, what is wrong, how to mend it."""

    path: str
    what: str
    line: int | None = None
    fix: str = ""

    def __str__(self) -> str:
        place = self.path or "the configuration"
        line = f" (line {self.line})" if self.line else ""
        return f"{place}{line}: {self.what}" + (f"; {self.fix}" if self.fix else "")


class ConfigError(NaughtError):
    """A configuration that cannot be used; `problems` lists all that is wrong with it."""

    def __init__(self, source: str, problems: Sequence[Problem]) -> None:
        self.source, self.problems = source, tuple(problems)
        count = "1 problem" if len(self.problems) == 1 else f"{len(self.problems)} problems"
        super().__init__("\n".join([f"{source} has {count}", *(f"  {problem}" for problem in self.problems)]))

    def __reduce__(self) -> tuple[object, ...]:
        return ConfigError, (self.source, self.problems)
