"""States: what the update rule remembers of a segment on one rank, and how often each slot has been updated."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from naught.comm import Group
from naught.flat import Meter
from naught.layout import Layout, Slot, Span
from naught.rules import Part

__all__ = ["States"]


class _Alike(NamedTuple):
    """Neighbouring slots that have had the same number of updates, in coordinates of the part that is updated."""

    span: Span
    step: int


class States:
    """Moments of the part of a flat that this rank updates, made when they are first needed."""

    def __init__(self, layout: Layout, owned: Span, meter: Meter) -> None:
        self.layout, self.owned, self.meter = layout, owned, meter
        self.moments: dict[str, Tensor] = {}
        self.masters: Tensor | None = None  # None: the weights themselves have 32 bits
        self.steps = [0] * len(layout.slots)

    def keep_masters(self, weights: Sequence[Tensor], group: Group) -> None:
        """Keep 32-bit masters of this rank's part, from weights that no rounding has touched yet, as rank 0 has them."""
        whole = torch.zeros(self.layout.numel, dtype=torch.float32, device=weights[0].device)
        for slot, weight in zip(self.layout.slots, weights, strict=True):
            whole[slot.span.start : slot.span.stop].copy_(weight.reshape(-1))
        group.spread(whole)
        self.masters = whole[self.owned.start : self.owned.stop].clone()
        self.meter.change("masters", self.masters.nbytes)

    def let_go(self) -> None:
        self.meter.change("states", -sum(moment.nbytes for moment in self.moments.values()))
        self.moments.clear()
        if self.masters is not None:
            self.meter.change("masters", -self.masters.nbytes)
            self.masters = None

    def due(
        self, initial: Mapping[str, float], weights: Tensor, grads: Tensor, *, used: Sequence[bool], most_numel: int
    ) -> Iterator[Part]:
        """What an update of the used slots works on, at most so many elements in a part. Counts the update."""
        if not self.moments:
            self.moments = {name: torch.full_like(weights, start, dtype=torch.float32) for name, start in initial.items()}
            self.meter.change("states", sum(moment.nbytes for moment in self.moments.values()))
        if all(used) and self.steps.count(self.steps[0]) == len(self.steps):  # as mostly
            runs = [_Alike(Span(0, self.owned.numel), self.steps[0] + 1)]
        else:
            runs = self._alike(used)
        target = weights if self.masters is None else self.masters
        for span, step in runs:
            for start in range(span.start, span.stop, most_numel):
                stop = min(start + most_numel, span.stop)
                moments = {name: moment[start:stop] for name, moment in self.moments.items()}
                yield Part(target[start:stop], grads[start:stop], moments, step)
        self.steps = [step + was_used for step, was_used in zip(self.steps, used, strict=True)]

    def _alike(self, used: Sequence[bool]) -> list[_Alike]:
        """Runs of used slots with one count."""
        runs: list[_Alike] = []
        # Zeros between the slots stay zero under every rule, so a run may go over them.
        for (slot, was_used), count in zip(zip(self.layout.slots, used, strict=True), self.steps, strict=True):
            start, stop = max(slot.span.start, self.owned.start), min(slot.span.stop, self.owned.stop)
            if start >= stop or not was_used:
                continue
            span = Span(start - self.owned.start, stop - self.owned.start)
            if runs and runs[-1].step == count + 1 and self._adjoins(runs[-1].span.stop + self.owned.start, slot):
                runs[-1] = _Alike(Span(runs[-1].span.start, span.stop), count + 1)
            else:
                runs.append(_Alike(span, count + 1))
        return runs

    def _adjoins(self, end: int, slot: Slot) -> bool:
        """Whether only a gap lies between a place in the flat and a slot."""
        return slot.span.start - end < self.layout.align and not any(
            end <= other.span.start < slot.span.start and other.span.numel for other in self.layout.slots
        )
