"""Sites: where states that rest on the host are updated: there, by a crew of threads; or on the device, which they visit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from naught.ferry import Ferry
from naught.host_crew import Crew
from naught.rules import Part
from naught.streams import Lane, Point

__all__ = ["VISITS_AT_A_TIME", "DeviceSite", "HostSite", "Site"]

_HOST_BYTES = 1 << 24  # of gradients that a thread updates at a time: with less, threads wait for each other's Python
VISITS_AT_A_TIME = 3  # one on its way up, one that is updated, one on its way back

Take = Callable[[Part], None]


class Site(Protocol):
    crew: Crew
    visited: bool  # states leave the host to be updated here

    def most_numel(self, states: int, grads: torch.dtype) -> int:
        """Elements of a piece, where a rule remembers so many numbers of each."""

    def update(self, part: Part, arrived: Point, take: Take) -> None:
        """Have a part of what rests on the host updated, once its gradients are there; when this returns, it is."""


class HostSite:
    visited = False

    def __init__(self, crew: Crew) -> None:
        self.crew = crew

    def most_numel(self, states: int, grads: torch.dtype) -> int:
        del states
        return _HOST_BYTES // grads.itemsize

    def update(self, part: Part, arrived: Point, take: Take) -> None:
        arrived.wait()
        grads = part.grads
        wide = grads if grads.dtype == torch.float32 else self.crew.scratch(grads.numel()).copy_(grads)
        take(part._replace(grads=wide))


class DeviceSite:
    """What visits the device goes through the staging by which gradients go down, which is idle while anything is updated. The
    host's memory sets the pace of an update; the link has time to spare, and the device reckons in no time."""

    visited = True

    def __init__(self, crew: Crew, ferry: Ferry) -> None:
        self.crew, self.ferry = crew, ferry
        # Weights that are waited for go up in a lane of their own, not behind these.
        self.up, self.aside, self.down = (Lane(ferry.device) for _ in range(3))

    def most_numel(self, states: int, grads: torch.dtype) -> int:
        return self.ferry.room_for((1 + states) * 4 + grads.itemsize)

    def update(self, part: Part, arrived: Point, take: Take) -> None:
        residents, meter = [part.weights, *part.states.values()], self.ferry.meter
        away = [*residents, part.grads]
        meter.move("to the device", sum(tensor.nbytes for tensor in away))
        meter.move("to the host", sum(tensor.nbytes for tensor in residents))
        with self.ferry.next_slot() as slot:
            near = slot.divided(away)
            for point in (slot.free, arrived):
                self.up.follow(point)
            with self.up.open():
                _copy(away, near)
            self.aside.follow(self.up.point())
            with self.aside.open():
                weights, *states, grads = near
                take(part._replace(weights=weights, states=dict(zip(part.states, states, strict=True)), grads=grads))
            self.down.follow(self.aside.point())
            with self.down.open():
                _copy(near[:-1], residents)
            slot.free = back = self.down.point(blocking=True)
        back.wait()


def _copy(sources: Sequence[Tensor], places: Sequence[Tensor]) -> None:
    for place, source in zip(places, sources, strict=True):
        place.copy_(source, non_blocking=True)
