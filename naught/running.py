"""Running: as which rank this process goes on just now, where it is not simply itself: one of several that share it by turns, or
one of many that are only thought of. What a process has once, each of them has for itself. Pure."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from typing import Generic, Protocol, TypeVar
from weakref import WeakKeyDictionary

__all__ = ["Own", "Rank", "become", "running"]

Value = TypeVar("Value")


class Rank(Protocol):
    """One of so many."""

    @property
    def rank(self) -> int: ...

    @property
    def ranks(self) -> int: ...


_NOW: list[Rank] = []  # at most one


def running() -> Rank | None:
    """None: this process is itself."""
    return _NOW[0] if _NOW else None


def become(rank: Rank | None) -> None:
    """From here on go on as this one, in every thread: autograd has some of its own."""
    _NOW[:] = [] if rank is None else [rank]


class Own(Generic[Value]):
    """Something that a process has once, and each of the ranks that it goes on as has for itself. Call it to have it."""

    def __init__(self, make: Callable[[], Value]) -> None:
        self.make, self.common = make, make()
        self.apart: MutableMapping[Rank, Value] = WeakKeyDictionary()

    def __call__(self) -> Value:
        rank = running()
        if rank is None:
            return self.common
        if rank not in self.apart:
            self.apart[rank] = self.make()
        return self.apart[rank]
