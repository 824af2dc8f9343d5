"""Comm: the only user of torch.distributed. A group gathers flats, reduces them to their owners, and exchanges numbers.

Everything is counted in a ledger as it is sent. Sums are taken in the order of the ranks, so they do not depend on
timing, on the stage or on the rank that takes them.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from naught.errors import ScheduleError

__all__ = ["SAME_ORDER", "Group", "Ledger", "Pending"]


SAME_ORDER = "all ranks must run the same modules in the same order; a module that some ranks skip is fine"

# Groups share one store, and every rank makes its groups in the same order: their number keeps their keys apart.
_NUMBERS = itertools.count()


@dataclass
class Ledger:
    """Bytes that this rank has sent, by collective, unit and phase."""

    sent: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    phase: str = "idle"

    def add(self, collective: str, unit: str, nbytes: int) -> None:
        self.sent[collective, unit, self.phase] += nbytes

    def total(self, collective: str | None = None) -> int:
        return sum(nbytes for (name, _, _), nbytes in self.sent.items() if collective in (None, name))


@dataclass
class Pending:
    """Something under way. Waiting twice is fine."""

    works: list[Any]
    then: Callable[[], None] | None = None

    def wait(self) -> None:
        for work in self.works:
            work.wait()
        self.works.clear()
        if self.then is not None:
            then, self.then = self.then, None
            then()


class Group:
    """The ranks that share a model. A process without torch.distributed is a group of one, on the same path."""

    def __init__(self, ledger: Ledger, *, patience_s: float = 30.0) -> None:
        self.ledger, self.patience_s = ledger, patience_s
        self.number = next(_NUMBERS)
        self.meetings = 0
        together = dist.is_available() and dist.is_initialized()
        self.rank: int = dist.get_rank() if together else 0
        self.size: int = dist.get_world_size() if together else 1

    def gather(self, flat: Tensor, unit: str) -> Pending:
        """Fill a flat in which every rank has put its own slice; each slice goes straight to its place."""
        slices = flat.chunk(self.size) if self.size > 1 else (flat,)
        mine = slices[self.rank]
        self.ledger.add("all-gather", unit, (self.size - 1) * mine.nbytes)
        return Pending(self._swap(lambda _: mine, lambda peer: slices[peer]))

    def reduce(self, flat: Tensor, scratch: Tensor, unit: str) -> Pending:
        """Sum all ranks' flats; after the wait this rank's slice of its flat holds its slice of the sum.

        The scratch takes the other ranks' slices: one slice less than the flat has.
        """
        slices = flat.chunk(self.size) if self.size > 1 else (flat,)
        mine = slices[self.rank]
        received = dict(zip(self._peers(), scratch.chunk(max(1, self.size - 1)), strict=False))
        works = self._swap(lambda peer: slices[peer], lambda peer: received[peer])
        self.ledger.add("reduce-scatter", unit, (self.size - 1) * mine.nbytes)
        return Pending(works, lambda: self._sum(mine, received))

    def _sum(self, mine: Tensor, received: dict[int, Tensor]) -> None:
        """Add in the order of the ranks: those before this one first among themselves. Addition commutes, so the bits
        are those of a sum from rank 0 on."""
        before: Tensor | None = None
        for peer in sorted(received):
            if peer > self.rank:
                break
            before = received[peer] if before is None else before.add_(received[peer])
        if before is not None:
            mine.add_(before)
        for peer in sorted(received):
            if peer > self.rank:
                mine.add_(received[peer])

    def exchange(self, values: Tensor) -> Tensor:
        """Every rank's row of numbers, in the order of the ranks."""
        if self.size == 1:
            return values.unsqueeze(0)
        rows = [torch.empty_like(values) for _ in range(self.size)]
        dist.all_gather(rows, values)
        return torch.stack(rows)

    def exchange_texts(self, text: str) -> list[str]:
        """Every rank's text, in the order of the ranks; as bytes, for nothing that is sent may be code."""
        raw = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
        lengths = self.exchange(torch.tensor([raw.numel()])).flatten().tolist()
        padded = torch.zeros(max(lengths), dtype=torch.uint8)
        padded[: raw.numel()] = raw
        rows = self.exchange(padded)
        return [bytes(row[:length].tolist()).decode() for row, length in zip(rows, lengths, strict=True)]

    def diverge(self, values: Tensor, story: str) -> Tensor:
        """Exchange numbers outside of the order of collectives, which the ranks may have lost: through the store.

        Raises ScheduleError on this rank if the others do not come to the same point in time.
        """
        if self.size == 1:
            return values.unsqueeze(0)
        store = dist.distributed_c10d._get_default_store()
        self.meetings += 1
        keys = [f"naught/{self.number}/diverge/{self.meetings}/{rank}" for rank in range(self.size)]
        store.set(keys[self.rank], ",".join(str(int(value)) for value in values))
        try:
            store.wait(keys, timedelta(seconds=self.patience_s))
        except RuntimeError as error:  # torch's DistStoreError is one
            raise ScheduleError(
                f"{story}, and not all other ranks met the same within {self.patience_s:g} s",
                fix=SAME_ORDER,
            ) from error
        rows = [[int(number) for number in store.get(key).decode().split(",")] for key in keys]
        return torch.tensor(rows)

    def _peers(self) -> Iterable[int]:
        return [peer for peer in range(self.size) if peer != self.rank]

    def _swap(self, outgoing: Callable[[int], Tensor], incoming: Callable[[int], Tensor]) -> list[Any]:
        """Send to and receive from every peer at once."""
        works = [dist.irecv(incoming(peer), peer) for peer in self._peers()]
        works += [dist.isend(outgoing(peer), peer) for peer in self._peers()]
        return works
