"""Gradients: those of one segment on one rank, from the first that is collected to the sum that the update takes."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from enum import Enum, auto
from typing import Protocol

import torch
from torch import Tensor, nn

from naught.comm import Pending
from naught.flat import Flat, Meter
from naught.holding import Buffer
from naught.home import GradTypes, Home
from naught.layout import Layout

__all__ = ["Content", "DeviceSum", "Gradients", "Sum"]


class Content(Enum):
    """What a flat of gradients holds."""

    NOTHING = auto()
    OWN = auto()  # this rank's gradients
    SENT = auto()  # a sum under way
    SUM = auto()  # a sum over the ranks


class Sum(Protocol):
    """A sum that has left its flat, so that the next micro-batch can be added to it."""

    dtype: torch.dtype  # in which it rests

    @property
    def empty(self) -> bool:
        """There is no sum."""

    @property
    def value(self) -> Tensor | None: ...

    @property
    def norms(self) -> list[Tensor] | None:
        """Of its blocks, on the device; None where it has not left."""

    def add(self, part: Tensor) -> None: ...

    def rewritten(self) -> None:
        """Somebody has written to the value."""

    def let_copy_go(self) -> None:
        """Nobody writes to the value: if it was made for whoever asked, it need not be kept."""

    def drop(self) -> None: ...

    def close(self) -> None:
        """Let go of everything."""


class DeviceSum:
    """On the device."""

    def __init__(self, dtype: torch.dtype, meter: Meter) -> None:
        self.dtype, self.meter = dtype, meter
        self.value: Tensor | None = None
        self.norms: list[Tensor] | None = None

    @property
    def empty(self) -> bool:
        return self.value is None

    def add(self, part: Tensor) -> None:
        if self.value is None:
            self.value = part.to(self.dtype, copy=True)
            self.meter.change(Buffer.OWNED_GRADS, self.value.nbytes)
        else:
            self.value.add_(part)

    def rewritten(self) -> None:
        """Its norm is taken when it is wanted."""

    def let_copy_go(self) -> None:
        """It is no copy."""

    def drop(self) -> None:
        if self.value is not None:
            self.meter.change(Buffer.OWNED_GRADS, -self.value.nbytes)
            self.value = None

    def close(self) -> None:
        self.drop()


class Gradients:
    """The gradients of a segment on one rank: those being collected, and the sum that waits for the update. `share` tells
    by what a gradient that is made now must still be multiplied."""

    def __init__(
        self,
        params: Sequence[nn.Parameter],
        layout: Layout,
        types: GradTypes,
        home: Home,
        owned: Sum,
    ) -> None:
        placement, group = home.placement, home.group
        self.params, self.placement, self.group, self.share = list(params), placement, group, home.share
        category = Buffer.GRAD_FLATS if placement.sums_leave else Buffer.WHOLE_GRADS
        pool = home.pool if placement.sums_leave else None
        self.flat = Flat(layout, types.flat, self.params[0].device, category=category, meter=home.meter, pool=pool)
        self.shard = slice(*layout.shard(group.part))
        self.content = Content.NOTHING
        self.filled = [False] * len(self.params)  # in the flat
        self.used = [False] * len(self.params)  # on this rank, since the last update
        self.owned = owned
        self.under_way: Pending | None = None  # while the content is sent

    @property
    def mine(self) -> Tensor:
        return self.flat.slices[self.group.part]

    @property
    def kept(self) -> Tensor:
        """The part of a sum that this rank keeps: its own slice, or all of it where the optimizer is whole."""
        return self.mine if self.placement.optim.split else self.flat.tensor

    @property
    def owned_bytes(self) -> int:
        """Bytes of a sum that has left the flat, on this rank."""
        return self.kept.numel() * self.owned.dtype.itemsize

    @property
    def scratch_bytes(self) -> int:
        """Bytes that a reduce needs beside the flat."""
        return self.group.scratch_bytes(self.mine.numel(), self.flat.tensor.dtype)

    @property
    def unsent(self) -> bool:
        """Whether gradients were collected that no reduce has seen."""
        return self.content is Content.OWN

    def is_complete(self, touched: Collection[object] | None) -> bool:
        """Whether there is a gradient of every parameter that a forward has touched, or of each, and no reduce has seen any."""
        lacking = (param for param, filled in zip(self.params, self.filled, strict=True) if not filled)
        return self.unsent and all(touched is not None and param not in touched for param in lacking)

    @property
    def begun(self) -> bool:
        """Whether there is anything of this step's gradients."""
        return self.content is not Content.NOTHING or not self.owned.empty

    @property
    def empty(self) -> bool:
        """Whether nothing was reduced."""
        return self.content is not Content.SUM and self.owned.empty

    def is_made(self) -> bool:
        """Whether autograd has made gradients that are not collected yet."""
        return any(param.grad is not None for param in self.params)

    def take(self, index: int) -> None:
        """Take up one parameter's gradient at once."""
        made = self.params[index].grad
        assert made is not None
        if self.content is Content.SENT:
            return  # a late one: the next collect finds it
        grad = self._shared(made)
        self.open()
        if self.filled[index]:
            self.flat.slots[index].add_(grad)
        else:
            self.flat.slots[index].copy_(grad)
        self.filled[index] = self.used[index] = True
        self.params[index].grad = None

    def collect(self) -> None:
        """Take up what autograd has made and nobody has taken: copied into the flat, or added to what is there. While the
        flat is under way, what is made waits for the next time."""
        made = [(index, param.grad) for index, param in enumerate(self.params) if param.grad is not None]
        if not made or self.content is Content.SENT:
            return
        made = [(index, self._shared(grad)) for index, grad in made]
        self.open()
        slots, filled = self.flat.slots, self.filled
        fresh = [(slots[index], grad) for index, grad in made if not filled[index]]
        if fresh:
            torch._foreach_copy_([into for into, _ in fresh], [grad for _, grad in fresh])
        if len(fresh) < len(made):
            more = [(slots[index], grad) for index, grad in made if filled[index]]
            torch._foreach_add_([into for into, _ in more], [grad for _, grad in more])
        for index, _ in made:
            filled[index] = self.used[index] = True
            self.params[index].grad = None

    def open(self) -> None:
        """Make room for gradients. Another backward before the update: what was summed moves aside."""
        if self.content in (Content.OWN, Content.SENT):
            return
        if self.content is Content.SUM:
            self._set_aside()
        self.content = Content.OWN
        self.flat.alloc()
        self.filled = [False] * len(self.filled)
        self.flat.clear_gaps()

    def start_reduce(self, unit: str) -> None:
        """Send every rank its part of these gradients. What this rank did not use counts as zero."""
        self.open()
        self.collect()
        for view, filled in zip(self.flat.slots, self.filled, strict=True):
            if not filled:
                view.zero_()
        self.flat.meter.change(Buffer.SCRATCH, self.scratch_bytes)
        self.content = Content.SENT
        try:
            self.under_way = self.group.reduce(self.flat.tensor, self.flat.slices, unit)
        except BaseException:  # there is none, for want of memory, say
            self.flat.meter.change(Buffer.SCRATCH, -self.scratch_bytes)
            raise

    def settle(self, unit: str) -> None:
        """Wait for the mean over the ranks, and keep this rank's part."""
        if self.under_way is None:
            return
        self.under_way.wait()
        self.under_way = None
        self.flat.meter.change(Buffer.SCRATCH, -self.scratch_bytes)
        if not self.placement.optim.split:
            self.group.gather(self.flat.tensor, self.flat.slices, unit).wait()
        self.content = Content.SUM
        if self.placement.sums_leave:
            self._set_aside()

    def give_up(self) -> None:
        """Wait for what is under way; nobody wants it any more."""
        if self.under_way is not None:
            self.under_way.fails()
            self.under_way = None
            self.flat.meter.change(Buffer.SCRATCH, -self.scratch_bytes)
        self.content = Content.NOTHING

    def _set_aside(self) -> None:
        self.owned.add(self.kept)
        self.content = Content.NOTHING
        self.flat.free()

    def sum(self) -> Tensor | None:
        """This rank's part of the summed gradient, brought together; None if nothing was reduced."""
        if self.content is Content.SUM and self.owned.empty:
            return self.kept
        if self.content is Content.SUM:
            self._set_aside()
        return self.owned.value

    def slice_or_norms(self) -> Tensor | list[Tensor]:
        """This rank's slice of the sum where it is on the device; else the norms of its blocks, as they were taken when it left,
        and none where nothing was reduced."""
        if self.content is Content.SUM:
            if self.owned.empty:
                return self.mine
            self._set_aside()
        if self.owned.norms is not None:
            return self.owned.norms
        total = self.owned.value
        if total is None:
            return []
        return total if self.placement.optim.split else total[self.shard]

    def rewritten(self) -> None:
        """Somebody has written to the sum."""
        if self.content is not Content.SUM:
            self.owned.rewritten()

    def let_copy_go(self) -> None:
        """Nobody writes to what `sum` has given."""
        self.owned.let_copy_go()

    def drop(self) -> None:
        """Let go of this step's gradients."""
        self.let_sum_go()
        for param in self.params:
            param.grad = None

    def let_sum_go(self) -> None:
        """An update has taken it. What autograd has made since, and nobody has collected, stays."""
        self.owned.drop()
        self.content = Content.NOTHING
        self.used = [False] * len(self.used)
        self.flat.free()

    def close(self) -> None:
        """Let go of everything."""
        self.drop()
        self.owned.close()

    def _shared(self, grad: Tensor) -> Tensor:
        """What a gradient that autograd has made is for its step, without the graph that it may have of its own."""
        grad, share = grad.detach() if grad.requires_grad else grad, self.share()
        return grad if share == 1.0 else grad * share
