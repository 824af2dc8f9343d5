"""Wires: how the slices of a flat travel between ranks. A wire neither counts nor decides; a group does.

A flat's slices lie one behind the other, one for each rank. Both wires move (N-1)/N of a flat for each gather and each
reduce, and neither copies it in or out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["Alone", "Collectives", "Peers", "Pending", "Wire"]


@dataclass
class Pending:
    """Something under way. Waiting twice is fine."""

    works: list[Any] = field(default_factory=list)
    then: Callable[[], None] | None = None

    def wait(self) -> None:
        for work in self.works:
            work.wait()
        self.works = []
        if self.then is not None:
            then, self.then = self.then, None
            then()


_NOTHING = Pending()


class Wire(Protocol):
    def scratch_numel(self, shard_numel: int) -> int:
        """Elements that a reduce needs beside the flat."""

    def gather(self, flat: Tensor, slices: Sequence[Tensor]) -> Pending:
        """Fill a flat in which every rank has put its own slice."""

    def reduce(self, flat: Tensor, slices: Sequence[Tensor], scratch: Tensor) -> Pending:
        """Sum all ranks' flats; after the wait this rank's slice holds its slice of the sum."""


class Alone:
    """One rank: everything is there already."""

    def scratch_numel(self, shard_numel: int) -> int:
        del shard_numel
        return 0

    def gather(self, flat: Tensor, slices: Sequence[Tensor]) -> Pending:
        del flat, slices
        return _NOTHING

    def reduce(self, flat: Tensor, slices: Sequence[Tensor], scratch: Tensor) -> Pending:
        del flat, slices, scratch
        return _NOTHING


class Collectives:
    """The backend's own collectives, in place: a flat is both what goes in and what comes out. The order in which it adds
    is the backend's, and the same at every stage."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def scratch_numel(self, shard_numel: int) -> int:
        del shard_numel
        return 0

    def gather(self, flat: Tensor, slices: Sequence[Tensor]) -> Pending:
        return Pending([dist.all_gather_into_tensor(flat, slices[self.rank], async_op=True)])

    def reduce(self, flat: Tensor, slices: Sequence[Tensor], scratch: Tensor) -> Pending:
        del scratch
        return Pending([dist.reduce_scatter_tensor(slices[self.rank], flat, async_op=True)])


class Peers:
    """Slices sent straight from rank to rank, for gloo, whose own collectives copy and whose sums have no fixed order.

    Sums are taken in the order of the ranks. The scratch takes the other ranks' slices, and `most_numel` bounds what one
    reduce carries, so what it needs has a constant size: a larger flat is reduced in pieces, one behind the other.
    """

    def __init__(self, rank: int, size: int, most_numel: int, align: int) -> None:
        self.rank, self.peers = rank, [peer for peer in range(size) if peer != rank]
        self.piece_numel = max(align, most_numel // size // align * align)

    def scratch_numel(self, shard_numel: int) -> int:
        return len(self.peers) * min(shard_numel, self.piece_numel)

    def gather(self, flat: Tensor, slices: Sequence[Tensor]) -> Pending:
        del flat
        mine = slices[self.rank]
        return self._swap([mine] * len(slices), {peer: slices[peer] for peer in self.peers})

    def reduce(self, flat: Tensor, slices: Sequence[Tensor], scratch: Tensor) -> Pending:
        del flat
        return self._reduce_from(0, slices, scratch)

    def _reduce_from(self, start: int, slices: Sequence[Tensor], scratch: Tensor) -> Pending:
        """Set out with one piece of every slice; the others follow when it is waited for."""
        pieces = [piece[start : start + self.piece_numel] for piece in slices]
        mine = pieces[self.rank]
        room = torch.split(scratch, mine.numel()) if mine.numel() else [scratch] * len(self.peers)
        received = dict(zip(self.peers, room, strict=False))
        swap = self._swap(pieces, received)

        def arrive() -> None:
            swap.wait()
            _add_in_order(mine, received, self.rank)
            if start + self.piece_numel < slices[self.rank].numel():
                self._reduce_from(start + self.piece_numel, slices, scratch).wait()

        return Pending(then=arrive)

    def _swap(self, outgoing: Sequence[Tensor], incoming: dict[int, Tensor]) -> Pending:
        """Send to and receive from every peer at once. Gloo carries host memory only: others are staged there."""
        staged = {
            peer: into if into.device.type == "cpu" else torch.empty_like(into, device="cpu") for peer, into in incoming.items()
        }
        works = [dist.irecv(into, peer) for peer, into in staged.items()]
        works += [dist.isend(outgoing[peer].cpu(), peer) for peer in self.peers]

        def unstage() -> None:
            for peer, into in incoming.items():
                if staged[peer] is not into:
                    into.copy_(staged[peer])

        return Pending(works, unstage)


def _add_in_order(mine: Tensor, received: dict[int, Tensor], rank: int) -> None:
    """Add as if from rank 0 on: those before this one first among themselves. Addition commutes, so the bits are those of
    a sum in order, whoever takes it."""
    before: Tensor | None = None
    for peer in sorted(peer for peer in received if peer < rank):
        before = received[peer] if before is None else before.add_(received[peer])
    if before is not None:
        mine.add_(before)
    for peer in sorted(peer for peer in received if peer > rank):
        mine.add_(received[peer])
