"""Segment: one flat's worth of parameters, and where its weights, gradients and states are."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from naught.comm import Group, Pending
from naught.ferry import Arrival, Ferry
from naught.flat import Meter
from naught.gradients import DeviceSum, Gradients, GradTypes, Sum
from naught.holding import STRETCH_NUMEL
from naught.host_crew import HostCrew
from naught.layout import Layout, Span
from naught.placement import Placement, Tier
from naught.rounding import Rounds, fold, half_up, nearest, unfold
from naught.rules import Part
from naught.shelves import DeviceShelf, Shelf
from naught.stash import HostSum
from naught.states import Cut, States, Updating
from naught.streams import here
from naught.weights import Weights

__all__ = ["Home", "HostSide", "Segment", "Types"]


class Types(NamedTuple):
    """The types of a segment's weights and gradients. With small masters 16-bit weights are rounded half up, and where they are
    on the device, rests are kept beside them instead of masters."""

    weights: torch.dtype
    grads: GradTypes
    small_masters: bool = False


class HostSide(NamedTuple):
    """What a rank has on its host: memory, the way there and back, and threads that update."""

    shelf: Shelf
    ferry: Ferry
    crew: HostCrew

    def close(self) -> None:
        """Once nothing rests there any more."""
        self.crew.stop()
        self.ferry.close()


class Home(NamedTuple):
    """Where a segment lives: its placement, the ranks that share it, their device, who counts its bytes, what share of its
    step a gradient is, and the host, if anything rests there."""

    placement: Placement
    group: Group
    device: torch.device
    meter: Meter
    share: Callable[[], float]
    host: HostSide | None

    def shelf(self, tier: Tier) -> Shelf:
        if tier is Tier.DEVICE:
            return DeviceShelf(self.device, self.meter)
        assert self.host is not None
        return self.host.shelf


class Segment:
    """Parameters that share dtype and trainability: their weights, gradients and states. `groups` tells the parameter group
    of each; there are none where nothing is trained."""

    def __init__(self, params: Sequence[nn.Parameter], layout: Layout, groups: Sequence[int], types: Types, home: Home) -> None:
        self.home, self.layout, self.trained = home, layout, bool(groups)
        placement, group = home.placement, home.group
        self.frozen = [not param.requires_grad for param in params]  # when the engine was made
        # Whole numbers have no NaN to read as while they are away, and are few: they stay.
        split = placement.param.split and types.weights.is_floating_point
        # Every rank has all of what is written: it updates all, or nobody updates any.
        self.everywhere = not placement.optim.split or not (self.trained or split)
        owned = Span(0, layout.numel) if self.everywhere else layout.shard(group.rank)
        self.updating: Future[None] | None = None  # an update beside everything else that may not be over
        self.refreshing: Arrival | None = None  # new weights that may still be on their way to where they rest
        self.remote = self.trained and placement.optim.tier is not Tier.DEVICE  # it is updated on the host
        self.kept = States(layout, owned, groups, home.shelf(placement.optim.tier if self.trained else Tier.DEVICE))
        masters: Tensor | None = None  # None: the weights have 32 bits, and are updated where they are
        if self.trained and (self.remote or types.weights != torch.float32):
            masters = self.kept.first_masters([param.data for param in params], group, home.device)
        # Masters on the host are what split weights that rest there are made of: the host keeps nothing twice.
        own = None if self.remote and placement.param.tier is not Tier.DEVICE else home.shelf(placement.param.tier)
        self.rounds: Rounds = half_up if types.small_masters else nearest
        self.weights = Weights(
            params, layout, types.weights, home.device, group, home.meter, own, split=split, rounds=self.rounds
        )
        self.unfolded: Tensor | None = None  # a copy of masters that are kept as weights and rests, while somebody has it
        self.before: Tensor | None = None  # the weights when they were lent
        near = placement.param.tier is Tier.DEVICE and placement.optim.tier is Tier.DEVICE
        if masters is not None and types.small_masters and near and types.weights == torch.bfloat16:
            self.kept.keep_rests()
            self._fold(masters)
        elif masters is not None:
            self.kept.keep_masters(masters)
        owner: Sum = DeviceSum(types.grads.sums, home.meter)
        if self.remote:
            assert home.host is not None
            owner = HostSum(owned.numel, types.grads.sums, home.host.ferry, home.host.shelf)
        self.grads = Gradients(params, layout, types.grads, placement, group, home.meter, home.share, owner)

    @property
    def states(self) -> States:
        """What the rule remembers, once no update is under way."""
        self.wait()
        return self.kept

    def wait(self) -> None:
        """Until no update is under way. One that failed is never over."""
        if self.updating is not None:
            self.updating.result()
            self.updating = None

    def settle(self) -> None:
        """Until nothing of it is under way: no update, and no weights on their way up."""
        self.wait()
        self._refreshed()
        here(self.home.device).wait()

    @property
    def target(self) -> Tensor:
        """The weights that this rank updates, in their own type; where they are made of masters each time, a copy."""
        if self.everywhere:
            return self.weights.flat.tensor
        if self.weights.shard is not None:
            self._refreshed()
            return self.weights.shard
        masters = self.states.masters
        assert masters is not None
        rounded = torch.empty_like(masters, dtype=self.weights.flat.tensor.dtype)
        self.rounds(rounded, masters)
        return rounded

    @property
    def exact(self) -> Tensor:
        """The weights that this rank updates, in the precision in which it does. What is written to them counts once it is
        told by `written`; until the next update."""
        states = self.states
        if states.masters is not None:
            return states.masters
        if states.rests is None:
            return self.target
        if self.unfolded is None:
            self.unfolded = torch.empty(states.rests.shape, dtype=torch.float32)
            stretches = (torch.split(tensor, STRETCH_NUMEL) for tensor in (self.unfolded, self.target, states.rests))
            for wide, weights, rests in zip(*stretches, strict=True) if self.unfolded.numel() else ():
                wide.copy_(unfold(weights, rests))
        return self.unfolded

    def _fold(self, wide: Tensor) -> None:
        assert self.kept.rests is not None
        stretches = (torch.split(tensor, STRETCH_NUMEL) for tensor in (wide, self.target, self.kept.rests))
        for part, weights, rests in zip(*stretches, strict=True) if wide.numel() else ():
            fold(part.to(weights.device), weights, rests)

    def due(self, how: Updating, used: Sequence[bool]) -> Iterator[Part]:
        """What an update works on, on this rank."""
        total = self.grads.sum()
        assert total is not None
        states = self.states
        if states.rests is None:
            weights = self.exact
            return (states.part(cut, weights, total) for cut in states.cuts(how, used))
        self.unfolded = None
        return self._due_unfolded(states.cuts(how, used), self.target, states.rests, total)

    def _due_unfolded(self, cuts: Sequence[Cut], weights: Tensor, rests: Tensor, total: Tensor) -> Iterator[Part]:
        """Masters are put together when it is their turn, and taken apart again behind it."""
        for cut in cuts:
            span = slice(*cut.span)
            wide = unfold(weights[span], rests[span])
            yield self.kept.part(cut, wide, total, whole=False)._replace(after=partial(fold, wide, weights[span], rests[span]))

    def start_gather(self, unit: str) -> Pending:
        weights = self.weights
        return self.home.group.gather(weights.flat.tensor, weights.flat.slices, unit, self._bring_own())

    def _bring_own(self) -> Arrival | None:
        """Have this rank's slice put into the flat; None: it is there."""
        weights, host = self.weights, self.home.host
        if weights.stays:
            return self.refreshing
        mine = weights.open()
        if weights.shard is None:
            assert host is not None
            assert self.kept.masters is not None
            return Arrival(host.ferry, self.kept.masters, mine, self.updating, self.rounds)
        if weights.shard.device != mine.device:
            assert host is not None
            return Arrival(host.ferry, weights.shard, mine, None, self.rounds)
        self._refreshed()
        mine.copy_(weights.shard)
        return None

    def update_beside(self, pieces: int, do: Callable[[int], None]) -> None:
        """Have it updated on the host, piece by piece; what modules compute with follows."""
        assert self.home.host is not None
        assert isinstance(self.grads.owned, HostSum)
        self.wait()
        self.updating = self.grads.owned.reader = self.home.host.crew.ask(pieces, do)
        self._refresh()

    def written(self) -> None:
        """The weights that an update works on have changed: what modules compute with follows."""
        if self.remote:
            self._refresh()
        elif self.states.masters is not None:
            self.rounds(self.target, self.states.masters)
        elif self.unfolded is not None:
            self._fold(self.unfolded)
        self.unfolded = None

    def _refresh(self) -> None:
        """Have what rests on the device made anew of masters on the host."""
        if self.weights.shard is not None:
            assert self.home.host is not None
            assert self.kept.masters is not None
            ferry, masters = self.home.host.ferry, self.kept.masters
            self.refreshing = Arrival(ferry, masters, self.weights.shard, self.updating, self.rounds)

    def _refreshed(self) -> None:
        if self.refreshing is not None:
            self.refreshing.wait()
            self.refreshing = None

    def lend(self) -> None:
        """The user has the parameters for a while."""
        if self.states.rests is not None:
            self.before = self.target.clone()
        self.weights.lend()

    def take_back(self) -> None:
        """Keep what was written."""
        mine, before, self.before, self.unfolded = self.target, self.before, None, None
        masters = self.states.masters
        if masters is not None:
            before = torch.empty_like(masters, dtype=mine.dtype)
            self.rounds(before, masters)
        self.weights.take_back(mine)
        if before is not None:
            self.states.follow(mine, before.to(mine.device))

    def close(self) -> None:
        """Give the parameters whole weights of their own and let go of everything."""
        self.wait()
        self.weights.hand_over()
        self.grads.close()
        self.kept.let_go()
