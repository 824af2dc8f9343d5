"""Imagined: a group of many ranks of which this process is one and the others are only thought of. They are all like this one,
and what they send costs nothing and is counted. Tensors are on torch's meta device: they have sizes and no contents."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from naught.comm.group import Group
from naught.comm.ledger import Ledger
from naught.comm.wires import Collectives, Peers, Pending, Wire
from naught.layout import ALIGN_NUMEL

__all__ = ["NOWHERE", "World", "imagine", "imagined", "make_group"]

NOWHERE = torch.device("meta")


class World(NamedTuple):
    """So many ranks, which of them this one is, and what they talk by."""

    ranks: int
    rank: int = 0
    backend: str = "nccl"


_NOW: list[World] = []  # at most one


@contextmanager
def imagine(world: World) -> Iterator[None]:
    """While open, engines are made for a world that is not there."""
    assert not _NOW, "one world at a time"
    _NOW.append(world)
    try:
        yield
    finally:
        _NOW.clear()


def imagined() -> World | None:
    """The world that is thought of; None: ranks are what they are."""
    return _NOW[0] if _NOW else None


def make_group(ledger: Ledger, device: torch.device, **options: Any) -> Group:
    """The ranks that share a model: those that are there, or those that are thought of."""
    world = imagined()
    return Group(ledger, device, **options) if world is None else _Imagined(world, ledger, device, **options)


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
