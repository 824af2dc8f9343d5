"""Stash: a sum of gradients that rests on the host until it is used there."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import NamedTuple

from torch import Tensor

from naught.block_norms import norms_of
from naught.ferry import Ferry, Sent
from naught.home import GradTypes, Home
from naught.spill import Room
from naught.streams import Point
from naught.sum_rooms import SumRoom, SumRooms

__all__ = ["HostSum"]


class _OnHost(NamedTuple):
    """A sum as an update finds it: where it is, and when it is there."""

    home: Tensor
    arrived: Point

    def tile(self, place: int, span: slice, room: Callable[[], Room]) -> Tensor:
        del place, room
        self.arrived.wait()
        return self.home[span]

    def whole(self) -> Tensor:
        self.arrived.wait()
        return self.home


class HostSum:
    """Leaves the device as soon as it is there. Its norm is taken on the way, by the same kernel as that of a sum that stays,
    so that it is the same."""

    def __init__(self, numel: int, types: GradTypes, home: Home) -> None:
        assert home.host is not None
        self.numel, self.dtype, self.summed, self.group = numel, types.on_host, types.sums, home.group
        self.ferry: Ferry = home.host.ferry
        self.rooms: SumRooms = home.host.rooms_for(numel, types.on_host)
        self.room: SumRoom | None = None
        self.sent: Sent | None = None  # None: there is no sum

    @property
    def home(self) -> Tensor:
        assert self.room is not None
        return self.room.memory.view(self.dtype)[: self.numel]

    def due(self) -> _OnHost:
        assert self.sent is not None
        return _OnHost(self.home, self.sent.arrived)

    def read_by(self, reader: Future[None]) -> None:
        """An update may read what is here also when it is dropped."""
        assert self.room is not None
        assert self.sent is not None
        self.room.read_by(reader, self.sent.arrived)

    @property
    def empty(self) -> bool:
        return self.sent is None

    @property
    def value(self) -> Tensor | None:
        if self.sent is None:
            return None
        self.sent.arrived.wait()
        return self.home

    @property
    def norms(self) -> list[Tensor]:
        return [] if self.sent is None else self.sent.norms

    def add(self, part: Tensor) -> None:
        if self.sent is None:
            with self.group.noting(again=True):  # one more may be too many for the host
                self.room = self.rooms.take()
            if self.room is None:
                return
        else:
            self.sent.arrived.hold(self.ferry.device)  # what is there is brought up again, and must be there
        self.sent = self.ferry.send(part, self.home, self.summed, onto=self.sent is not None)

    def rewritten(self) -> None:
        """Somebody has written to its home."""
        assert self.sent is not None
        summed = self.home.to(self.summed)
        self.home.copy_(summed)  # no wider than what is summed elsewhere
        self.sent = self.sent._replace(norms=[norms.to(self.ferry.device) for norms in norms_of(summed)])

    def let_copy_go(self) -> None:
        """It is no copy."""

    def drop(self) -> None:
        self.sent = None
        if self.room is not None:
            self.room.held = False
            self.room = None

    def close(self) -> None:
        self.drop()
        self.rooms.close()
