"""Weights: a segment's parameters on one rank, whole while they are gathered and husks while they are released."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from naught.comm import Group, Pending
from naught.errors import UsageError
from naught.flat import Flat, Meter
from naught.holding import Buffer
from naught.layout import Layout

__all__ = ["Weights"]


class Weights:
    """Parameters as views of one flat, and this rank's slice of it. Only split weights are ever released."""

    def __init__(self, params: Sequence[nn.Parameter], layout: Layout, group: Group, meter: Meter, *, split: bool) -> None:
        self.params, self.layout, self.group, self.split = list(params), layout, group, split
        like = self.params[0].data
        self.flat = Flat(layout.numel, like, category=Buffer.GATHERED if split else "weights", meter=meter)
        self.marks = torch.full((len(self.params),), _blank(like), dtype=like.dtype, device=like.device)
        self.views = self._adopt()
        # A released parameter is a husk: NaN of its true shape and type, and a write to it changes its mark.
        self.husks = [mark.expand(slot.shape) for mark, slot in zip(self.marks, layout.slots, strict=True)]
        self.shard = self.flat.tensor[self.mine]
        if split:
            self.shard = self.shard.clone()
            meter.change("weights", self.shard.nbytes)
            self.release()

    def _adopt(self) -> list[Tensor]:
        """Move the parameters into the flat and make them views of it."""
        self.flat.alloc()
        flat = self.flat.tensor
        for gap in self.layout.gaps():
            flat[gap.start : gap.stop].zero_()
        views = [flat[slot.span.start : slot.span.stop].view(slot.shape) for slot in self.layout.slots]
        for param, view in zip(self.params, views, strict=True):
            view.copy_(param.data)
            param.data = view
        return views

    @property
    def mine(self) -> slice:
        return slice(*self.layout.shard(self.group.rank))

    def start_gather(self, unit: str) -> Pending:
        if self.split:
            self._check_marks()
            self.flat.alloc()
            self.flat.tensor[self.mine].copy_(self.shard)
        return self.group.gather(self.flat.tensor, unit)

    def _check_marks(self) -> None:
        written = ~self.marks.isnan() if self.marks.is_floating_point() else self.marks != 0
        if bool(written.any()):
            name = self.layout.slots[int(written.nonzero()[0])].name
            self.marks.fill_(_blank(self.marks))
            raise UsageError(
                f'parameter "{name}" was written to while it was released',
                fix="write inside engine.gathered(), or before the engine is made",
            )

    def bind(self) -> None:
        """Let the parameters be views of the gathered flat."""
        if self.split:
            self._point_to(self.views)

    def release(self) -> None:
        """Free the flat and leave husks."""
        if self.split:
            self._point_to(self.husks)
            self.flat.free()

    def lend(self) -> None:
        """Give the parameters copies of their own, which stay valid when the flat is gone."""
        if self.split:
            self._point_to([view.clone() for view in self.views])
            self.flat.free()

    def take_back(self) -> None:
        """Keep what was written to the copies, as far as it is this rank's."""
        if self.split:
            shard = self.layout.shard(self.group.rank)
            copies = {slot.name: param.data.reshape(-1) for slot, param in zip(self.layout.slots, self.params, strict=True)}
            for slot, span in self.layout.owned(self.group.rank):
                part = copies[slot.name][span.start - slot.span.start : span.stop - slot.span.start]
                self.shard[span.start - shard.start : span.stop - shard.start].copy_(part)
            self.release()

    def hand_over(self) -> None:
        """Give the parameters gathered weights of their own for good."""
        self._point_to([view.clone() for view in self.views])
        self.flat.free()

    def _point_to(self, tensors: Sequence[Tensor]) -> None:
        for param, tensor in zip(self.params, tensors, strict=True):
            param.data = tensor


def _blank(like: Tensor) -> float:
    """What a released parameter reads as."""
    return float("nan") if like.is_floating_point() else 0.0
