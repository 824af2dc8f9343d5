"""Watch: what a rank has sent, what it holds and how long it took, phase by phase, as data."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch

from naught.comm import Ledger
from naught.devices import Mark, allocated_bytes, mark
from naught.flat import Meter

__all__ = ["Watch"]

_UNREAD = 64  # marks that may wait to be read: reading one waits for the device


class Watch:
    """The ledger of bytes sent, the meter of bytes held, and what each phase of the last step left and took."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.ledger, self.meter = Ledger(), Meter()
        self.held_after: dict[str, dict[str, int]] = {}
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.unread: list[tuple[str, Mark, Mark]] = []
        self.began: Mark | None = None  # None: between phases

    def enter(self, phase: str) -> None:
        """What is sent from here on counts for this phase."""
        if phase != self.ledger.phase:
            self.rest()
            self.ledger.phase = phase
            self.began = mark(self.device)

    def after(self, phase: str) -> None:
        """A phase is over: remember what is held."""
        self.rest()
        held = dict(self.meter.live)
        allocated = allocated_bytes(self.device)
        self.held_after[phase] = held if allocated is None else held | {"allocated by torch": allocated}

    def rest(self) -> None:
        """No phase is under way."""
        if self.began is not None:
            self.unread.append((self.ledger.phase, self.began, mark(self.device)))
            self.began = None
            if len(self.unread) > _UNREAD:
                self._read(self.unread[: _UNREAD // 2])  # the device has long passed these
        self.ledger.phase = "idle"

    def _read(self, marks: list[tuple[str, Mark, Mark]]) -> None:
        for phase, began, ended in marks:
            self.seconds[phase] += began.until(ended)
        self.unread = self.unread[len(marks) :]

    def report(self) -> dict[str, Any]:
        self._read(self.unread)
        sent = sorted(self.ledger.sent.items())
        return {
            "sent": {f"{collective} {phase} {unit or 'root'}": nbytes for (collective, unit, phase), nbytes in sent},
            "live": dict(self.meter.live),
            "peak": dict(self.meter.peak),
            "after": {phase: dict(held) for phase, held in self.held_after.items()},
            "seconds": dict(self.seconds),
        }
