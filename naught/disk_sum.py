"""Disk sum: a sum of gradients that rests on disk until it is used there."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import NamedTuple

from torch import Tensor

from naught.block_norms import norms_of
from naught.ferry import Ferry, Sent
from naught.home import GradTypes, Home
from naught.spill import Room, Stored

__all__ = ["DiskSum"]


class _OnDisk(NamedTuple):
    """A sum as an update finds it: where it is, and when it is there."""

    stored: Stored
    written: Future[None]

    def tile(self, place: int, span: slice, room: Callable[[], Room]) -> Tensor:
        del span
        self.written.result()
        return self.stored.read(place, room())

    def whole(self) -> Tensor:
        self.written.result()
        return self.stored.whole()


class DiskSum:
    """Leaves the device as soon as it is there, by way of a room on the host that the sums of all units share: while one of them
    is written the device computes the next."""

    def __init__(self, numel: int, types: GradTypes, home: Home) -> None:
        assert home.host is not None
        assert home.disk is not None
        self.dtype, self.group, self.disk = types.sums, home.group, home.disk
        self.ferry: Ferry = home.host.ferry
        self.stored = home.disk.take(numel, types.sums, "gradients")
        self.sent: Sent | None = None  # None: there is no sum
        self.written: Future[None] | None = None  # when all of it is on disk
        self.reader: Future[None] | None = None  # an update that may still read what was here before

    def due(self) -> _OnDisk:
        assert self.written is not None
        return _OnDisk(self.stored, self.written)

    def read_by(self, reader: Future[None]) -> None:
        self.reader = reader

    @property
    def empty(self) -> bool:
        return self.sent is None

    @property
    def value(self) -> Tensor | None:
        return None if self.sent is None else self.due().whole()

    @property
    def norms(self) -> list[Tensor]:
        return [] if self.sent is None else self.sent.norms

    def add(self, part: Tensor) -> None:
        with self.group.noting(again=True):
            if self.reader is not None:
                wait([self.reader])  # also for one that fails: who needs its result is told
                self.reader = None
            self.stored.will_change()
            room, again = self.disk.way_down(self.stored.nbytes), self.sent is not None
            if again:
                assert self.written is not None
                self.written.result()
                self.disk.crew.ask(len(self.stored.tiles), lambda place: self.stored.read_all(room, place)).result()
            self.sent = self.ferry.send(part, room.of(part.numel(), self.dtype), self.dtype, onto=again)
            self.written = self.disk.write(self.stored, self.sent.arrived)

    def rewritten(self) -> None:
        """Somebody has written to the value."""
        assert self.sent is not None
        assert self.stored.copy is not None
        self.stored.written()
        self.sent = self.sent._replace(norms=[norms.to(self.ferry.device) for norms in norms_of(self.stored.copy)])

    def let_copy_go(self) -> None:
        self.stored.will_change()

    def drop(self) -> None:
        self.sent = None
        self.stored.will_change()

    def close(self) -> None:
        self.drop()
        self.stored.give_back()
