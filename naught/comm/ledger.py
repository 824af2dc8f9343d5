"""Ledger: what a rank has sent. Knows nothing of how."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field

__all__ = ["Ledger", "Listener"]

# Is told the collective, the unit, the phase and the bytes.
Listener = Callable[[str, str, str, int], None]


@dataclass
class Ledger:
    """Bytes that this rank has sent, by collective, unit and phase."""

    sent: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    phase: str = "start"
    order: deque[tuple[str, str]] = field(default_factory=lambda: deque(maxlen=4096))  # the latest, for comparing ranks
    listener: Listener | None = None  # None: nobody wants to know of each collective

    def add(self, collective: str, unit: str, nbytes: int) -> None:
        self.sent[collective, unit, self.phase] += nbytes
        self.order.append((collective, unit))
        if self.listener is not None:
            self.listener(collective, unit, self.phase, nbytes)

    def total(self, collective: str | None = None) -> int:
        return sum(nbytes for (name, _, _), nbytes in self.sent.items() if collective in (None, name))
