"""Guard: notices what users do to parameters behind the engine's back, and keeps it until a step can tell all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import nn

from naught.errors import UsageError
from naught.layout import Layout

__all__ = ["GONE_WITH_THE_GATHERED", "UNKNOWN_TO_MASTERS", "Guard", "Lost"]


class Lost(NamedTuple):
    """Why a write that the engine was not told of does not last, and what to do about it."""

    why: str
    fix: str

    def error(self, name: str) -> UsageError:
        return UsageError(
            f'parameter "{name}" was written to outside of engine.gathered(), and what was written {self.why}', fix=self.fix
        )


GONE_WITH_THE_GATHERED = Lost("is gone with the gathered weights", "write inside engine.gathered(), between passes")
UNKNOWN_TO_MASTERS = Lost(
    "would be gone with the next update: weights are made of 32-bit masters, which do not know of it",
    "write inside engine.gathered(), between passes; opened now, it takes over what was written",
)


class Guard:
    """Knows where the parameters of a segment must be, and how often they had been written to when that became a mistake: where
    writes are lost."""

    def __init__(self, params: Sequence[nn.Parameter], layout: Layout, lost: Lost | None) -> None:
        self.params, self.layout, self.lost = params, layout, lost
        self.addresses: list[int] = []  # none where they change with every gather, or are the user's for a while
        self.versions: list[int] = []  # none where a write is kept
        self.fault: UsageError | None = None

    def expect(self, addresses: list[int]) -> None:
        """From here on the parameters must be at these places."""
        self.addresses, self.versions = addresses, []

    def forbid_writes(self) -> None:
        """What is written from here on will be lost, if anything is."""
        if self.lost is not None:
            self.versions = [param._version for param in self.params]

    def renew(self) -> None:
        """What has been written so far is known."""
        if self.versions:
            self.forbid_writes()

    def look(self) -> None:
        """Remember the first thing that is wrong."""
        self.fault = self.fault or self._moved() or self.written()

    def tell(self) -> UsageError | None:
        """What was wrong, once."""
        self.look()
        fault, self.fault = self.fault, None
        return fault

    def _moved(self) -> UsageError | None:
        if not self.addresses or self.addresses == [param.data_ptr() for param in self.params]:
            return None
        places = zip(self.layout.slots, self.params, self.addresses, strict=True)
        name = next(slot.name for slot, param, address in places if param.data_ptr() != address)
        return UsageError(
            f'parameter "{name}" was moved, converted or given other data after the engine was made',
            fix="call model.to() or model.half() before naught.initialize, and write inside engine.gathered()",
        )

    def written(self) -> UsageError | None:
        """A write that will be lost."""
        if self.lost is None or not self.versions or self.versions == [param._version for param in self.params]:
            return None
        changed = zip(self.layout.slots, self.params, self.versions, strict=True)
        name = next(slot.name for slot, param, version in changed if param._version != version)
        return self.lost.error(name)
