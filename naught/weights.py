"""Weights: a segment's parameters on one rank, whole while they are present and husks while they are not."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from naught.comm import Seat
from naught.disk_side import DiskSide
from naught.errors import UsageError
from naught.flat import Flat
from naught.guard import Guard
from naught.holding import Buffer
from naught.home import Home, Types
from naught.husks import Husks
from naught.layout import Layout
from naught.shelves import DeviceShelf, Shelf
from naught.spill import Stored

__all__ = ["Weights"]


class Weights:
    """Parameters as views of one flat, and this rank's slice of it. While they are absent, parameters are husks; only split
    weights give their memory back meanwhile. Those have a shard of their own on a shelf or on disk, unless there is neither: then
    somebody else can tell what the slice is."""

    def __init__(
        self,
        params: Sequence[nn.Parameter],
        layout: Layout,
        types: Types,
        home: Home,
        shelf: Shelf | None,
        disk: DiskSide | None = None,
        *,
        split: bool,
    ) -> None:
        group, dtype, device = home.group, types.weights, home.device
        self.params, self.layout, self.group, self.split, self.shelf = list(params), layout, group, split, shelf
        self.rounds, self.repeated = types.rounds, types.repeated
        # A rank alone would keep a copy of all of it: where that rests on the device, the flat itself is the shard.
        self.stays = not split or (group.parts == 1 and isinstance(shelf, DeviceShelf))
        category, pool = ("weights", None) if self.stays else (Buffer.GATHERED, home.pool)
        self.flat = Flat(layout, dtype, device, category=category, meter=home.meter, pool=pool)
        self.shard: Tensor | None = self.flat.slices[group.part]
        self.stored: Stored | None = None  # the slice, on disk
        self.bound = False  # the parameters are views of the flat
        self.husks = Husks(layout, dtype, device)
        self.guard = Guard(self.params, layout)
        self._adopt()
        if not self.stays:
            mine, self.shard = self.flat.slices[group.part], None
            if disk is not None:
                with group.noting():
                    self.stored = disk.take(mine.numel(), dtype, "weights")
                    self.stored.fill(mine)
            elif shelf is not None:
                self.shard = shelf.take(mine.numel(), dtype, "weights", travels=True).copy_(mine)
        if split:
            self.release()

    @property
    def device(self) -> torch.device:
        return self.flat.tensor.device

    @property
    def shard_bytes(self) -> int:
        """Of this rank's slice, wherever it rests."""
        if self.stored is not None:
            return self.stored.numel * self.stored.dtype.itemsize
        return 0 if self.shard is None else self.shard.nbytes

    def _adopt(self) -> None:
        """Move the parameters into the flat, as rank 0 has them, and make them views of it."""
        self.flat.alloc()
        self.flat.clear_gaps()
        for param, view in zip(self.params, self.flat.slots, strict=True):
            self.rounds(view, param.data.to(view.device))
        self.group.spread_whole(self.flat.tensor, repeated=self.repeated)
        self.bind()

    def open(self) -> Tensor:
        """This rank's slice of the flat, which has its memory from here on."""
        self.flat.alloc()
        return self.flat.slices[self.group.part]

    def bind(self) -> None:
        """Let the parameters be views of the flat."""
        if not self.bound:
            self.guard.look()
            self._point_to(self.flat.slots)
            self.bound = True
            if self.split:
                self.guard.forbid_writes()
            else:
                self.guard.expect([view.data_ptr() for view in self.flat.slots])

    def hide(self) -> None:
        """Leave husks: what the flat holds is not what training has come to."""
        self.guard.look()
        self._point_to(self.husks.tensors)
        self.guard.expect(self.husks.addresses)

    def release(self) -> None:
        """Leave husks, and free the flat unless it stays."""
        self.hide()
        if not self.stays:
            self.flat.free()

    def lend(self) -> None:
        """Give the parameters copies of their own, which stay valid when the flat is gone."""
        if self.split:
            self._point_to([view.clone() for view in self.flat.slots])
            if not self.stays:
                self.flat.free()

    def spread(self, writer: Seat) -> None:
        """Make lent copies what one rank has made of its own."""
        for param in self.params:
            whole = param.data.contiguous()
            self.group.spread_whole(whole, writer, repeated=self.repeated)
            if whole.data_ptr() != param.data_ptr():
                param.data.copy_(whole)

    def take_back(self, mine: Tensor) -> None:
        """Keep what was written, as far as it is this rank's, also where parameters were given other data. Split weights are
        written to what the caller has as this rank's slice."""
        for slot, param in zip(self.layout.slots, self.params, strict=True):
            if param.shape != slot.shape:
                raise UsageError(
                    f'parameter "{slot.name}" {list(slot.shape)} was given data of another shape, {list(param.shape)}',
                    fix="change shapes before the engine is made",
                )
        if not self.split:
            for param, view in zip(self.params, self.flat.slots, strict=True):
                if param.data_ptr() != view.data_ptr():
                    view.copy_(param.data)
            self.guard.expect([])
            self.bound = False
            self.bind()
        else:
            shard = self.layout.shard(self.group.part)
            copies = {slot.name: param.data.reshape(-1) for slot, param in zip(self.layout.slots, self.params, strict=True)}
            for slot, span in self.layout.owned(self.group.part):
                part = copies[slot.name][span.start - slot.span.start : span.stop - slot.span.start]
                mine[span.start - shard.start : span.stop - shard.start].copy_(part)
            self.release()

    def hand_over(self) -> None:
        """Give the parameters gathered weights of their own for good."""
        self._point_to([view.clone() for view in self.flat.slots])
        self.flat.free()
        if not self.stays and self.shard is not None and self.shelf is not None:
            self.shelf.give_back(self.shard, "weights")
        if self.stored is not None:
            self.stored.give_back()
        self.shard = self.stored = None

    def _point_to(self, tensors: Sequence[Tensor]) -> None:
        for param, tensor in zip(self.params, tensors, strict=True):
            param.data = tensor
        self.bound = False
        self.guard.expect([])
