"""Tile update: states on disk, updated a tile at a time by whichever thread; new weights go to where they rest at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import groupby
from typing import Protocol

from torch import Tensor

from naught.delivery import Delivery
from naught.layout import Span
from naught.rules import Part
from naught.segment import Segment
from naught.spill import Room, Stored
from naught.states import Cut

__all__ = ["Due", "TileUpdate"]


class Due(Protocol):
    """A sum of gradients that waits for its update."""

    def tile(self, place: int, span: slice, room: Callable[[], Room]) -> Tensor:
        """What belongs to a tile, once it is there; where it has to be read, into a room."""

    def whole(self) -> Tensor: ...


class TileUpdate:
    """One update of a segment. `take` applies the rule to parts."""

    def __init__(self, segment: Segment, due: Due, take: Callable[[Sequence[Part]], None]) -> None:
        self.segment, self.due, self.take = segment, due, take
        self.delivery = Delivery(segment.weights, segment.home)
        master = segment.kept.master
        assert isinstance(master, Stored)
        self.master = master
        self.moments = {name: moment for name, moment in segment.kept.held.items() if isinstance(moment, Stored)}

    def pieces(self, cuts: Sequence[Cut], *, apart: bool) -> list[list[Cut]]:
        """What is updated at a time: the cuts of a tile, at whose ends they are divided. A rule that takes up whole parameters
        has all of them at once."""
        if apart:
            return [list(cuts)] if cuts else []
        each = self.master.desk.tile_numel
        divided = [part for cut in cuts for part in _divided(cut, each)]
        return [list(rows) for _, rows in groupby(divided, key=lambda cut: cut.span.start // each)]

    def do(self, cuts: Sequence[Cut]) -> None:
        each = self.master.desk.tile_numel
        places = range(cuts[0].span.start // each, -(-cuts[-1].span.stop // each))
        if len(places) > 1:
            self._do_all(cuts)
        else:
            self._do_one(places[0], cuts)

    def _do_one(self, place: int, cuts: Sequence[Cut]) -> None:
        """Read a tile of everything, update what is due in it, and write it back."""
        desk, span = self.master.desk, self.master.tiles[place].span
        grads = self.due.tile(place, span, lambda: desk.room(2 + len(self.moments)))
        weights = self.master.read(place, desk.room(0))
        moments = {name: stored.read(place, desk.room(1 + at)) for at, (name, stored) in enumerate(self.moments.items())}
        self.take([self._part(cut, span.start, weights, grads, moments) for cut in cuts])
        self.master.write(place, desk.room(0))
        for at, stored in enumerate(self.moments.values()):
            stored.write(place, desk.room(1 + at))
        self._deliver(place, weights)

    def _do_all(self, cuts: Sequence[Cut]) -> None:
        """The same with all tiles in memory at once."""
        weights, grads = self.master.whole(), self.due.whole()
        moments = {name: stored.whole() for name, stored in self.moments.items()}
        self.take([self._part(cut, 0, weights, grads, moments) for cut in cuts])
        for stored in (self.master, *self.moments.values()):
            stored.written()
            stored.will_change()
        for place, tile in enumerate(self.master.tiles):
            room = self.master.desk.room(0).of(tile.span.stop - tile.span.start, weights.dtype)
            self._deliver(place, room.copy_(weights[tile.span]))

    def _part(self, cut: Cut, start: int, weights: Tensor, grads: Tensor, moments: dict[str, Tensor]) -> Part:
        """A cut of tensors that begin at an element."""
        inside = slice(cut.span.start - start, cut.span.stop - start)
        values = {name: moment[inside] for name, moment in moments.items()}
        numbers = self.segment.kept.numbers[cut.first]
        return Part(weights[inside], grads[inside], values, numbers, cut.step, cut.group)

    def _deliver(self, place: int, weights: Tensor) -> None:
        span, room = self.master.tiles[place].span, partial(self.master.desk.room, 1 + len(self.moments))
        self.delivery.bring(weights, place, span, room)


def _divided(cut: Cut, each: int) -> list[Cut]:
    """At the ends of tiles."""
    start, stop = cut.span
    ends = [*range((start // each + 1) * each, stop, each), stop]
    return [cut._replace(span=Span(first, last)) for first, last in zip([start, *ends], ends, strict=False)]
