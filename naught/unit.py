"""Unit: the flats of one block and the verbs on them. Each verb is written once, for every placement.

A unit knows what it holds; it does not know when anything should happen. That is the schedule's business.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from naught.comm import Group, Pending
from naught.errors import UsageError
from naught.flat import Flat, Meter
from naught.gradients import Gradients, gaps
from naught.layout import Layout, Slot, Span
from naught.placement import Placement
from naught.plan import Buffer, UnitBytes
from naught.rules import Rule

__all__ = ["Segment", "Unit"]


class _Alike(NamedTuple):
    """Neighbouring slots that have had the same number of updates, in coordinates of the part that is updated."""

    span: Span
    step: int


class Segment:
    """One flat's worth of parameters that share dtype and trainability."""

    def __init__(self, params: Sequence[nn.Parameter], layout: Layout, placement: Placement, group: Group, meter: Meter) -> None:
        self.params, self.layout, self.placement, self.group, self.meter = list(params), layout, placement, group, meter
        like = self.params[0].data
        category = Buffer.GATHERED if placement.param.split else "weights"
        self.weights = Flat(layout.numel, like, category=category, meter=meter)
        self.trained = self.params[0].requires_grad
        self.grads = Gradients(layout, like, placement, group, meter)
        self.states: dict[str, Tensor] = {}
        self.steps = [0] * len(layout.slots)
        self.used = [False] * len(layout.slots)  # on this rank, since the last update
        self.marks = torch.full((len(self.params),), _blank(like), dtype=like.dtype, device=like.device)
        self.views, self.husks, self.shard = self._adopt()

    def _adopt(self) -> tuple[list[Tensor], list[Tensor], Tensor]:
        """Move the parameters into the flat and make them views of it."""
        self.weights.alloc()
        flat = self.weights.tensor
        for gap in gaps(self.layout):
            flat[gap.start : gap.stop].zero_()
        views = [flat[slot.span.start : slot.span.stop].view(slot.shape) for slot in self.layout.slots]
        for param, view in zip(self.params, views, strict=True):
            view.copy_(param.data)
            param.data = view
        # A released parameter reads as NaN of its true shape and type; a write to it changes its mark.
        husks = [mark.expand(view.shape) for mark, view in zip(self.marks, views, strict=True)]
        mine = flat[self.grads.mine]
        if not self.placement.param.split:
            return views, husks, mine
        shard = mine.clone()
        self.meter.change("weights", shard.nbytes)
        _bind(self.params, husks)
        self.weights.free()
        return views, husks, shard

    def start_gather(self, unit: str) -> Pending:
        if self.placement.param.split:
            self._check_husks()
            self.weights.alloc()
            self.weights.tensor[self.grads.mine].copy_(self.shard)
        return self.group.gather(self.weights.tensor, unit)

    def _check_husks(self) -> None:
        written = ~self.marks.isnan() if self.marks.is_floating_point() else self.marks != 0
        if bool(written.any()):
            name = self.layout.slots[int(written.nonzero()[0])].name
            self.marks.fill_(_blank(self.marks))
            raise UsageError(
                f'parameter "{name}" was written to while it was released',
                fix="write inside engine.gathered(), or before the engine is made",
            )

    def lend(self) -> None:
        """Give the parameters copies of their own, which stay valid when the flat is gone."""
        if self.placement.param.split:
            _bind(self.params, [view.clone() for view in self.views])
            self.weights.free()

    def take_back(self) -> None:
        """Keep what was written to the copies, as far as it is this rank's."""
        if self.placement.param.split:
            shard = self.layout.shard(self.group.rank)
            copies = {slot.name: param.data.reshape(-1) for slot, param in zip(self.layout.slots, self.params, strict=True)}
            for slot, span in self.layout.owned(self.group.rank):
                part = copies[slot.name][span.start - slot.span.start : span.stop - slot.span.start]
                self.shard[span.start - shard.start : span.stop - shard.start].copy_(part)
            _bind(self.params, self.husks)

    def bind(self) -> None:
        if self.placement.param.split:
            _bind(self.params, self.views)

    def release(self) -> None:
        if self.placement.param.split:
            _bind(self.params, self.husks)
            self.weights.free()

    def update(self, rule: Rule, used: Sequence[bool], hyper: dict[str, Any], coefficient: float) -> bool:
        """Apply the rule to this rank's part; slots that no rank used stay as they are. Whether anything changed."""
        total = self.grads.sum()
        if total is None or not any(used):
            return False
        if coefficient != 1.0:
            total.mul_(coefficient)
        target = self.shard if self.placement.optim.split else self.weights.tensor
        if not self.states:
            self.states = {name: torch.zeros_like(target) for name in rule.states}
            self.meter.change("states", sum(state.nbytes for state in self.states.values()))
        for span, step in self._alike(used):
            part = slice(span.start, span.stop)
            states = {name: state[part] for name, state in self.states.items()}
            rule.update(target[part], total[part], states, step=step, hyper=hyper)
        self.steps = [step + was_used for step, was_used in zip(self.steps, used, strict=True)]
        torch.autograd.graph.increment_version(self.params)
        return True

    def forget(self) -> None:
        """Let go of this step's gradients."""
        self.grads.drop()
        self.used = [False] * len(self.used)

    def _alike(self, used: Sequence[bool]) -> list[_Alike]:
        """Runs of used slots with one count: mostly a single run, so mostly a single call of the kernel."""
        kept = self.grads.kept
        if all(used) and len(set(self.steps)) == 1:
            return [_Alike(Span(0, kept.stop - kept.start), self.steps[0] + 1)]
        runs: list[_Alike] = []
        # Zeros between the slots stay zero under every rule, so a run may go over them.
        for (slot, was_used), count in zip(zip(self.layout.slots, used, strict=True), self.steps, strict=True):
            start, stop = max(slot.span.start, kept.start), min(slot.span.stop, kept.stop)
            if start >= stop or not was_used:
                continue
            span = Span(start - kept.start, stop - kept.start)
            if runs and runs[-1].step == count + 1 and self._adjoins(runs[-1].span.stop + kept.start, slot):
                runs[-1] = _Alike(Span(runs[-1].span.start, span.stop), count + 1)
            else:
                runs.append(_Alike(span, count + 1))
        return runs

    def _adjoins(self, end: int, slot: Slot) -> bool:
        """Whether only a gap lies between a place in the flat and a slot."""
        return slot.span.start - end < self.layout.align and not any(
            end <= other.span.start < slot.span.start and other.span.numel for other in self.layout.slots
        )

    def close(self) -> None:
        """Give the parameters whole weights of their own and let go of everything."""
        for param, view in zip(self.params, self.views, strict=True):
            param.data = view.clone()
        self.grads.drop()
        self.weights.free()
        self.states.clear()


def _blank(like: Tensor) -> float:
    """What a released parameter reads as."""
    return float("nan") if like.is_floating_point() else 0.0


def _bind(params: Sequence[nn.Parameter], tensors: Sequence[Tensor]) -> None:
    for param, tensor in zip(params, tensors, strict=True):
        param.data = tensor


class Unit:
    """A block's segments, and whether its weights can be used."""

    def __init__(self, name: str, segments: Sequence[Segment], placement: Placement) -> None:
        self.name, self.segments, self.placement = name, list(segments), placement
        self.present = not placement.param.split
        self.pending: list[Pending] = []
        self.entered = False  # its module has been called since the last update

    @property
    def trained(self) -> bool:
        return any(segment.trained for segment in self.segments)

    def sizes(self) -> UnitBytes:
        trained = [segment for segment in self.segments if segment.trained]
        item = max((segment.weights.tensor.element_size() for segment in self.segments), default=0)
        flats = sum(segment.weights.nbytes for segment in self.segments)
        grads = sum(segment.weights.nbytes for segment in trained)
        world = self.segments[0].group.size if self.segments else 1
        return UnitBytes(
            weights=flats,
            weight_shard=flats // world,
            grads=grads,
            grad_shard=grads // world,
            state_shard=2 * grads // (world if self.placement.optim.split else 1),
            reduce_scratch=grads - grads // world if item else 0,
            trained=bool(trained),
        )

    def gather(self) -> None:
        """Start to make the weights whole, if they are not."""
        if self.present or self.pending:
            return
        for segment in self.segments:
            if self.placement.param.split or segment.trained:
                self.pending.append(segment.start_gather(self.name))

    def join(self) -> None:
        """Take part in a gather that another rank needs."""
        if not self.present and not self.pending:
            self.gather()
            self.ready()
            return
        self.ready()
        for segment in self.segments:
            if self.placement.param.split or segment.trained:
                segment.start_gather(self.name).wait()

    def ready(self) -> None:
        """Wait until the weights can be used."""
        if self.pending:
            for pending in self.pending:
                pending.wait()
            self.pending.clear()
            for segment in self.segments:
                segment.bind()
            self.present = True

    def release(self) -> None:
        if self.placement.param.split:
            self.ready()
            for segment in self.segments:
                segment.release()
            self.present = False

    def open_grads(self) -> None:
        for segment in self.segments:
            if segment.trained and not segment.grads.summed and segment.grads.under_way is None:
                segment.grads.open()

    def start_reduce(self) -> None:
        for segment in self.segments:
            if segment.trained:
                segment.grads.start_reduce(self.name)

    def settle(self) -> None:
        for segment in self.segments:
            segment.grads.settle(self.name)

    def reduce(self) -> None:
        self.start_reduce()
        self.settle()

    @property
    def owes(self) -> bool:
        """Whether this rank has gradients that no reduce has seen."""
        return any(segment.trained and segment.grads.open_here for segment in self.segments)
