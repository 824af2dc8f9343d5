"""Ledger: what a rank has sent, for how long it has waited, and where among its collectives it is. Knows nothing of how."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter
from typing import NamedTuple

__all__ = ["Call", "Ledger", "Listener", "Waiting"]

# Is told the collective, the unit, the phase and the bytes.
Listener = Callable[[str, str, str, int], None]


class Call(NamedTuple):
    """A collective that this rank has issued: its number, the same on every rank, and in which phase it was for which unit."""

    number: int
    collective: str
    unit: str
    phase: str


@dataclass
class Ledger:
    """Bytes that this rank has sent, by collective, unit and phase; seconds that it has waited, by collective and the phase in
    which it waited."""

    sent: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    waited: defaultdict[tuple[str, str], float] = field(default_factory=lambda: defaultdict(float))
    phase: str = "start"
    order: deque[tuple[str, str]] = field(default_factory=lambda: deque(maxlen=4096))  # the latest, for comparing ranks
    count: int = 0  # of collectives so far, small exchanges among them
    latest: Call | None = None  # None: there was none
    inside: Call | None = None  # None: this rank is in no collective just now
    listener: Listener | None = None  # None: nobody wants to know of each collective

    def add(self, collective: str, unit: str, nbytes: int) -> Call:
        """A collective that carries a flat is about to begin."""
        self.sent[collective, unit, self.phase] += nbytes
        self.order.append((collective, unit))
        if self.listener is not None:
            self.listener(collective, unit, self.phase, nbytes)
        return self.begin(collective, unit)

    def begin(self, collective: str, unit: str = "") -> Call:
        """A collective is about to begin; this by itself is for one that carries a few numbers only."""
        self.count += 1
        self.latest = Call(self.count, collective, unit, self.phase)
        return self.latest

    def waiting(self, call: Call, *, blocks: bool) -> Waiting:
        """Open this around the issue of a collective, and around the wait for it."""
        return Waiting(self, call, blocks)

    def total(self, collective: str | None = None) -> int:
        return sum(nbytes for (name, _, _), nbytes in self.sent.items() if collective in (None, name))


class Waiting:
    """While open, its rank is inside of a collective. For how long is known only if that blocks the host. A class, for a
    generator would take longer than both clocks."""

    __slots__ = ("began_s", "blocks", "call", "ledger")

    def __init__(self, ledger: Ledger, call: Call, blocks: bool) -> None:
        self.ledger, self.call, self.blocks = ledger, call, blocks
        self.began_s = 0.0

    def __enter__(self) -> None:
        self.ledger.inside = self.call
        self.began_s = perf_counter()

    def __exit__(self, *_: object) -> None:
        ledger = self.ledger
        ledger.inside = None
        if self.blocks:
            ledger.waited[self.call.collective, ledger.phase] += perf_counter() - self.began_s
