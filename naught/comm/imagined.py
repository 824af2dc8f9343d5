"""Imagined: a group of many ranks of which this process is one and the others are only thought of. They are all like this one,
and what they send costs nothing and is counted. Tensors are on torch's meta device: they have sizes and no contents."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import Store

from naught.comm.group import Group
from naught.comm.ledger import Ledger
from naught.comm.wires import Collectives, Peers, Pending, Wire
from naught.errors import UsageError
from naught.layout import ALIGN_NUMEL
from naught.machine import Machine
from naught.running import become, running

__all__ = ["World", "imagine"]


@dataclass(frozen=True, eq=False)
class World:
    """So many ranks, which of them this one is, what they talk by, and on which machine they are; None: on one whose device is
    apart from its host, and nobody says how large."""

    ranks: int
    rank: int = 0
    backend: str = "nccl"
    machine: Machine | None = None

    device = torch.device("meta")

    def group(self, ledger: Ledger, device: torch.device, **options: Any) -> Group:
        return _Imagined(self, ledger, device, **options)

    def store(self) -> Store:
        raise UsageError("ranks that are only thought of have no store", fix="save nothing in a simulation")


@contextmanager
def imagine(world: World) -> Iterator[None]:
    """While open, engines are made for a world that is not there."""
    if running() is not None:
        raise UsageError("this is a simulation or a rehearsal already", fix="simulate outside of it")
    become(world)
    try:
        yield
    finally:
        become(None)


class _Silent:
    """Nothing is sent. What a reduce would need beside its flat is what that of a real wire needs."""

    blocks = False

    def __init__(self, real: Wire) -> None:
        self.real = real

    def scratch_bytes(self, shard_numel: int, dtype: torch.dtype) -> int:
        return self.real.scratch_bytes(shard_numel, dtype)

    def gather(self, flat: Tensor, slices: Sequence[Tensor]) -> Pending:
        del flat, slices
        return Pending()

    def reduce(self, flat: Tensor, slices: Sequence[Tensor], divisor: float) -> Pending:
        del flat, slices, divisor
        return Pending()


class _Imagined(Group):
    """Every other rank says what this one says."""

    stalls = False

    def __init__(self, world: World, ledger: Ledger, device: torch.device, *, reduce_numel: int, **options: Any) -> None:
        super().__init__(ledger, device, reduce_numel=reduce_numel, **options)
        self.rank, self.size = world.rank, world.ranks
        self.desk = torch.device("cpu")
        if world.ranks > 1:
            by_peers = world.backend == "gloo"
            real = Peers(world.rank, world.ranks, reduce_numel, ALIGN_NUMEL) if by_peers else Collectives(world.rank, world.ranks)
            self.wire = _Silent(real)

    def spread(self, flat: Tensor, source: int = 0) -> None:
        self.ledger.add("broadcast", "", flat.nbytes if self.rank == source else 0)

    def exchange(self, values: Tensor) -> Tensor:
        if self.size > 1:
            self.ledger.begin("exchange")
        return values.unsqueeze(0).expand(self.size, *values.shape)

    def exchange_texts(self, text: str) -> list[str]:
        return [text] * self.size

    def diverge(self, values: Tensor, story: str) -> Tensor:
        del story
        return values.unsqueeze(0).expand(self.size, *values.shape)
