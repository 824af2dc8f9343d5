"""Gradients: those of one segment on one rank, from the first that is collected to the sum that the update takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from naught.comm import Group, Pending
from naught.flat import Flat, Meter
from naught.holding import Buffer
from naught.layout import Layout
from naught.placement import Placement

__all__ = ["GradTypes", "Gradients"]


class GradTypes(NamedTuple):
    """The types of a flat of gradients, and of a sum that has left it."""

    flat: torch.dtype
    sums: torch.dtype


class Gradients:
    """The gradients of a segment on one rank: those being collected, and the sum that waits for the update."""

    def __init__(
        self, params: Sequence[nn.Parameter], layout: Layout, types: GradTypes, placement: Placement, group: Group, meter: Meter
    ) -> None:
        self.params, self.types, self.placement, self.group, self.meter = list(params), types, placement, group, meter
        category = Buffer.GRAD_FLATS if placement.grad.split else Buffer.WHOLE_GRADS
        self.flat = Flat(layout, types.flat, self.params[0].device, category=category, meter=meter)
        self.scratch_bytes = group.scratch_bytes(layout.shard_numel, types.flat)
        self.filled = [False] * len(self.params)
        self.used = [False] * len(self.params)  # on this rank, since the last update
        self.unsent = False  # the flat holds this rank's own gradients
        self.summed = False  # the flat holds a sum over the ranks
        self.owned: Tensor | None = None  # a sum that has left the flat
        self.under_way: Pending | None = None

    @property
    def mine(self) -> Tensor:
        return self.flat.slices[self.group.rank]

    @property
    def kept(self) -> Tensor:
        """The part of a sum that this rank keeps: its own slice, or all of it where the optimizer is whole."""
        return self.mine if self.placement.optim.split else self.flat.tensor

    @property
    def owned_bytes(self) -> int:
        """Bytes of a sum that has left the flat, on this rank."""
        return self.kept.numel() * self.types.sums.itemsize

    def is_made(self) -> bool:
        """Whether autograd has made gradients that are not collected yet."""
        return any(param.grad is not None for param in self.params)

    def take(self, index: int) -> None:
        """Take up one parameter's gradient at once."""
        grad = _made(self.params[index])
        assert grad is not None
        if self.under_way is not None:
            return  # a late one: the next collect finds it
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
        made = [(index, grad) for index, grad in enumerate(map(_made, self.params)) if grad is not None]
        if not made or self.under_way is not None:
            return
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
        if self.unsent or self.under_way is not None:
            return
        if self.summed:
            self._set_aside()
        self.unsent = True
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
        self.meter.change(Buffer.SCRATCH, self.scratch_bytes)
        self.unsent = False
        self.under_way = self.group.reduce(self.flat.tensor, self.flat.slices, unit)

    def settle(self, unit: str) -> None:
        """Wait for the mean over the ranks, and keep this rank's part."""
        if self.under_way is None:
            return
        self.under_way.wait()
        self.under_way = None
        self.meter.change(Buffer.SCRATCH, -self.scratch_bytes)
        if not self.placement.optim.split:
            self.group.gather(self.flat.tensor, self.flat.slices, unit).wait()
        self.summed = True
        if self.placement.grad.split:
            self._set_aside()

    def _set_aside(self) -> None:
        if self.owned is None:
            self.owned = self.kept.to(self.types.sums, copy=True)
            self.meter.change(Buffer.OWNED_GRADS, self.owned.nbytes)
        else:
            self.owned.add_(self.kept)
        self.summed = False
        self.flat.free()

    def sum(self) -> Tensor | None:
        """This rank's part of the summed gradient; None if nothing was reduced."""
        if not self.summed:
            return self.owned
        if self.owned is None:
            return self.kept
        self._set_aside()
        return self.owned

    def drop(self) -> None:
        """Let go of this step's gradients."""
        self._let_go()
        self.summed = self.unsent = False
        self.used = [False] * len(self.used)
        for param in self.params:
            param.grad = None
        self.flat.free()

    def _let_go(self) -> None:
        if self.owned is not None:
            self.meter.change(Buffer.OWNED_GRADS, -self.owned.nbytes)
            self.owned = None


def _made(param: nn.Parameter) -> Tensor | None:
    """The gradient that autograd has made, without the graph that it may have of its own."""
    grad = param.grad
    return grad if grad is None or not grad.requires_grad else grad.detach()
