"""States: what the update rule remembers of a segment on one rank, and how often each slot has been updated."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from naught.comm import Group
from naught.disk_side import DiskSide
from naught.layout import Layout, Span, intersect, pad
from naught.moments import Held, Packed, Wide
from naught.rooms import STRETCH_NUMEL
from naught.rules import Hyper, Part, Rule
from naught.shelves import Shelf
from naught.spill import Stored

__all__ = ["Cut", "Resting", "States", "Updating", "changed_since", "updating"]


class Updating(NamedTuple):
    """How an update works: by a rule, with the hyperparameters of each parameter group, on so many elements at a time."""

    rule: Rule
    hypers: Sequence[Hyper]
    most_numel: int

    def take(self, parts: Sequence[Part], coefficient: float) -> None:
        """Scale gradients and apply the rule, each group's with its own hyperparameters."""
        parts = _widened(parts)
        if coefficient != 1.0:
            torch._foreach_mul_([part.grads for part in parts], coefficient)
        for group, hyper in enumerate(self.hypers):
            members = [part for part in parts if part.group == group]
            if members:
                self.rule.update(members, hyper)
        for part in parts:
            for do in part.after:
                do()


def updating(rule: Rule, hypers: Sequence[Hyper], most_numel: int) -> Updating:
    """An update by the hyperparameters as they are now: what a schedule of the rate writes to them afterwards does not change one
    that still goes on."""
    return Updating(rule, [_as_it_is(hyper) for hyper in hypers] if rule.defers else hypers, most_numel)


def changed_since(how: Updating, hypers: Sequence[Hyper]) -> str | None:
    """The name of a hyperparameter that is not what it is in an update; None: all are."""
    pairs = ((was, now, name) for was, now in zip(how.hypers, hypers, strict=True) for name in was if name != "params")
    return next((name for was, now, name in pairs if not bool(torch.as_tensor(was[name] == now[name]).all())), None)


def _as_it_is(hyper: Hyper) -> Hyper:
    return {name: value.clone() if isinstance(value, Tensor) else value for name, value in hyper.items()}


def _widened(parts: Sequence[Part]) -> list[Part]:
    """With gradients in 32 bits: as they are, if they have them. A GPU has a faster kernel for lists of them."""
    narrow = [part.grads for part in parts if part.grads.dtype != torch.float32]
    wide = [torch.empty_like(grads, dtype=torch.float32) for grads in narrow]
    if wide:
        torch._foreach_copy_(wide, narrow)
    widened = iter(wide)
    return [part if part.grads.dtype == torch.float32 else part._replace(grads=next(widened)) for part in parts]


class Cut(NamedTuple):
    """Neighbouring elements that are updated alike, in coordinates of the part of the flat that this rank updates."""

    span: Span
    first: int  # of the slots
    step: int
    group: int


class Resting(NamedTuple):
    """Where states rest: on a shelf, or on disk if there is one for them; and whether moments are small, of 8 bits."""

    shelf: Shelf
    disk: DiskSide | None = None
    small: bool = False


class States:
    """Moments of the part of a flat that this rank updates, made where they rest when they are first needed. `groups` says which
    parameter group each slot belongs to."""

    def __init__(self, layout: Layout, owned: Span, groups: Sequence[int], rest: Resting) -> None:
        self.layout, self.owned, self.groups, self.rest = layout, owned, list(groups), rest
        self.held: dict[str, Held] = {}
        self.master: Held | None = None  # None: the weights tell, by themselves or with rests
        self.rests: Tensor | None = None  # what 16-bit weights lack of their masters; None: nothing, or there are masters
        self.steps = [0] * len(layout.slots)
        self.numbers: list[dict[str, Any]] = [{} for _ in layout.slots]  # what a rule keeps of whole parameters

    @property
    def masters(self) -> Tensor | None:
        """In 32 bits. Who writes to them says so."""
        return None if self.master is None else self.master.whole()

    @property
    def moments(self) -> dict[str, Tensor]:
        """In 32 bits. Who writes to them says so."""
        return {name: moment.whole() for name, moment in self.held.items()}

    def written(self) -> None:
        """Somebody has written to masters or moments."""
        for held in (self.master, *self.held.values()):
            if held is not None:
                held.written()

    def first_masters(self, weights: Sequence[Tensor], group: Group, device: torch.device, *, repeated: bool) -> Tensor:
        """32-bit masters of this rank's part, from weights that no rounding has touched yet, as rank 0 has them."""
        whole = torch.zeros(self.layout.numel, dtype=torch.float32, device=device)
        for slot, weight in zip(self.layout.slots, weights, strict=True):
            whole[slot.span.start : slot.span.stop].copy_(weight.reshape(-1))
        group.spread_whole(whole, repeated=repeated)
        return whole[self.owned.start : self.owned.stop]

    def keep_masters(self, masters: Tensor) -> None:
        if self.rest.disk is not None:
            self.master = self.rest.disk.take(self.owned.numel, torch.float32, "masters")
            self.master.fill(masters)
        else:
            place = self.rest.shelf.take(self.owned.numel, torch.float32, "masters", travels=True)
            self.master = Wide(place.copy_(masters), "masters")

    def keep_rests(self) -> Tensor:
        """Keep rests instead of masters."""
        self.rests = self.rest.shelf.take(self.owned.numel, torch.int16, "rests")
        return self.rests

    def follow(self, weights: Tensor, before: Tensor) -> None:
        """Somebody has written to the weights: where they are not what they were, masters or rests are theirs."""
        masters = self.masters
        if self.master is not None and masters is not None:
            for own, new, old in zip(*(torch.split(each, STRETCH_NUMEL) for each in (masters, weights, before)), strict=True):
                theirs = (new != old).to(own.device)
                own.copy_(torch.where(theirs, new.to(own.device, torch.float32), own))
            self.master.written()
        if self.rests is not None:
            self.rests.masked_fill_(weights != before, 0)

    def forget(self, names: Iterable[str]) -> None:
        """Let go of some moments."""
        for name in names:
            self.held.pop(name).give_back(self.rest.shelf)

    def let_go(self) -> None:
        self.forget(list(self.held))
        self.numbers = [{} for _ in self.numbers]
        if self.master is not None:
            self.master.give_back(self.rest.shelf)
            self.master = None
        if self.rests is not None:
            self.rest.shelf.give_back(self.rests, "rests")
            self.rests = None

    def part_of(self, index: int) -> Span:
        """What this rank updates of a slot, in coordinates of what it updates of the flat; maybe nothing."""
        common = intersect(self.layout.slots[index].span, self.owned) or Span(self.owned.start, self.owned.start)
        return Span(common.start - self.owned.start, common.stop - self.owned.start)

    def cuts(self, how: Updating, used: Sequence[bool]) -> list[Cut]:
        """What an update of the used slots works on, so much at a time. Counts the update."""
        self.prepare(how)
        for held in (self.master, *self.held.values()):
            if held is not None:
                held.will_change()
        found = []
        for cut in self._runs(used, apart=how.rule.apart):
            span, stride = cut.span, cut.span.numel if how.rule.apart else how.most_numel
            for start in range(span.start, span.stop, stride):
                found.append(cut._replace(span=Span(start, min(start + stride, span.stop))))
        self.steps = [step + was_used for step, was_used in zip(self.steps, used, strict=True)]
        return found

    def part(self, cut: Cut, weights: Tensor, grads: Tensor, *, whole: bool = True) -> Part:
        """A cut of the 32-bit weights that this rank updates, unless that is what is given, and of their gradients."""
        (start, stop), first, step, group = cut
        lent = {name: _near(moment).part(slice(start, stop)) for name, moment in self.held.items()}
        mine = weights[start:stop] if whole else weights
        after = tuple(part.after for part in lent.values() if part.after is not None)
        values = {name: part.values for name, part in lent.items()}
        return Part(mine, grads[start:stop], values, self.numbers[first], step, group, after)

    def lacks(self, how: Updating) -> bool:
        """Whether the rule wants moments that are not there: also later, when a hyperparameter asks for one more."""
        return any(name not in self.held for initial in self._wanted(how).values() for name in initial)

    def prepare(self, how: Updating) -> None:
        """Make them."""
        wanted = self._wanted(how)
        for name in dict.fromkeys(name for initial in wanted.values() for name in initial):
            if name in self.held:
                continue
            if self.rest.small:
                self.held[name] = Packed.on(self.rest.shelf, self.owned.numel, signed=how.rule.signs[name])
                continue
            made: Wide | Stored
            if self.rest.disk is not None:
                made = self.rest.disk.take(self.owned.numel, torch.float32, "states")
            else:
                made = Wide(self.rest.shelf.take(self.owned.numel, torch.float32, "states"))
            firsts = {index: wanted[group].get(name) for index, group in enumerate(self.groups)}
            for index, first in firsts.items():
                if first:
                    made.whole()[slice(*self.part_of(index))] = first
            if any(firsts.values()):
                made.written()
            self.held[name] = made

    def _wanted(self, how: Updating) -> Mapping[int, Mapping[str, float]]:
        """What the rule remembers of each parameter group, and the numbers that it starts from."""
        return {group: how.rule.states(how.hypers[group]) for group in dict.fromkeys(self.groups)}

    def _runs(self, used: Sequence[bool], *, apart: bool) -> Sequence[Cut]:
        """Runs of used slots with one count and one group. Unless slots are apart a run takes along the padding behind it, which
        stays zero under every rule: a kernel may round the end of an odd length by itself, and runs end where ranks do."""
        whole = not apart and all(used)
        if whole and _is_one(self.steps) and _is_one(self.groups):  # as mostly
            return [Cut(Span(0, self.owned.numel), 0, self.steps[0] + 1, self.groups[0])]
        runs: list[Cut] = []
        adjoins = False  # nothing lies behind the last run but what is next
        for index, was_used in enumerate(used):
            span = self.part_of(index)
            if not span.numel:
                continue
            if not apart:
                span = Span(span.start, pad(span.stop, 1, self.layout.align))
            alike = Cut(span, index, self.steps[index] + 1, self.groups[index])
            if was_used and adjoins and runs[-1][2:] == alike[2:]:
                runs[-1] = runs[-1]._replace(span=Span(runs[-1].span.start, span.stop))
            elif was_used:
                runs.append(alike)
            adjoins = was_used and not apart
        return runs


def _near(held: Held) -> Wide | Packed:
    """What is in memory; what is not is updated a tile at a time."""
    assert not isinstance(held, Stored)
    return held


def _is_one(values: Sequence[int]) -> bool:
    return values.count(values[0]) == len(values)
