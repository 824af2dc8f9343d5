"""Unit: the segments of one block and the verbs on them. Each verb is written once, for every placement.

A unit knows what it holds; it does not know when anything should happen. That is the schedule's business.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from naught.comm import Group, Pending
from naught.flat import Meter
from naught.gradients import Gradients
from naught.layout import Layout
from naught.placement import Placement
from naught.rules import Rule
from naught.states import States
from naught.steps import UnitBytes
from naught.weights import Weights

__all__ = ["Segment", "Unit"]


class Segment:
    """One flat's worth of parameters that share dtype and trainability: their weights, gradients and states."""

    def __init__(self, params: Sequence[nn.Parameter], layout: Layout, placement: Placement, group: Group, meter: Meter) -> None:
        self.layout, self.trained = layout, params[0].requires_grad
        self.weights = Weights(params, layout, group, meter, split=placement.param.split)
        self.grads = Gradients(layout, params[0].data, placement, group, meter)
        self.states = States(layout, self.grads.kept, meter)
        self.used = [False] * len(layout.slots)  # on this rank, since the last update

    def update(self, rule: Rule, *, used: Sequence[bool], hyper: dict[str, Any], coefficient: float) -> bool:
        """Apply the rule to this rank's part. Whether anything changed: slots that no rank used stay as they are."""
        total = self.grads.sum()
        if total is None or not any(used):
            return False
        if coefficient != 1.0:
            total.mul_(coefficient)
        whole = not self.grads.placement.optim.split
        target = self.weights.flat.tensor if whole else self.weights.shard
        self.states.update(rule, target, total, used=used, hyper=hyper)
        # Writing a flat does not bump the version counters by which autograd notices a change behind its back.
        torch.autograd.graph.increment_version(self.weights.params)
        return True

    def forget(self) -> None:
        """Let go of this step's gradients."""
        self.grads.drop()
        self.used = [False] * len(self.used)

    def close(self) -> None:
        """Give the parameters whole weights of their own and let go of everything."""
        self.weights.hand_over()
        self.grads.drop()
        self.states.moments.clear()


class Unit:
    """A block's segments, and whether its weights can be used."""

    def __init__(self, name: str, segments: Sequence[Segment], placement: Placement) -> None:
        self.name, self.segments, self.placement = name, list(segments), placement
        self.present = not placement.param.split
        self.pending: list[Pending] = []
        self.entered = False  # its module has been called since the last update

    @property
    def trained(self) -> list[Segment]:
        return [segment for segment in self.segments if segment.trained]

    def sizes(self) -> UnitBytes:
        world = self.segments[0].layout.world
        weights = sum(segment.weights.flat.nbytes for segment in self.segments)
        grads = sum(segment.grads.flat.nbytes for segment in self.trained)
        return UnitBytes(
            weights=weights,
            weight_shard=weights // world,
            grads=grads,
            grad_shard=grads // world,
            state_shard=0,  # states rest on the device, where no plan moves them
            reduce_scratch=grads - grads // world,
            trained=bool(self.trained),
        )

    def gather(self) -> None:
        """Start to make the weights whole, if they are not."""
        if not self.present and not self.pending:
            self.pending = [segment.weights.start_gather(self.name) for segment in self._absent()]

    def _absent(self) -> list[Segment]:
        """What a gather brings: everything that is split, and of whole weights those that updates change."""
        return self.segments if self.placement.param.split else self.trained

    def join(self) -> None:
        """Take part in a gather that another rank needs, also if this one has the weights."""
        if self.present or self.pending:
            self.ready()
            for segment in self._absent():
                segment.weights.start_gather(self.name).wait()
        else:
            self.gather()
            self.ready()

    def ready(self) -> None:
        """Wait until the weights can be used."""
        if self.pending:
            for pending in self.pending:
                pending.wait()
            self.pending.clear()
            for segment in self.segments:
                segment.weights.bind()
            self.present = True

    def release(self) -> None:
        if self.placement.param.split:
            self.ready()
            for segment in self.segments:
                segment.weights.release()
            self.present = False

    def lend(self) -> None:
        """Give the parameters copies that stay valid; the weights are absent until they are gathered again."""
        self.gather()
        self.ready()
        for segment in self.segments:
            segment.weights.lend()
        self.present = not self.placement.param.split

    def take_back(self) -> None:
        for segment in self.segments:
            segment.weights.take_back()

    def open_grads(self) -> None:
        for segment in self.trained:
            segment.grads.open()

    def start_reduce(self) -> None:
        for segment in self.trained:
            segment.grads.start_reduce(self.name)

    def settle(self) -> None:
        for segment in self.trained:
            segment.grads.settle(self.name)

    def reduce(self) -> None:
        self.start_reduce()
        self.settle()

    @property
    def owes(self) -> bool:
        """Whether this rank has gradients that no reduce has seen."""
        return any(segment.grads.open_here for segment in self.trained)
