"""Watch: what a rank has sent and what it holds, phase by phase, as data."""

from __future__ import annotations

from collections import Counter
from typing import Any

from naught.comm import Ledger
from naught.flat import Meter

__all__ = ["Watch"]


class Watch:
    """The ledger of bytes sent, the meter of bytes held, and what was held after each phase of the last step."""

    def __init__(self) -> None:
        self.ledger, self.meter = Ledger(), Meter()
        self.held_after: dict[str, Counter[str]] = {}

    def enter(self, phase: str) -> None:
        """What is sent from here on counts for this phase."""
        self.ledger.phase = phase

    def after(self, phase: str) -> None:
        """A phase is over: remember what is held."""
        self.held_after[phase] = Counter(self.meter.live)
        self.ledger.phase = "idle"

    def report(self) -> dict[str, Any]:
        sent = sorted(self.ledger.sent.items())
        return {
            "sent": {f"{collective} {phase} {unit or 'root'}": nbytes for (collective, unit, phase), nbytes in sent},
            "live": dict(self.meter.live),
            "peak": dict(self.meter.peak),
            "after": {phase: dict(held) for phase, held in self.held_after.items()},
        }
