"""Parking: states that wait in host memory while something else needs the device. Between steps only."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from naught.errors import UsageError
from naught.flat import Flat
from naught.gradients import DeviceSum
from naught.holding import Buffer
from naught.segment import Segment
from naught.spill import Stored
from naught.unit import Unit

__all__ = ["Parking"]

_HOST = torch.device("cpu")
_AWAY = "away"  # a category of the meter
Return = Callable[[], None]


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
                    self.parked += _KINDS[kind](segment)
        except BaseException:
            self.fetch()
            raise

    def fetch(self) -> bool:
        """Whether anything was away."""
        if self.parked is None:
            return False
        for bring_back in reversed(self.parked):
            bring_back()
        self.parked = None
        return True


def _name(kind: Any) -> str:
    name = str(getattr(kind, "value", kind))
    if name not in _KINDS:
        raise UsageError(f'there are no states of the kind "{name}"', fix=f"choose among {', '.join(_KINDS)}")
    return name


class _Mover(Protocol):
    def __call__(self, tensor: Tensor, to: torch.device) -> Tensor: ...


def _moments(segment: Segment) -> list[Return]:
    if segment.remote:
        return []  # they rest on the host
    states, move = segment.states, _mover(segment, "states")
    near = {name: moment for name, moment in states.held.items() if not isinstance(moment, Stored)}  # all of them
    host = {name: moment.move(partial(move, to=_HOST)) for name, moment in near.items()}
    states.held = dict(host)

    def bring_back() -> None:
        states.held = {name: moment.move(partial(move, to=segment.weights.device)) for name, moment in host.items()}

    return [bring_back]


def _masters(segment: Segment) -> list[Return]:
    states, move = segment.states, _mover(segment, "masters")
    if states.master is None or segment.remote:
        return []
    assert not isinstance(states.master, Stored)
    host = states.master = states.master.move(partial(move, to=_HOST))

    def bring_back() -> None:
        states.master = host.move(partial(move, to=segment.weights.device))

    return [bring_back]


def _weights(segment: Segment) -> list[Return]:
    weights, move = segment.weights, _mover(segment, "weights")
    if weights.stays:
        weights.hide()
        back = _flat(weights.flat)
        return [back] if weights.split else [weights.bind, back]  # they come back in reverse
    if weights.shard is None or weights.shard.device == _HOST != weights.device:
        return []  # they rest on the host
    host = weights.shard = move(weights.shard, _HOST)

    def bring_back() -> None:
        weights.shard = move(host, weights.device)

    return [bring_back]


def _gradients(segment: Segment) -> list[Return]:
    owned, move = segment.grads.owned, _mover(segment, Buffer.OWNED_GRADS)
    back = [_flat(segment.grads.flat)] if segment.grads.flat.allocated else []
    if owned.value is None or not isinstance(owned, DeviceSum):
        return back
    host = owned.value = move(owned.value, _HOST)

    def bring_back() -> None:
        owned.value = move(host, segment.weights.device)

    return [*back, bring_back]


def _flat(flat: Flat) -> Return:
    host = flat.tensor.to(_HOST, copy=True)
    flat.free()
    flat.meter.change(_AWAY, host.nbytes)

    def bring_back() -> None:
        flat.meter.change(_AWAY, -host.nbytes)
        flat.alloc()
        flat.tensor.copy_(host)

    return bring_back


def _mover(segment: Segment, category: str) -> _Mover:
    """Copies a tensor to the host or back, and has its bytes counted where they are."""
    meter = segment.weights.flat.meter

    def move(tensor: Tensor, to: torch.device) -> Tensor:
        sign = -1 if to is _HOST else 1
        meter.change(category, sign * tensor.nbytes)
        meter.change(_AWAY, -sign * tensor.nbytes)
        return tensor.to(to, copy=True)

    return move


# By DeepSpeed's names. There is no buffer of gradients beside the gradients themselves.
_KINDS: dict[str, Callable[[Segment], list[Return]]] = {
    "optim_states": _moments,
    "hp_params": _masters,
    "lp_params": _weights,
    "lp_grads": _gradients,
    "contiguous_grad_buffer": lambda _: [],
}
