"""Applying: the rule on what a rank owns, once it is decided that there is a step, and new weights on their way to everybody."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch

from naught.host_update import update_beside
from naught.rules import Part
from naught.segment import Segment
from naught.states import Updating
from naught.steps import order_of_updates
from naught.torn import IN_THE_STEP, tearing
from naught.unit import Unit

__all__ = ["Courier", "apply", "prepare"]

_BATCH_BYTES = 4 << 20  # of gradients that one call of the rule takes up: their weights travel beside the next
_DEVICE_NUMEL = 1 << 25  # that are widened at a time on a device


def prepare(trained: Iterable[Segment], how: Updating) -> Exception | None:
    """Have all the moments that an update of what is summed wants, while nothing has changed: there may be no memory for them,
    and that is returned, to be raised on all ranks together."""
    try:
        for segment in trained:
            if not segment.grads.empty:
                segment.prepare(how)
    except Exception as error:
        return error
    return None


@tearing(IN_THE_STEP)
def apply(
    units: Sequence[Unit],
    how: Updating,
    used: Mapping[Segment, Sequence[bool]],
    coefficient: float,
    courier: Courier,
    *,
    delayed: bool,
) -> None:
    """Update what this rank owns. On the host that goes on beside everything else, a unit at a time. On the device a batch of
    units is in each call of the rule, and new weights travel beside the next batch; some may be under way when this returns."""
    due = {segment: flags for segment, flags in used.items() if any(flags) and not segment.grads.empty}
    caught_up = [unit for unit in units if unit.catch_up()]  # also what is not used in this step
    units = [unit for unit in units if any(segment in due for segment in unit.trained)]
    remote = [unit for unit in units if unit.remote]
    delayed = delayed and how.rule.defers
    for segment in (segment for unit in order_of_updates(remote) for segment in unit.trained if segment in due):
        update_beside(segment, how, due[segment], coefficient, delayed=delayed)
    renewed = caught_up if delayed else list(dict.fromkeys([*remote, *caught_up]))
    _tell_autograd(renewed)
    courier.send(renewed)
    on_device = how._replace(most_numel=min(how.most_numel, _DEVICE_NUMEL))
    for changed in _batches([unit for unit in units if not unit.remote]):
        segments = [segment for unit in changed for segment in unit.trained if segment in due]
        parts = (part for segment in segments for part in segment.due(on_device, due[segment]))
        for bundle in _bundles(parts, on_device.most_numel):
            how.take(bundle, coefficient)
        for segment in segments:
            segment.written()
        _tell_autograd(changed)
        courier.send(changed)


def _bundles(parts: Iterator[Part], most_numel: int) -> Iterator[list[Part]]:
    """As many as are widened at a time."""
    bundle: list[Part] = []
    numel = 0
    for part in parts:
        if bundle and numel + part.grads.numel() > most_numel:
            yield bundle
            bundle, numel = [], 0
        bundle.append(part)
        numel += part.grads.numel()
    if bundle:
        yield bundle


def _tell_autograd(units: Sequence[Unit]) -> None:
    """Writing a flat does not bump the version counters by which autograd notices a change behind its back."""
    segments = [segment for unit in units for segment in unit.trained]
    torch.autograd.graph.increment_version([param for segment in segments for param in segment.weights.params])
    for segment in segments:
        if segment.known is not None:
            segment.known.renew()


def _batches(units: Sequence[Unit]) -> Iterator[list[Unit]]:
    """Units in their order, as many at a time as make a call worth its while."""
    batch: list[Unit] = []
    nbytes = 0
    for unit in units:
        batch.append(unit)
        nbytes += sum(segment.grads.mine.nbytes for segment in unit.trained)
        if nbytes >= _BATCH_BYTES:
            yield batch
            batch, nbytes = [], 0
    if batch:
        yield batch


class Courier:
    """Brings new weights of whole flats from their owners to everybody, within a limit of bytes under way; lazy units are
    gathered where they are used next. Unless it goes `at_once` weights stay hidden until they are to arrive."""

    def __init__(self, most_bytes: int, *, at_once: bool = True) -> None:
        self.most_bytes, self.at_once = most_bytes, at_once
        self.under_way: deque[tuple[Unit, int]] = deque()
        self.nbytes = 0
        self.last: list[Unit] = []  # what is not to be sent yet, and what the host still updates: who gathers it waits for that

    def send(self, units: Sequence[Unit]) -> None:
        for unit in units:
            unit.outdate(hide=unit.lazy or not self.at_once)
            if unit.present or unit.lazy or unit.placement.param.split:
                continue
            if unit.remote or not self.at_once:
                self.last.append(unit)
            else:
                self._send(unit)

    def arrive(self) -> None:
        """Wait until everybody has all of them."""
        for unit in self.last:
            self._send(unit)
        self.last.clear()
        while self.under_way:
            self._arrive()

    def forget(self) -> None:
        """Whoever uses a unit next waits for its weights."""
        self.last.clear()
        self.under_way.clear()
        self.nbytes = 0

    def _send(self, unit: Unit) -> None:
        while self.under_way and self.nbytes + unit.gathered_bytes > self.most_bytes:
            self._arrive()
        unit.gather()
        self.under_way.append((unit, unit.gathered_bytes))
        self.nbytes += unit.gathered_bytes

    def _arrive(self) -> None:
        unit, nbytes = self.under_way.popleft()
        unit.ready()
        self.nbytes -= nbytes
