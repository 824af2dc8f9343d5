"""Gradients: those of one segment on one rank, from the first that is collected to the sum that the update takes."""

from __future__ import annotations

import torch
from torch import Tensor

from naught.comm import Group, Pending
from naught.flat import Flat, Meter
from naught.holding import Buffer
from naught.layout import Layout
from naught.placement import Placement

__all__ = ["Gradients"]


class Gradients:
    """The gradients of a segment on one rank: those being collected, and the sum that waits for the update."""

    def __init__(self, layout: Layout, like: Tensor, placement: Placement, group: Group, meter: Meter) -> None:
        self.layout, self.placement, self.group, self.meter = layout, placement, group, meter
        self.flat = Flat(
            layout.numel, like, category=Buffer.GRAD_FLATS if placement.grad.split else Buffer.WHOLE_GRADS, meter=meter
        )
        self.mine = slice(*layout.shard(group.rank))
        self.filled = [False] * len(layout.slots)
        self.owned: Tensor | None = None  # a sum that has left the flat
        self.summed = False  # the flat holds a sum, not this rank's part of one
        self.under_way: Pending | None = None
        self.late: list[tuple[int, Tensor]] = []  # gradients that came while their flat was under way

    @property
    def kept(self) -> slice:
        """The part of a sum that this rank keeps: its own slice, or all of it where the optimizer is whole."""
        return self.mine if self.placement.optim.split else slice(0, self.layout.numel)

    def collect(self, index: int, grad: Tensor) -> None:
        """Take up one parameter's gradient."""
        if self.under_way is not None:
            self.late.append((index, grad.clone()))
            return
        if self.summed:  # another backward before the update: what was summed moves aside
            self._set_aside()
        self.open()
        span = self.layout.slots[index].span
        into = self.flat.tensor[span.start : span.stop]
        if self.filled[index]:
            into.add_(grad.reshape(-1))
        else:
            into.copy_(grad.reshape(-1))
        self.filled[index] = True

    def open(self) -> None:
        if not self.flat.allocated:
            self.flat.alloc()
            self.filled = [False] * len(self.filled)
            for gap in self.layout.gaps():
                self.flat.tensor[gap.start : gap.stop].zero_()

    def start_reduce(self, unit: str) -> None:
        """Send every rank its part of these gradients. What this rank did not use counts as zero."""
        if self.summed:
            self._set_aside()
        self.open()
        flat = self.flat.tensor
        for slot, filled in zip(self.layout.slots, self.filled, strict=True):
            if not filled:
                flat[slot.span.start : slot.span.stop].zero_()
        scratch = torch.empty(self.layout.numel - self.layout.shard_numel, dtype=flat.dtype, device=flat.device)
        self.meter.change(Buffer.SCRATCH, scratch.nbytes)
        self.under_way = self.group.reduce(flat, scratch, unit)

    def settle(self, unit: str) -> None:
        """Wait for the sum, take the mean, and keep this rank's part."""
        if self.under_way is None:
            return
        self.under_way.wait()
        self.under_way = None
        self.meter.change(Buffer.SCRATCH, -(self.flat.nbytes - self.flat.nbytes // self.group.size))
        flat = self.flat.tensor
        if self.group.size > 1:
            flat[self.mine].div_(self.group.size)
        if not self.placement.optim.split:
            self.group.gather(flat, unit).wait()
        self.summed = True
        if self.placement.grad.split:
            self._set_aside()
        late, self.late = self.late, []
        for index, grad in late:
            self.collect(index, grad)

    def _set_aside(self) -> None:
        part = self.flat.tensor[self.kept]
        if self.owned is None:
            self.owned = part.clone()
            self.meter.change(Buffer.OWNED_GRADS, self.owned.nbytes)
        else:
            self.owned.add_(part)
        self.summed = False
        self.flat.free()

    @property
    def open_here(self) -> bool:
        """Whether gradients have been collected that no reduce has seen."""
        return bool(self.late) or (self.flat.allocated and not self.summed and self.under_way is None and any(self.filled))

    def sum(self) -> Tensor | None:
        """This rank's part of the summed gradient; None if nothing was reduced."""
        if not self.summed:
            return self.owned
        part = self.flat.tensor[self.kept]
        if self.owned is not None:
            part.add_(self.owned)
            self._let_go()
        return part

    def drop(self) -> None:
        self._let_go()
        self.summed = False
        self.flat.free()

    def _let_go(self) -> None:
        if self.owned is not None:
            self.meter.change(Buffer.OWNED_GRADS, -self.owned.nbytes)
            self.owned = None
