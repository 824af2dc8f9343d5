"""Segment: one flat's worth of parameters, and where its weights, gradients and states are."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from naught.beside import Beside, Delivered
from naught.bringing import source_of
from naught.comm import Pending
from naught.delivery import Delivery
from naught.disk_sum import DiskSum
from naught.folded import Folded
from naught.gradients import DeviceSum, Gradients, Sum
from naught.home import Home, Types
from naught.layout import Layout, Span
from naught.placement import Tier
from naught.rounding import fold, unfold
from naught.rules import Part
from naught.spill import Stored
from naught.stash import HostSum
from naught.states import Cut, Resting, States, Updating
from naught.stored_part import StoredPart
from naught.streams import here
from naught.versions import Versions
from naught.weights import Weights

__all__ = ["WEIGHTS", "Segment"]

WEIGHTS = "weights"  # a name beside those of what a rule remembers


class Segment:
    """Parameters that share dtype and trainability: their weights, gradients and states. `groups` tells the parameter group
    of each; there are none where nothing is trained."""

    def __init__(self, params: Sequence[nn.Parameter], layout: Layout, groups: Sequence[int], types: Types, home: Home) -> None:
        self.home, self.layout, self.trained = home, layout, bool(groups)
        placement, group = home.placement, home.group
        self.counts = not types.repeated or group.counts_for_all  # in a norm, and in a checkpoint
        self.frozen = [not param.requires_grad for param in params]  # when the engine was made
        # Whole numbers have no NaN to read as while they are away, and are few: they stay.
        split = placement.param.split and types.weights.is_floating_point
        # Every rank has all of what is written: it updates all, or nobody updates any.
        self.everywhere = not placement.optim.split or not (self.trained or split)
        owned = Span(0, layout.numel) if self.everywhere else layout.shard(group.part)
        remote = self.trained and placement.optim.tier is not Tier.DEVICE
        tier = placement.optim.tier if self.trained else Tier.DEVICE
        disk = home.disk if tier is Tier.DISK else None
        self.kept = States(layout, owned, groups, Resting(home.shelf(tier), disk, types.small_moments))
        sunk = placement.param.tier is Tier.DISK and split  # weights rest on disk, where nothing is updated
        masters: Tensor | None = None  # None: the weights have 32 bits, and are updated where they are
        if self.trained and (remote or sunk or types.weights != torch.float32):
            masters = self.kept.first_masters([param.data for param in params], group, home.device, repeated=types.repeated)
        # Masters on the host are what split weights that rest there are made of: the host keeps nothing twice.
        made = remote and placement.optim.tier is placement.param.tier is Tier.HOST
        own = None if made else home.shelf(placement.param.tier)
        self.weights = Weights(params, layout, types, home, own, home.disk if sunk else None, split=split)
        # Of parameters that users can write to while others are their masters; None: they are absent, or their own.
        self.known = Versions(params) if masters is not None and not split else None
        self.beside: Beside | None = None  # None: it is updated on the device, in its order
        self.folded: Folded | None = None  # None: masters are whole, or there are none
        near = placement.param.tier is Tier.DEVICE and placement.optim.tier is Tier.DEVICE
        if masters is not None and types.small_masters and near and types.weights == torch.bfloat16:
            self.folded = Folded(self.kept.keep_rests())
            self.folded.keep(masters, self.target)
        elif masters is not None:
            with home.group.noting():
                self.kept.keep_masters(masters)
        owner: Sum = DeviceSum(types.grads.sums, home.meter)
        if remote:
            assert home.host is not None
            crew = home.host.crew if disk is None else disk.crew
            self.beside = Beside(crew, home.host.ferry, types.rounds)
            if placement.grad.tier is Tier.DISK:
                owner = DiskSum(owned.numel, types.grads, home)
            else:
                owner = HostSum(owned.numel, types.grads, home)
        self.grads = Gradients(params, layout, types.grads, home, owner)
        self.source = source_of(self.weights, self.kept, self.beside, home)

    @property
    def remote(self) -> bool:
        """Whether it is updated on the host, from there or from disk."""
        return self.beside is not None

    @property
    def states(self) -> States:
        """What the rule remembers, once no update is under way."""
        self._wait()
        return self.kept

    def forget_failure(self) -> bool:
        """Whether its update on the host has failed, of which nobody is told from here on."""
        return self.beside is not None and self.beside.forget_failure()

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
        if self.weights.stored is not None:
            self._wait()
            return self.weights.stored.whole()
        if self.weights.shard is None:
            return self._rounded()
        self._arrive()
        return self.weights.shard

    def _wait(self) -> None:
        if self.beside is not None:
            self.beside.wait()

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

    def prepare(self, how: Updating) -> None:
        """Have all the moments that the rule wants."""
        if self.kept.lacks(how):
            self._wait()  # what an update reads is not added to while it does
            self.kept.prepare(how)

    def due(self, how: Updating, used: Sequence[bool]) -> Iterator[Part]:
        """What an update works on, on this rank."""
        total = self.grads.sum()
        assert total is not None
        states = self.states
        if self.folded is None:
            weights = self.exact
            if self.is_brought_up:
                return self._due_brought_up(states.cuts(how, used), weights, total)
            return (states.part(cut, weights, total) for cut in states.cuts(how, used))
        self.folded.copy = None
        return self._due_unfolded(states.cuts(how, used), self.target, self.folded.rests, total)

    @property
    def is_brought_up(self) -> bool:
        """Whether it is updated on the device, and its weights, which are their own masters, rest on the host."""
        return self.beside is None and self.kept.master is None and self.home.placement.param.tier is Tier.HOST

    def _due_brought_up(self, cuts: Sequence[Cut], weights: Tensor, total: Tensor) -> Iterator[Part]:
        """Weights that rest on the host, with their states on the device, are brought up when it is their turn."""
        self.home.meter.move("to the device", weights.nbytes)
        self.home.meter.move("to the host", weights.nbytes)
        for cut in cuts:
            place = weights[slice(*cut.span)]
            near = place.to(total.device)
            part = self.kept.part(cut, near, total, whole=False)
            yield part._replace(after=(*part.after, partial(place.copy_, near)))

    def _due_unfolded(self, cuts: Sequence[Cut], weights: Tensor, rests: Tensor, total: Tensor) -> Iterator[Part]:
        """Masters are put together when it is their turn, and taken apart again behind it."""
        for cut in cuts:
            span = slice(*cut.span)
            wide = unfold(weights[span], rests[span])
            part = self.kept.part(cut, wide, total, whole=False)
            yield part._replace(after=(*part.after, partial(fold, wide, weights[span], rests[span])))

    def start_gather(self, unit: str) -> Pending:
        weights = self.weights
        return self.home.group.gather(weights.flat.tensor, weights.flat.slices, unit, self.source.bring())

    def update_on_disk(self, pieces: int, do: Callable[[int], None]) -> None:
        """Have it updated tile by tile; each puts new weights where they rest."""
        assert self.beside is not None
        assert isinstance(self.grads.owned, HostSum | DiskSum)
        if self.weights.stored is not None:
            self.weights.stored.will_change()
        over = self.beside.update(pieces, do)
        self.grads.owned.read_by(over)
        if self.home.placement.param.tier is Tier.DEVICE:
            self.beside.coming = Delivered(over)

    def update_beside(self, pieces: int, do: Callable[[int], None], *, delayed: bool) -> None:
        """Have it updated on the host, piece by piece; what modules compute with follows, or stays as it is until it is to
        catch up."""
        assert self.beside is not None
        assert isinstance(self.grads.owned, HostSum)
        self.grads.owned.read_by(self.beside.update(pieces, do))
        self.beside.behind = delayed
        if not delayed:
            self.written()

    @property
    def behind(self) -> bool:
        """Whether weights do not follow their last update yet."""
        return self.beside is not None and self.beside.behind

    def catch_up(self) -> bool:
        """Have the weights follow an update that they did not follow at once; whether there was one."""
        if self.beside is None or not self.behind:
            return False
        self.beside.behind = False
        self.written()
        return True

    def written(self) -> None:
        """The weights that an update works on change: what modules compute with follows."""
        self.kept.written()
        if self.weights.stored is not None and self.kept.master is None:
            self.weights.stored.written()
            self.weights.stored.will_change()
        elif isinstance(self.kept.master, Stored):
            with self.home.group.noting():
                Delivery(self.weights, self.home).bring_all(self.kept.master)
        elif self.weights.stored is not None:
            with self.home.group.noting():
                rounded = self._rounded()
                if self.beside is None:  # else it is made on the host
                    self.home.meter.move("to the host", rounded.nbytes)
                self.weights.stored.fill(rounded)
        elif self.beside is not None and self.weights.shard is not None:
            assert self.kept.masters is not None
            self.beside.coming = self.beside.bring(self.kept.masters, self.weights.shard)
        elif self.beside is None and self.kept.master is not None:
            if self.home.placement.param.tier is Tier.HOST:
                self.home.meter.move("to the host", self.target.nbytes)
            self.weights.rounds(self.target, self.exact)
        elif self.folded is not None:
            self.folded.written(self.target)

    def sources(self) -> dict[str, Tensor | StoredPart]:
        """What this rank updates, in the precision in which it does, and what the rule remembers of it: what is on disk stays
        there."""
        states = self.states
        stored = states.master if isinstance(states.master, Stored) else self.weights.stored if states.master is None else None
        weights = self.exact if stored is None else StoredPart(stored)
        moments = {name: StoredPart(held) if isinstance(held, Stored) else held.whole() for name, held in states.held.items()}
        return {WEIGHTS: weights, **moments}

    def lend(self) -> None:
        """The user has the parameters for a while."""
        if self.folded is not None:
            self.folded.lent = self.target.clone()
        self.weights.lend()

    def forget_loan(self) -> None:
        if self.folded is not None:
            self.folded.lent = None
        if self.weights.split:
            self.weights.release()

    def take_back(self) -> None:
        """Keep what was written: where weights are not what they were, masters or rests are theirs."""
        mine, before = self.target, None
        if self.states.master is not None:
            before = self._rounded()
        elif self.folded is not None:
            before, self.folded.lent, self.folded.copy = self.folded.lent, None, None
        self.weights.take_back(mine)
        if self.known is not None:
            self.known.renew()
        if self.weights.stored is not None:
            self.weights.stored.written()
            self.weights.stored.will_change()
        if before is not None:
            self.kept.follow(mine, before.to(mine.device))
        if self.folded is not None:
            self.folded.mend(mine)

    def heed_writes(self) -> None:
        """Let masters follow what has been written to weights since the engine last knew these."""
        if self.known is not None and self.known.first_written() is not None:
            self.follow_weights()
            self.known.renew()  # and not before: what found no memory is done again

    def follow_weights(self) -> None:
        """Somebody has written to whole weights: where they are not what their masters round to, masters are theirs. Where they
        are behind their masters they cannot tell, and what was written is lost."""
        if self.folded is not None:
            self.folded.mend(self.target)
        elif not self.behind:
            mine = self.target
            self.kept.follow(mine, self._rounded().to(mine.device))

    def close(self) -> None:
        """Give the parameters whole weights of their own and let go of everything."""
        states = self.states
        if self.home.host is not None:
            self.home.host.ferry.drain()  # the driver must not be copying from memory that goes
        self.weights.hand_over()
        self.grads.close()
        states.let_go()
