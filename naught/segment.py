"""Segment: one flat's worth of parameters, and where its weights, gradients and states are."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from naught.beside import Beside
from naught.comm import Pending
from naught.ferry import Arrival
from naught.folded import Folded
from naught.gradients import DeviceSum, Gradients, Sum
from naught.home import Home, Types
from naught.layout import Layout, Span
from naught.placement import Tier
from naught.rounding import fold, unfold
from naught.rules import Part
from naught.stash import HostSum
from naught.states import Cut, States, Updating
from naught.streams import here
from naught.weights import Weights

__all__ = ["Segment"]


def _put_back(near: Tensor, place: Tensor) -> None:
    place.copy_(near)


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
        remote = self.trained and placement.optim.tier is not Tier.DEVICE
        shelf = home.shelf(placement.optim.tier if self.trained else Tier.DEVICE)
        self.kept = States(layout, owned, groups, shelf, small=types.small_moments)
        masters: Tensor | None = None  # None: the weights have 32 bits, and are updated where they are
        if self.trained and (remote or types.weights != torch.float32):
            masters = self.kept.first_masters([param.data for param in params], group, home.device)
        # Masters on the host are what split weights that rest there are made of: the host keeps nothing twice.
        own = None if remote and placement.param.tier is not Tier.DEVICE else home.shelf(placement.param.tier)
        self.weights = Weights(params, layout, types, home, own, split=split)
        self.beside: Beside | None = None  # None: it is updated on the device, in its order
        self.folded: Folded | None = None  # None: masters are whole, or there are none
        near = placement.param.tier is Tier.DEVICE and placement.optim.tier is Tier.DEVICE
        if masters is not None and types.small_masters and near and types.weights == torch.bfloat16:
            self.folded = Folded(self.kept.keep_rests())
            self.folded.keep(masters, self.target)
        elif masters is not None:
            self.kept.keep_masters(masters)
        owner: Sum = DeviceSum(types.grads.sums, home.meter)
        if remote:
            assert home.host is not None
            self.beside = Beside(home.host, types.rounds)
            owner = HostSum(owned.numel, types.grads, home.host.ferry, home.host.shelf, home.host.rooms)
        self.grads = Gradients(params, layout, types.grads, home, owner)

    @property
    def remote(self) -> bool:
        """Whether it is updated on the host."""
        return self.beside is not None

    @property
    def states(self) -> States:
        """What the rule remembers, once no update is under way."""
        if self.beside is not None:
            self.beside.wait()
        return self.kept

    def settle(self) -> None:
        """Until nothing of it is under way: no update, and no weights on their way up."""
        if self.beside is not None:
            self.beside.wait()
            self.beside.arrive()
        here(self.home.device).wait()

    @property
    def target(self) -> Tensor:
        """The weights that this rank updates, in their own type; where they are made of masters each time, a copy."""
        if self.everywhere:
            return self.weights.flat.tensor
        if self.weights.shard is None:
            return self._rounded()
        self._arrive()
        return self.weights.shard

    def _arrive(self) -> None:
        if self.beside is not None:
            self.beside.arrive()

    def _rounded(self) -> Tensor:
        """What the masters round to."""
        masters = self.states.masters
        assert masters is not None
        rounded = torch.empty_like(masters, dtype=self.weights.flat.tensor.dtype)
        self.weights.rounds(rounded, masters)
        return rounded

    @property
    def exact(self) -> Tensor:
        """The weights that this rank updates, in the precision in which it does. What is written to them counts once it is
        told by `written`; until the next update."""
        masters = self.states.masters
        if masters is not None:
            return masters
        return self.target if self.folded is None else self.folded.whole(self.target)

    def due(self, how: Updating, used: Sequence[bool]) -> Iterator[Part]:
        """What an update works on, on this rank."""
        total = self.grads.sum()
        assert total is not None
        states = self.states
        if self.folded is None:
            weights = self.exact
            if weights.device != total.device:
                return self._due_brought_up(states.cuts(how, used), weights, total)
            return (states.part(cut, weights, total) for cut in states.cuts(how, used))
        self.folded.copy = None
        return self._due_unfolded(states.cuts(how, used), self.target, self.folded.rests, total)

    def _due_brought_up(self, cuts: Sequence[Cut], weights: Tensor, total: Tensor) -> Iterator[Part]:
        """Weights that rest on the host, with their states on the device, are brought up when it is their turn."""
        for cut in cuts:
            place = weights[slice(*cut.span)]
            near = place.to(total.device)
            part = self.kept.part(cut, near, total, whole=False)
            yield part._replace(after=(*part.after, partial(_put_back, near, place)))

    def _due_unfolded(self, cuts: Sequence[Cut], weights: Tensor, rests: Tensor, total: Tensor) -> Iterator[Part]:
        """Masters are put together when it is their turn, and taken apart again behind it."""
        for cut in cuts:
            span = slice(*cut.span)
            wide = unfold(weights[span], rests[span])
            part = self.kept.part(cut, wide, total, whole=False)
            yield part._replace(after=(*part.after, partial(fold, wide, weights[span], rests[span])))

    def start_gather(self, unit: str) -> Pending:
        weights = self.weights
        return self.home.group.gather(weights.flat.tensor, weights.flat.slices, unit, self._bring_own())

    def _bring_own(self) -> Arrival | None:
        """Have this rank's slice put into the flat; None: it is there."""
        weights, host = self.weights, self.home.host
        if weights.stays:
            return None if self.beside is None else self.beside.coming
        mine = weights.open()
        if weights.shard is None:
            assert self.beside is not None
            assert self.kept.masters is not None
            return self.beside.bring(self.kept.masters, mine)
        if weights.shard.device != mine.device:
            assert host is not None
            return Arrival(host.ferry, weights.shard, mine, None, weights.rounds)
        self._arrive()
        mine.copy_(weights.shard)
        return None

    def update_beside(self, pieces: int, do: Callable[[int], None], *, delayed: bool) -> None:
        """Have it updated on the host, piece by piece; what modules compute with follows, or stays as it is until it is to
        catch up."""
        assert self.beside is not None
        assert isinstance(self.grads.owned, HostSum)
        self.grads.owned.read_by(self.beside.update(pieces, do))
        self.beside.behind = delayed
        if not delayed:
            self.written()

    def catch_up(self) -> bool:
        """Have the weights follow an update that they did not follow at once; whether there was one."""
        if self.beside is None or not self.beside.behind:
            return False
        self.beside.behind = False
        self.written()
        return True

    def written(self) -> None:
        """The weights that an update works on change: what modules compute with follows."""
        if self.beside is not None and self.weights.shard is not None:
            assert self.kept.masters is not None
            self.beside.coming = self.beside.bring(self.kept.masters, self.weights.shard)
        elif self.beside is None and self.kept.masters is not None:
            self.weights.rounds(self.target, self.kept.masters)
        elif self.folded is not None:
            self.folded.written(self.target)

    def lend(self) -> None:
        """The user has the parameters for a while."""
        if self.folded is not None:
            self.folded.lent = self.target.clone()
        self.weights.lend()

    def take_back(self) -> None:
        """Keep what was written: where weights are not what they were, masters or rests are theirs."""
        mine, before = self.target, None
        if self.states.masters is not None:
            before = self._rounded()
        elif self.folded is not None:
            before, self.folded.lent, self.folded.copy = self.folded.lent, None, None
        self.weights.take_back(mine)
        if before is not None:
            self.kept.follow(mine, before.to(mine.device))

    def close(self) -> None:
        """Give the parameters whole weights of their own and let go of everything."""
        states = self.states
        self.weights.hand_over()
        self.grads.close()
        states.let_go()
