"""Watch: what a rank has sent, for what it has waited, what it holds and how long it took, phase by phase, as data."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from naught.comm import Ledger
from naught.devices import Mark, allocated_bytes, mark, peak_bytes, room_on
from naught.flat import Meter
from naught.shelves import HOST
from naught.shortage import Held

__all__ = ["Watch"]

_HOST = ("snapshots", "away")  # of host memory, beside what rests there
_UNREAD = 64  # marks that may wait to be read: reading one waits for the device


def _is_host(category: str) -> bool:
    return category in _HOST or category.startswith(HOST)


def _uncounted() -> None:
    return None


class Watch:
    """The ledger of bytes sent, the meter of bytes held, and what each phase of the last step left and took. `model_bytes` is
    what the model takes on the device already: what else is allocated there is not training's."""

    def __init__(self, device: torch.device, *, model_bytes: int = 0) -> None:
        import torch._dynamo  # noqa: F401 - torch would do so by itself when hooks are made: 25 MB that are not training's

        self.device = device
        allocated = allocated_bytes(device)
        self.base = None if allocated is None else allocated - model_bytes  # None: nobody counts what is allocated
        # An accelerator's allocator counts its peak by itself, and better.
        count = partial(allocated_bytes, device) if device.type == "cpu" else _uncounted
        self.ledger, self.meter = Ledger(), Meter(allocated=count)
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
        self.meter.look()
        allocated = allocated_bytes(self.device)
        self.held_after[phase] = held if allocated is None else held | {"allocated": allocated}

    def held(self) -> Held:
        """What this process holds on the device now, in training."""
        on_device = {name: nbytes for name, nbytes in self.meter.live.items() if self.device.type == "cpu" or not _is_host(name)}
        allocated = allocated_bytes(self.device)
        if allocated is None or self.base is None:
            return Held(on_device, None, room_on(self.device))
        return Held(on_device, max(0, allocated - self.base - sum(on_device.values())), room_on(self.device))

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
            "waited": {f"{collective} {phase}": seconds for (collective, phase), seconds in sorted(self.ledger.waited.items())},
            "base": self.base,
            "most": peak_bytes(self.device) or self.meter.most or None,
            "live": _by_name(self.meter.live),
            "peak": _by_name(self.meter.peak),
            "after": {phase: _by_name(held) for phase, held in self.held_after.items()},
            "moved": _by_name(self.meter.moved),
            "seconds": dict(self.seconds),
        }


def _by_name(held: Mapping[str, int]) -> dict[str, int]:
    """Buffers of a plan have names of their own; what is told has plain ones."""
    return {str(name): nbytes for name, nbytes in held.items()}
