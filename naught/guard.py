"""Guard: notices what users do to parameters behind the engine's back, and keeps it until a step can tell all ranks."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from naught.errors import UsageError
from naught.layout import Layout
from naught.versions import Versions

__all__ = ["Guard"]


class Guard:
    """Knows where the parameters of a segment must be, and how often they had been written to when they were gathered."""

    def __init__(self, params: Sequence[nn.Parameter], layout: Layout) -> None:
        self.params, self.layout = params, layout
        self.addresses: list[int] = []  # none where they change with every gather, or are the user's for a while
        self.versions: Versions | None = None  # None: a write is kept
        self.fault: UsageError | None = None

    def expect(self, addresses: list[int]) -> None:
        """From here on the parameters must be at these places."""
        self.addresses, self.versions = addresses, None

    def forbid_writes(self) -> None:
        """What is written from here on will be lost."""
        self.versions = Versions(self.params)

    def look(self) -> None:
        """Remember the first thing that is wrong."""
        self.fault = self.fault or self._moved() or self._written()

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

    def _written(self) -> UsageError | None:
        written = None if self.versions is None else self.versions.first_written()
        if written is None:
            return None
        name = self.layout.slots[written].name
        return UsageError(
            f'parameter "{name}" was written to inside a pass, and what was written is gone with the gathered weights',
            fix="write inside engine.gathered()",
        )
