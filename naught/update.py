"""Update: one step of training once all gradients are reduced. One exchange decides for all ranks, and the host waits for its
device once."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from naught.block_norms import in_order, norms_of_each, numbers_of
from naught.comm import Group
from naught.errors import UsageError
from naught.gradients import Gradients
from naught.host_update import update_beside
from naught.husks import Husks, check_husks, untouched
from naught.rules import Part
from naught.segment import Segment
from naught.states import Updating
from naught.steps import order_of_updates
from naught.strays import Lookout
from naught.unit import Unit

__all__ = ["Norm", "UpdateLimits", "misused", "tampered", "update"]

_BATCH_BYTES = 4 << 20  # of gradients that one call of the rule takes up: their weights travel beside the next
_DEVICE_NUMEL = 1 << 25  # that are widened at a time on a device


class Norm(NamedTuple):
    """The norm of all gradients together, and if it is not finite, a parameter whose part on this rank is to blame."""

    total: float
    culprit: str | None = None

    @property
    def finite(self) -> bool:
        return math.isfinite(self.total)


@dataclass(frozen=True)
class UpdateLimits:
    """How an update goes about it. `part_numel` elements are updated at a time, and new weights of `flight_bytes` are under way
    at a time."""

    clip: float
    skips: bool  # a step whose norm is not finite
    part_numel: int
    flight_bytes: int
    delay_after: int | None = None  # steps; then weights on the host's side follow an update one step late. None: never


def update(
    units: Sequence[Unit],
    group: Group,
    how: Updating,
    limits: UpdateLimits,
    *,
    scale: float,
    tell: Callable[[], Exception | None],
    lookout: Lookout,
    delayed: bool = False,
) -> Norm:
    """Undo the scale of the loss, clip, and apply the rule to what this rank owns. If the norm is not finite, or something
    is amiss on any rank, nothing changes on any. What rests on the host may still be updated there when this returns; delayed,
    its weights follow the update before this one. `tell` says what is amiss, while the device computes the norm. What users have
    written to weights is heeded first.

    The ranks exchange their part of the norm, whether something is amiss, and which parameters they have used: one that
    no rank used stays as it is.
    """
    trained = [segment for unit in units for segment in unit.trained]
    used = [flag for segment in trained for flag in segment.grads.used]
    with group.noting():
        for segment in trained:
            segment.heed_writes()
    amiss, square = _look(trained, _questions(units, lookout), tell)
    amiss = amiss or group.noted
    rows = group.exchange(torch.tensor([amiss is not None, square, *used], dtype=torch.float64))
    if bool(rows[:, 0].any()):
        group.raise_together(amiss)
    norm = Norm(_root(rows[:, 1].tolist()) / scale)
    if norm.finite or not limits.skips:
        anywhere = iter((rows[:, 2:].amax(0) > 0).tolist())
        flags = {segment: [next(anywhere) for _ in segment.grads.used] for segment in trained}
        _apply(units, how, flags, limits, coefficient=_coefficient(norm.total, limits.clip) / scale, delayed=delayed)
    else:
        norm = norm._replace(culprit=_culprit(trained))
    return norm


def tampered(units: Sequence[Unit]) -> UsageError | None:
    """What users may have done to parameters that makes a step wrong."""
    try:
        check_husks(_husks(units))
    except UsageError as error:
        return error
    return misused(units)


def _husks(units: Sequence[Unit]) -> list[Husks]:
    return [segment.weights.husks for unit in units for segment in unit.segments if not segment.weights.bound]


def misused(units: Sequence[Unit]) -> UsageError | None:
    """The same, as far as no device has to be asked."""
    for segment in (segment for unit in units for segment in unit.segments):
        amiss = segment.weights.guard.tell()
        if amiss is not None:
            return amiss
        for slot, param, frozen in zip(segment.layout.slots, segment.weights.params, segment.frozen, strict=True):
            if frozen and param.requires_grad:
                return UsageError(
                    f'parameter "{slot.name}" was frozen when the engine was made and now requires a gradient',
                    fix="initialize with all that will ever be trained requiring gradients, and freeze it then",
                )
    return None


class _Question(NamedTuple):
    """Whether weights are as they should be, as the device will know; and what to do if they are not."""

    fine: Tensor
    otherwise: Callable[[], None]


def _questions(units: Sequence[Unit], lookout: Lookout) -> list[_Question]:
    asked = []
    if husks := _husks(units):
        asked.append(_Question(untouched(husks), partial(check_husks, husks)))
    if watched := lookout.watched([segment for unit in units for segment in unit.trained]):
        asked.append(_Question(lookout.none_strayed(watched), partial(lookout.heed, watched)))
    return asked


def _look(
    trained: Sequence[Segment], asked: Sequence[_Question], tell: Callable[[], Exception | None]
) -> tuple[Exception | None, float]:
    """What is amiss, such as a husk that was written to, and the sum of squares of this rank's slices: the same at every stage
    and on every tier. This is where the host waits for its device."""
    found = _norms([segment.grads for segment in trained if segment.counts])
    count = sum(norms.numel() for norms in found)
    found += [question.fine.double().reshape(1) for question in asked]
    squares = torch.cat(found).square_() if found else None
    amiss = tell()
    numbers = [] if squares is None else numbers_of(squares)
    for question, fine in zip(asked, numbers[count:], strict=True):
        try:
            if not fine:
                question.otherwise()
        except UsageError as error:
            amiss = amiss or error
    return amiss, in_order(numbers[:count])


def _norms(sums: Sequence[Gradients]) -> list[Tensor]:
    """Of the blocks of this rank's slices, in their order: those that have not left are read together."""
    here = [grads.still_here() for grads in sums]
    read = iter(norms_of_each([values for values in here if values is not None]))
    each = (grads.norms_sent() if values is None else next(read) for grads, values in zip(sums, here, strict=True))
    return [norms for pieces in each for norms in pieces]


def _culprit(trained: Sequence[Segment]) -> str | None:
    """A parameter whose gradient, as far as this rank owns it, is not finite."""
    for segment in trained:
        total = None
        with segment.home.group.noting():
            total = segment.grads.sum()
        segment.grads.let_copy_go()
        if total is None or bool(total.isfinite().all()):
            continue
        start = segment.kept.owned.start
        for slot in segment.layout.slots:
            part = total[max(0, slot.span.start - start) : max(0, slot.span.stop - start)]
            if not bool(part.isfinite().all()):
                return slot.name
    return None


def _root(squares: list[float]) -> float:
    """Ranks added in their order."""
    return math.sqrt(in_order(squares))


def _coefficient(norm: float, clip: float) -> float:
    """As torch.nn.utils.clip_grad_norm_ has it: never above one, and NaN where the norm is. A clip of 0 does not clip."""
    coefficient = clip / (norm + 1e-6) if clip else 1.0
    return 1.0 if coefficient > 1.0 else coefficient


Flags = dict[Segment, list[bool]]


def _apply(units: Sequence[Unit], how: Updating, used: Flags, limits: UpdateLimits, *, coefficient: float, delayed: bool) -> None:
    """Update what this rank owns. On the host that goes on beside everything else, a unit at a time. On the device a batch of
    units is in each call of the rule, and new weights travel beside the next batch."""
    due = {segment: flags for segment, flags in used.items() if any(flags) and not segment.grads.empty}
    caught_up = [unit for unit in units if unit.catch_up()]  # also what is not used in this step
    units = [unit for unit in units if any(segment in due for segment in unit.trained)]
    courier = _Courier(limits)
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
        for bundle in _bundles(parts):
            how.take(bundle, coefficient)
        for segment in segments:
            segment.written()
        _tell_autograd(changed)
        courier.send(changed)
    courier.arrive()


def _bundles(parts: Iterator[Part]) -> Iterator[list[Part]]:
    """As many as are widened at a time."""
    bundle: list[Part] = []
    numel = 0
    for part in parts:
        if bundle and numel + part.grads.numel() > _DEVICE_NUMEL:
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
    yield batch


class _Courier:
    """Brings new weights of whole flats from their owners to everybody, within a limit of bytes under way; lazy units are
    gathered where they are used next."""

    def __init__(self, limits: UpdateLimits) -> None:
        self.limits = limits
        self.under_way: deque[tuple[Unit, int]] = deque()
        self.nbytes = 0

    def send(self, units: Sequence[Unit]) -> None:
        for unit in units:
            unit.outdate(hide=unit.lazy)
            if unit.present or unit.lazy or unit.placement.param.split:
                continue
            while self.under_way and self.nbytes + unit.gathered_bytes > self.limits.flight_bytes:
                self._arrive()
            unit.gather()
            self.under_way.append((unit, unit.gathered_bytes))
            self.nbytes += unit.gathered_bytes

    def arrive(self) -> None:
        while self.under_way:
            self._arrive()

    def _arrive(self) -> None:
        unit, nbytes = self.under_way.popleft()
        unit.ready()
        self.nbytes -= nbytes
