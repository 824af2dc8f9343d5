"""Unit: the segments of one block and the verbs on them. Each verb is written once, for every placement.

A unit knows what it holds; it does not know when anything should happen. That is the schedule's business.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from naught.comm import Group, Pending
from naught.flat import Meter
from naught.gradients import Gradients, GradTypes
from naught.layout import Layout, Span
from naught.placement import Placement
from naught.rules import Part
from naught.states import States, Updating
from naught.steps import UnitBytes
from naught.weights import Weights

__all__ = ["Home", "Segment", "Types", "Unit"]


class Types(NamedTuple):
    """The types of a segment's weights and gradients."""

    weights: torch.dtype
    grads: GradTypes


class Home(NamedTuple):
    """Where a segment lives: its placement, the ranks that share it, their device, who counts its bytes, and what share
    of its step a gradient is."""

    placement: Placement
    group: Group
    device: torch.device
    meter: Meter
    share: Callable[[], float]


class Segment:
    """One flat's worth of parameters that share dtype and trainability: their weights, gradients and states. `groups`
    tells the parameter group of each; there are none where nothing is trained."""

    def __init__(self, params: Sequence[nn.Parameter], layout: Layout, groups: Sequence[int], types: Types, home: Home) -> None:
        placement, group, device, meter, share = home
        self.layout, self.trained = layout, bool(groups)
        self.frozen = [not param.requires_grad for param in params]  # when the engine was made
        # Whole numbers have no NaN to read as while they are away, and are few: they stay.
        split = placement.param.split and types.weights.is_floating_point
        # Every rank has all of what is written: it updates all, or nobody updates any.
        self.everywhere = not placement.optim.split or not (self.trained or split)
        owned = Span(0, layout.numel) if self.everywhere else layout.shard(group.rank)
        self.states = States(layout, owned, groups, meter)
        if self.trained and types.weights != torch.float32:
            self.states.keep_masters([param.data for param in params], group, device)
        self.weights = Weights(params, layout, types.weights, group, meter, device=device, split=split)
        self.grads = Gradients(params, layout, types.grads, placement, group, meter, share)

    @property
    def target(self) -> Tensor:
        """The weights that this rank updates."""
        return self.weights.flat.tensor if self.everywhere else self.weights.shard

    def due(self, how: Updating, used: Sequence[bool]) -> Iterator[Part]:
        """What an update works on, on this rank; nothing if no rank used any of it."""
        total = self.grads.sum()
        if total is not None and any(used):
            yield from self.states.due(how, self.target, total, used)

    def written(self) -> None:
        """The rule has been applied: what modules compute with follows the masters."""
        if self.states.masters is not None:
            self.target.copy_(self.states.masters)

    def take_back(self) -> None:
        """The user has had the parameters: keep what was written."""
        self.weights.take_back()
        self.states.follow(self.target)

    def close(self) -> None:
        """Give the parameters whole weights of their own and let go of everything."""
        self.weights.hand_over()
        self.grads.drop()
        self.states.let_go()


class Unit:
    """A block's segments, and whether its weights can be used."""

    def __init__(self, name: str, segments: Sequence[Segment], placement: Placement) -> None:
        self.name, self.segments, self.placement = name, list(segments), placement
        self.trained = [segment for segment in self.segments if segment.trained]
        # What a gather brings: everything that is split, and of whole weights those that updates change.
        self.absentees = (
            [segment for segment in self.segments if segment.weights.split] if placement.param.split else self.trained
        )
        self.gathered_bytes = sum(segment.weights.flat.nbytes for segment in self.absentees)
        self.present = not placement.param.split or not self.absentees
        self.pending: list[Pending] = []

    def sizes(self) -> UnitBytes:
        weights = sum(
            segment.weights.flat.nbytes for segment in (self.absentees if self.placement.param.split else self.segments)
        )
        grads = sum(segment.grads.flat.nbytes for segment in self.trained)
        return UnitBytes(
            weights=weights,
            weight_shard=sum(segment.weights.shard.nbytes for segment in self.segments),
            grads=grads,
            grad_shard=sum(segment.grads.owned_bytes for segment in self.trained),
            state_shard=0,  # states rest on the device, where no plan moves them
            reduce_scratch=sum(segment.grads.scratch_bytes for segment in self.trained),
            trained=bool(self.trained),
        )

    def gather(self) -> None:
        """Start to make the weights whole, if they are not."""
        if not self.present and not self.pending:
            self.pending = [segment.weights.start_gather(self.name) for segment in self.absentees]

    def join(self) -> None:
        """Take part in a gather that another rank needs, also if this one has the weights."""
        if self.present or self.pending:
            self.ready()
            for segment in self.absentees:
                segment.weights.start_gather(self.name).wait()
        else:
            self.fetch()

    def fetch(self) -> None:
        """Make the weights whole, and wait until they are."""
        self.gather()
        self.ready()

    def ready(self) -> None:
        """Wait for the gather that is under way, if one is: from here on the weights can be used."""
        if self.pending:
            for pending in self.pending:
                pending.wait()
            self.pending.clear()
            for segment in self.absentees:
                segment.weights.bind()
            self.present = True

    def release(self) -> None:
        if self.placement.param.split and (self.present or self.pending):
            self.ready()
            for segment in self.absentees:
                segment.weights.release()
            self.present = not self.absentees

    def outdate(self, *, hide: bool) -> None:
        """Only the owners' slices are new: whole weights must be gathered before they are used again. Hidden, they read
        as NaN until then."""
        if self.placement.optim.split and not self.placement.param.split:
            for segment in self.trained if hide else ():
                segment.weights.hide()
            self.present = False

    def lend(self) -> None:
        """Give the parameters copies that stay valid; split weights are absent until they are gathered again."""
        self.fetch()
        for segment in self.segments:
            segment.weights.lend()
        self.present = not self.placement.param.split or not self.absentees

    def spread(self, writer: int) -> None:
        """Give every rank the copies that one has written to."""
        for segment in self.segments:
            segment.weights.spread(writer)

    def take_back(self) -> None:
        for segment in self.segments:
            segment.take_back()

    def open_grads(self) -> None:
        for segment in self.trained:
            segment.grads.open()

    def collect(self) -> None:
        for segment in self.trained:
            segment.grads.collect()

    def start_reduce(self) -> None:
        for segment in self.trained:
            segment.grads.start_reduce(self.name)

    def settle(self) -> None:
        for segment in self.trained:
            segment.grads.settle(self.name)

    def reduce(self) -> None:
        self.start_reduce()
        self.settle()

    def owes(self, last: bool) -> bool:
        """Whether this rank has gradients that must still be collected, or reduced where that is due."""
        due = self.placement.grad.split or last
        return any(segment.grads.is_made() or (due and segment.grads.unsent) for segment in self.trained)
