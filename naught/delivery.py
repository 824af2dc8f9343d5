"""Delivery: new weights of a tile of masters on disk go to where weights rest."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from naught.home import Home
from naught.placement import Tier
from naught.spill import Room
from naught.streams import Point
from naught.weights import Weights

__all__ = ["deliver"]


def deliver(tile: Tensor, place: int, span: slice, weights: Weights, home: Home, began: Point, room: Callable[[], Room]) -> None:
    """The 32-bit weights of a tile, as the device has them after a point of its order. Those that rest on disk pass through a
    room."""
    if weights.stored is not None:
        passing = room()
        weights.rounds(passing.of(tile.numel(), weights.stored.dtype), tile)
        weights.stored.write(place, passing)
        return
    assert weights.shard is not None
    if home.placement.param.tier is not Tier.DEVICE:
        weights.rounds(weights.shard[span], tile)
        return
    assert home.host is not None
    home.host.ferry.bring(tile, weights.shard[span], began, weights.rounds).wait()
