"""Segment: one flat's worth of parameters, and where its weights, gradients and states are."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import NamedTuple

import torch
from torch import Tensor, nn

from naught.comm import Group, Pending
from naught.ferry import Arrival, Ferry
from naught.flat import Meter
from naught.gradients import DeviceSum, Gradients, GradTypes, Sum
from naught.host_crew import HostCrew
from naught.layout import Layout, Span
from naught.placement import Placement, Tier
from naught.rules import Part
from naught.shelves import DeviceShelf, Shelf
from naught.stash import HostSum
from naught.states import States, Updating
from naught.weights import Weights

__all__ = ["Home", "HostSide", "Segment", "Types"]


class Types(NamedTuple):
    """The types of a segment's weights and gradients."""

    weights: torch.dtype
    grads: GradTypes


class HostSide(NamedTuple):
    """What a rank has on its host: memory, the way there and back, and threads that update."""

    shelf: Shelf
    ferry: Ferry
    crew: HostCrew


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
        if self.trained and (self.remote or types.weights != torch.float32):
            self.kept.keep_masters([param.data for param in params], group, home.device)
        # Masters on the host are what split weights that rest there are made of: the host keeps nothing twice.
        own = None if self.remote and placement.param.tier is not Tier.DEVICE else home.shelf(placement.param.tier)
        self.weights = Weights(params, layout, types.weights, group, home.meter, device=home.device, split=split, shelf=own)
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

    @property
    def target(self) -> Tensor:
        """The weights that this rank updates, in their own type; where they are made of masters each time, a copy."""
        if self.everywhere:
            return self.weights.flat.tensor
        if self.weights.shard is not None:
            self._refreshed()
            return self.weights.shard
        assert self.states.masters is not None
        return self.states.masters.to(self.weights.flat.tensor.dtype)

    @property
    def exact(self) -> Tensor:
        """The weights that this rank updates, in the precision in which it does."""
        masters = self.states.masters
        return self.target if masters is None else masters

    def due(self, how: Updating, used: Sequence[bool]) -> Iterator[Part]:
        """What an update works on, on this rank."""
        total = self.grads.sum()
        assert total is not None
        states, weights = self.states, self.exact
        return (states.part(cut, weights, total) for cut in states.cuts(how, used))

    def start_gather(self, unit: str) -> Pending:
        weights = self.weights
        return self.home.group.gather(weights.flat.tensor, weights.flat.slices, unit, self._bring_own())

    def _bring_own(self) -> Arrival | None:
        """Have this rank's slice put into the flat; None: it is there."""
        weights, host = self.weights, self.home.host
        if not weights.split:
            return self.refreshing
        mine = weights.open()
        if weights.shard is None:
            assert host is not None
            assert self.kept.masters is not None
            return Arrival(host.ferry, self.kept.masters, mine, self.updating)
        if weights.shard.device != mine.device:
            assert host is not None
            return Arrival(host.ferry, weights.shard, mine, None)
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
            self.target.copy_(self.states.masters)

    def _refresh(self) -> None:
        """Have what rests on the device made anew of masters on the host."""
        if self.weights.shard is not None:
            assert self.home.host is not None
            assert self.kept.masters is not None
            self.refreshing = Arrival(self.home.host.ferry, self.kept.masters, self.weights.shard, self.updating)

    def _refreshed(self) -> None:
        if self.refreshing is not None:
            self.refreshing.wait()
            self.refreshing = None

    def take_back(self) -> None:
        """The user has had the parameters: keep what was written."""
        mine = self.target
        self.weights.take_back(mine)
        self.states.follow(mine)

    def close(self) -> None:
        """Give the parameters whole weights of their own and let go of everything."""
        self.wait()
        self.weights.hand_over()
        self.grads.drop()
        self.kept.let_go()
