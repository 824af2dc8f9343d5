"""Delivery: new weights of masters on disk go to where weights rest, a tile at a time."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor

from naught.home import Home
from naught.placement import Tier
from naught.spill import Room, Stored
from naught.streams import here
from naught.weights import Weights

__all__ = ["Delivery"]


class Delivery:
    """Of one segment's weights, to where the device has them after what it has been asked so far."""

    def __init__(self, weights: Weights, home: Home) -> None:
        self.weights, self.home, self.began = weights, home, here(home.device)

    def bring(self, tile: Tensor, place: int, span: slice, room: Callable[[], Room]) -> None:
        """The 32-bit weights of a tile. Those that rest on disk pass through a room."""
        weights, host = self.weights, self.home.host
        if weights.stored is not None:
            passing = room()
            weights.rounds(passing.of(tile.numel(), weights.stored.dtype), tile)
            weights.stored.write(place, passing)
            return
        assert weights.shard is not None
        if self.home.placement.param.tier is not Tier.DEVICE:
            weights.rounds(weights.shard[span], tile)
            return
        assert host is not None
        host.ferry.bring(tile, weights.shard[span], self.began, weights.rounds).wait()

    def bring_all(self, master: Stored) -> None:
        for place, tile in enumerate(master.tiles):
            self.bring(master.read(place, master.desk.room(0)), place, tile.span, partial(master.desk.room, 1))
