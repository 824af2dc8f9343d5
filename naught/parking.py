"""Parking: states that wait in host memory while something else needs the device. Between steps only."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from naught.errors import UsageError
from naught.flat import Flat
from naught.gradients import DeviceSum
from naught.holding import Buffer
from naught.moments import Packed, Wide
from naught.segment import Segment
from naught.spill import Stored
from naught.unit import Unit

__all__ = ["Parking"]

_HOST = torch.device("cpu")
_AWAY = "away"  # a category of the meter
Return = Callable[[], None]
_Movable = Tensor | Wide | Packed


class Parking:
    """Moves states of units to the host and back."""

    def __init__(self, units: Iterable[Unit]) -> None:
        self.segments = [segment for unit in units for segment in unit.segments]
        self.parked: list[Return] | None = None  # how everything comes back; None: nothing is away

    def park(self, include: Sequence[Any] | None, device: Any) -> None:
        if str(getattr(device, "value", device)) != "cpu":
            raise UsageError(f"states can only be moved to the cpu, not to {device}", fix='leave the device out, or give "cpu"')
        wanted = list(_KINDS) if include is None else [_name(kind) for kind in include]
        if self.parked is not None:
            raise UsageError("the states are away already", fix="call engine.reload_states() first")
        for segment in self.segments:
            segment.settle()
        self.parked = []
        try:
            for segment in self.segments:
                for kind in dict.fromkeys(wanted):
                    for bring_back in _KINDS[kind](segment):
                        self.parked.append(bring_back)
        except BaseException:
            self.fetch()
            raise

    def fetch(self) -> bool:
        """Whether anything was away."""
        if self.parked is None:
            return False
        while self.parked:
            self.parked[-1]()
            self.parked.pop()  # what finds no memory on its way comes with the next call, and all that is before it
        self.parked = None
        return True


def _name(kind: Any) -> str:
    name = str(getattr(kind, "value", kind))
    if name not in _KINDS:
        raise UsageError(f'there are no states of the kind "{name}"', fix=f"choose among {', '.join(_KINDS)}")
    return name


# Each moves what it moves one at a time, and tells how that comes back before it goes on to the next.
def _moments(segment: Segment) -> Iterator[Return]:
    states = segment.states
    if not segment.remote:  # else they rest on the host
        for name in list(states.held):
            moment = states.held[name]
            if not isinstance(moment, Stored):
                yield _aside(segment, "states", moment, partial(states.held.__setitem__, name))


def _masters(segment: Segment) -> Iterator[Return]:
    master = segment.states.master
    if master is not None and not segment.remote:
        assert not isinstance(master, Stored)
        yield _aside(segment, "masters", master, partial(setattr, segment.states, "master"))


def _weights(segment: Segment) -> Iterator[Return]:
    weights = segment.weights
    if weights.stays:
        weights.hide()
        if not weights.split:
            yield weights.bind  # after the flat: what goes first comes back last
        yield _flat_aside(weights.flat)
    elif weights.shard is not None and not weights.shard.device == _HOST != weights.device:  # else they rest on the host
        yield _aside(segment, "weights", weights.shard, partial(setattr, weights, "shard"))


def _gradients(segment: Segment) -> Iterator[Return]:
    owned = segment.grads.owned
    if segment.grads.flat.allocated:
        yield _flat_aside(segment.grads.flat)
    if owned.value is not None and isinstance(owned, DeviceSum):
        yield _aside(segment, Buffer.OWNED_GRADS, owned.value, partial(setattr, owned, "value"))


def _aside(segment: Segment, category: str, here: _Movable, put: Callable[[_Movable], None]) -> Return:
    """Puts a copy on the host in its place, and has its bytes counted where they are. Where a copy finds no memory, on the way
    there or back, nothing has changed."""
    meter, home = segment.weights.flat.meter, segment.weights.device
    host = _copied(here, _HOST)
    put(host)
    meter.change(category, -host.nbytes)
    meter.change(_AWAY, host.nbytes)

    def bring_back() -> None:
        put(_copied(host, home))
        meter.change(_AWAY, -host.nbytes)
        meter.change(category, host.nbytes)

    return bring_back


def _copied(movable: _Movable, to: torch.device) -> _Movable:
    return movable.to(to, copy=True) if isinstance(movable, Tensor) else movable.copied(to)


def _flat_aside(flat: Flat) -> Return:
    host = flat.tensor.to(_HOST, copy=True)
    flat.free()
    flat.meter.change(_AWAY, host.nbytes)

    def bring_back() -> None:
        flat.alloc()
        flat.tensor.copy_(host)
        flat.meter.change(_AWAY, -host.nbytes)

    return bring_back


# By DeepSpeed's names. There is no buffer of gradients beside the gradients themselves.
_KINDS: dict[str, Callable[[Segment], Iterator[Return]]] = {
    "optim_states": _moments,
    "hp_params": _masters,
    "lp_params": _weights,
    "lp_grads": _gradients,
    "contiguous_grad_buffer": lambda _: iter(()),
}
