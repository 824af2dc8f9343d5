"""Wires: how the slices of a flat travel between ranks. A wire neither counts nor decides; a group does.

A flat's slices lie one behind the other, one for each rank of those `among` whom it travels; all, if nobody is named. Every wire
moves (N-1)/N of a flat for each gather and each reduce.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["Alone", "Collectives", "Peers", "Pending", "Wire", "all_gather_single"]


@dataclass
class Pending:
    """Something under way. Waiting twice is fine; work that has failed fails again."""

    works: list[Any] = field(default_factory=list)
    then: Callable[[], None] | None = None
    fault: BaseException | None = None  # of what came then, which is begun once only

    def wait(self) -> None:
        if self.fault is not None:
            raise self.fault
        for work in self.works:
            work.wait()
        self.works = []
        if self.then is not None:
            then, self.then = self.then, None
            try:
                then()
            except BaseException as fault:
                self.fault = fault
                raise

    def fails(self) -> bool:
        """Wait; whether it has failed, for who does not need it any more."""
        try:
            if self.fault is None:
                self.wait()
        except Exception:
            return True
        return self.fault is not None


_NOTHING = Pending()


# Torch 2.13 has new names for these, and warns of the old ones.
all_gather_single: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Wire(Protocol):
    blocks: bool  # a wait keeps the host, and not only its device, until everything has arrived

    def scratch_bytes(self, shard_numel: int, dtype: torch.dtype) -> int:
        """Bytes that a reduce needs beside the flat."""

    def gather(self, flat: Tensor, slices: Sequence[Tensor]) -> Pending:
        """Fill a flat in which every rank has put its own slice."""

    def reduce(self, flat: Tensor, slices: Sequence[Tensor], divisor: float) -> Pending:
        """Sum all ranks' flats and divide; after the wait this rank's slice holds its slice of the result."""


class Alone:
    """One rank: everything is there already."""

    blocks = True

    def scratch_bytes(self, shard_numel: int, dtype: torch.dtype) -> int:
        del shard_numel, dtype
        return 0

    def gather(self, flat: Tensor, slices: Sequence[Tensor]) -> Pending:
        del flat, slices
        return _NOTHING

    def reduce(self, flat: Tensor, slices: Sequence[Tensor], divisor: float) -> Pending:
        del slices
        if divisor != 1:
            flat.div_(divisor)
        return _NOTHING


class Collectives:
    """The backend's own collectives. A flat is gathered in place, and 32-bit gradients are reduced in place, in the
    backend's own order, which is the same at every stage. Narrower ones are exchanged and added in 32 bits, rounded once."""

    def __init__(self, rank: int, size: int, among: dist.ProcessGroup | None = None, *, blocks: bool = True) -> None:
        self.rank, self.size, self.among, self.blocks = rank, size, among, blocks

    def scratch_bytes(self, shard_numel: int, dtype: torch.dtype) -> int:
        return 0 if dtype.itemsize >= _WIDE else shard_numel * (self.size * dtype.itemsize + _WIDE)

    def gather(self, flat: Tensor, slices: Sequence[Tensor]) -> Pending:
        return Pending([all_gather_single(flat, slices[self.rank], group=self.among, async_op=True)])

    def reduce(self, flat: Tensor, slices: Sequence[Tensor], divisor: float) -> Pending:
        mine = slices[self.rank]
        if flat.dtype.itemsize >= _WIDE:
            return Pending([_reduce_scatter(mine, flat, group=self.among, async_op=True)], lambda: _divide(mine, divisor))
        received = torch.empty_like(flat)
        work = dist.all_to_all_single(received, flat, group=self.among, async_op=True)
        parts = list(torch.split(received, mine.numel())) if mine.numel() else [mine] * self.size
        return Pending([work], lambda: _add_widely(parts, mine, divisor))


class Peers:
    """Slices sent straight from rank to rank, for gloo, whose own collectives copy and whose sums have no fixed order.

    Sums are taken in the order of the ranks, those of narrow types in 32 bits. `most_numel` bounds what one reduce
    carries, so what it needs has a constant size: a larger flat is reduced in pieces, one behind the other.
    """

    blocks = True

    def __init__(self, rank: int, size: int, most_numel: int, align: int, among: dist.ProcessGroup | None = None) -> None:
        self.rank, self.peers, self.among = rank, [peer for peer in range(size) if peer != rank], among
        self.piece_numel = max(align, most_numel // size // align * align)

    def scratch_bytes(self, shard_numel: int, dtype: torch.dtype) -> int:
        wide = 0 if dtype.itemsize >= _WIDE else _WIDE
        return min(shard_numel, self.piece_numel) * (len(self.peers) * dtype.itemsize + wide)

    def gather(self, flat: Tensor, slices: Sequence[Tensor]) -> Pending:
        del flat
        mine = slices[self.rank]
        return self._swap([mine] * len(slices), {peer: slices[peer] for peer in self.peers})

    def reduce(self, flat: Tensor, slices: Sequence[Tensor], divisor: float) -> Pending:
        numel = slices[self.rank].numel()
        scratch = torch.empty(len(self.peers), min(numel, self.piece_numel), dtype=flat.dtype, device=flat.device)

        def set_out(start: int) -> Pending:
            pieces = [piece[start : start + self.piece_numel] for piece in slices]
            return self._reduce_piece(pieces, scratch, divisor)

        first = set_out(0)

        def arrive() -> None:
            first.wait()
            for start in range(self.piece_numel, numel, self.piece_numel):
                set_out(start).wait()

        return Pending(then=arrive)

    def _reduce_piece(self, pieces: Sequence[Tensor], scratch: Tensor, divisor: float) -> Pending:
        mine = pieces[self.rank]
        received = {peer: room[: mine.numel()] for peer, room in zip(self.peers, scratch, strict=True)}
        swap = self._swap(pieces, received)

        def arrive() -> None:
            swap.wait()
            parts = [mine if rank == self.rank else received[rank] for rank in range(len(pieces))]
            if mine.dtype.itemsize >= _WIDE:
                _add_in_order(parts, mine, divisor)
            else:
                _add_widely(parts, mine, divisor)

        return Pending(then=arrive)

    def _swap(self, outgoing: Sequence[Tensor], incoming: dict[int, Tensor]) -> Pending:
        """Send to and receive from every peer at once. Gloo carries host memory only: others are staged there."""
        staged = {
            peer: into if into.device.type == "cpu" else torch.empty_like(into, device="cpu") for peer, into in incoming.items()
        }
        works = [dist.irecv(into, group=self.among, group_src=peer) for peer, into in staged.items()]
        works += [dist.isend(outgoing[peer].cpu(), group=self.among, group_dst=peer) for peer in self.peers]

        def unstage() -> None:
            for peer, into in incoming.items():
                if staged[peer] is not into:
                    into.copy_(staged[peer])

        return Pending(works, unstage)


_WIDE = torch.float32.itemsize


def _add_in_order(parts: Sequence[Tensor], mine: Tensor, divisor: float) -> None:
    """Add as if from rank 0 on: those before this one first among themselves, in place. Addition commutes, so the bits are
    those of a sum in order, whoever takes it."""
    at = next(index for index, part in enumerate(parts) if part is mine)
    for part in parts[1:at]:
        parts[0].add_(part)
    if at:
        mine.add_(parts[0])
    for part in parts[at + 1 :]:
        mine.add_(part)
    _divide(mine, divisor)


def _add_widely(parts: Sequence[Tensor], mine: Tensor, divisor: float) -> None:
    """Add narrow numbers in 32 bits, in the order of the ranks, and round once."""
    total = parts[0].float()
    for part in parts[1:]:
        total.add_(part)
    _divide(total, divisor)
    mine.copy_(total)


def _divide(total: Tensor, divisor: float) -> None:
    if divisor != 1:
        total.div_(divisor)
