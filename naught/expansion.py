"""Expansion: from what happened to the steps that it needs, each where it is needed. Pure; moves nothing ahead."""

from __future__ import annotations

from collections.abc import Sequence

from naught.errors import PlanError
from naught.placement import Kind, Tier
from naught.steps import EVERY_UNIT, Event, Moment, Pass, Placements, Sizes, Step, Verb

__all__ = ["expand"]


def expand(events: Sequence[Event], placements: Placements, sizes: Sizes, which: Pass) -> list[Step]:
    """The steps that the events need, each where it is needed: no prefetching yet."""
    expansion = _Expansion(placements, sizes, which)
    last_done = {event.unit: at for at, event in enumerate(events) if event.moment is Moment.DONE}
    for at, (moment, unit) in enumerate(events):
        if unit not in placements:
            raise PlanError(f'the record names a unit "{unit}" that the model does not have')
        if moment in (Moment.ENTER, Moment.GRAD):
            expansion.open(unit, backward=moment is Moment.GRAD)
        elif moment is Moment.EXIT:
            expansion.leave(unit)
        else:
            expansion.finish(unit, for_good=last_done[unit] == at)
    expansion.close()
    return expansion.steps


class _Expansion:
    """The list so far, and what is known of each unit at its end."""

    def __init__(self, placements: Placements, sizes: Sizes, which: Pass) -> None:
        self.placements, self.sizes, self.which = placements, sizes, which
        self.steps: list[Step] = []
        # Whole weights are stale after an update that only owners made; split ones are absent until gathered.
        self.present = {
            unit for unit, place in placements.items() if not place.param.split and not (place.optim.split and which.first)
        }
        self.depth: dict[str, int] = {}  # forwards that have begun and not ended, in order of first use
        self.backward: set[str] = set()  # between grad and done
        self.reduced: set[str] = set()

    def open(self, unit: str, *, backward: bool) -> None:
        if unit not in self.present:
            self._add(unit, Kind.PARAM, *_FETCH[self.placements[unit].param.tier])
            self.present.add(unit)
        if backward:
            if self.sizes[unit].trained and unit not in self.backward:
                self._add(unit, Kind.GRAD, Verb.COLLECT)
            self.backward.add(unit)
        else:
            self.depth[unit] = self.depth.get(unit, 0) + 1
        self._add(unit, Kind.GRAD if backward else Kind.PARAM, Verb.USE)

    def leave(self, unit: str) -> None:
        self.depth[unit] = max(0, self.depth.get(unit, 0) - 1)
        self._release_if_idle(unit)
        self._add(unit, Kind.PARAM, Verb.LEAVE)

    def finish(self, unit: str, *, for_good: bool) -> None:
        """A unit's gradients are complete, for now or for good: a late gradient may follow."""
        placement = self.placements[unit]
        self.backward.discard(unit)
        self._release_if_idle(unit)
        # Whole gradients wait for the last micro-batch and for the last of their own: summing them twice is wrong.
        due = placement.grad.split or (self.which.last and for_good)
        if self.sizes[unit].trained and due:
            on_top = unit in self.reduced or not self.which.first
            if placement.grad.tier is Tier.DISK and on_top:
                self._add(unit, Kind.GRAD, Verb.READ)
            self._add(unit, Kind.GRAD, Verb.REDUCE, Verb.SETTLE, *_STASH[placement.sums_rest])
            self.reduced.add(unit)
            if self.which.last and self.which.early and for_good:
                self._update(unit)
        self._add(unit, Kind.GRAD, Verb.LEAVE)

    def close(self) -> None:
        if not self.which.last or self.which.early or not self.reduced:
            return
        self._add(EVERY_UNIT, Kind.GRAD, Verb.NORM)
        # In the order of the next forward, so that its first unit is ready first; units that only a backward met last.
        for unit in [*(unit for unit in self.depth if unit in self.reduced), *sorted(self.reduced - set(self.depth))]:
            self._update(unit)

    def _update(self, unit: str) -> None:
        """Bring gradient and states to where the update runs, and new weights to where they rest."""
        placement = self.placements[unit]
        on_device = placement.optim.tier is Tier.DEVICE
        grad, param = placement.sums_rest, placement.param.tier
        if grad is Tier.DISK:
            self._add(unit, Kind.GRAD, Verb.READ)
        if on_device and grad is not Tier.DEVICE:
            self._add(unit, Kind.GRAD, Verb.LOAD)
        if placement.optim.tier is Tier.DISK:
            self._add(unit, Kind.OPTIM, Verb.READ)
        self._add(unit, Kind.OPTIM, Verb.UPDATE)
        if placement.optim.tier is Tier.DISK:
            self._add(unit, Kind.OPTIM, Verb.WRITE)
        if on_device != (param is Tier.DEVICE):
            self._add(unit, Kind.PARAM, Verb.STORE if on_device else Verb.LOAD)
        if param is Tier.DISK:
            self._add(unit, Kind.PARAM, Verb.WRITE)
        if placement.optim.split and not placement.param.split:
            self.present.discard(unit)

    def _release_if_idle(self, unit: str) -> None:
        idle = not self.depth.get(unit) and unit not in self.backward
        if idle and self.placements[unit].param.split and unit in self.present:
            self._add(unit, Kind.PARAM, Verb.RELEASE)
            self.present.discard(unit)

    def _add(self, unit: str, kind: Kind, *verbs: Verb) -> None:
        self.steps += [Step(verb, kind, unit) for verb in verbs]


_FETCH = {
    Tier.DEVICE: (Verb.GATHER,),
    Tier.HOST: (Verb.GATHER,),
    Tier.DISK: (Verb.READ, Verb.GATHER),
}
_STASH: dict[Tier, tuple[Verb, ...]] = {
    Tier.DEVICE: (),
    Tier.HOST: (Verb.STORE,),
    Tier.DISK: (Verb.STORE, Verb.WRITE),
}
