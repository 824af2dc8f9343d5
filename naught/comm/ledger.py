"""Ledger: what a rank has sent. Knows nothing of how."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field

__all__ = ["Ledger"]


@dataclass
class Ledger:
    """Bytes that this rank has sent, by collective, unit and phase."""

    sent: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    phase: str = "start"
    order: deque[tuple[str, str]] = field(default_factory=lambda: deque(maxlen=4096))  # the latest, for comparing ranks

    def add(self, collective: str, unit: str, nbytes: int) -> None:
        self.sent[collective, unit, self.phase] += nbytes
        self.order.append((collective, unit))

    def total(self, collective: str | None = None) -> int:
        return sum(nbytes for (name, _, _), nbytes in self.sent.items() if collective in (None, name))
