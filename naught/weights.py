"""Weights: a segment's parameters on one rank, whole while they are present and husks while they are not."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from naught.comm import Group, Pending
from naught.errors import UsageError
from naught.flat import Flat, Meter
from naught.holding import Buffer
from naught.layout import Layout

__all__ = ["Weights", "check_husks"]


class Weights:
    """Parameters as views of one flat, and this rank's slice of it.

    Absent parameters are husks: NaN of their true shape and type, so that a read is seen, and a write changes the mark
    that they all point to. Only split weights give their memory back meanwhile.
    """

    def __init__(
        self, params: Sequence[nn.Parameter], layout: Layout, dtype: torch.dtype, group: Group, meter: Meter, *, split: bool
    ) -> None:
        self.params, self.layout, self.group, self.split = list(params), layout, group, split
        device = self.params[0].device
        self.flat = Flat(layout, dtype, device, category=Buffer.GATHERED if split else "weights", meter=meter)
        self.marks = torch.full((len(self.params),), _blank(dtype), dtype=dtype, device=device)
        self.husks = [mark.expand(slot.shape) for mark, slot in zip(self.marks, layout.slots, strict=True)]
        self.shard = self.flat.slices[group.rank]
        self.bound = False  # the parameters are views of the flat
        self.versions: list[int] = []  # of split parameters when they were bound
        self.husk_addresses = [husk.data_ptr() for husk in self.husks]
        self.addresses: list[int] = []  # where the parameters must be; none while it changes with every gather
        self.fault: UsageError | None = None  # what was done to the parameters, until it is told
        self._adopt()
        if split:
            self.shard = self.shard.clone()
            meter.change("weights", self.shard.nbytes)
            self.release()

    def _adopt(self) -> None:
        """Move the parameters into the flat, as rank 0 has them, and make them views of it."""
        self.flat.alloc()
        self.flat.clear_gaps()
        for param, view in zip(self.params, self.flat.slots, strict=True):
            view.copy_(param.data)
        self.group.spread(self.flat.tensor)
        self.bind()

    def start_gather(self, unit: str) -> Pending:
        if self.split:
            self.flat.alloc()
            self.flat.slices[self.group.rank].copy_(self.shard)
        return self.group.gather(self.flat.tensor, self.flat.slices, unit)

    def bind(self) -> None:
        """Let the parameters be views of the flat."""
        if not self.bound:
            self.fault = self.fault or self._moved()
            self._point_to(self.flat.slots)
            self.bound = True
            if not self.split:
                self.addresses = [view.data_ptr() for view in self.flat.slots]
            if self.split:
                self.versions = [param._version for param in self.params]

    def hide(self) -> None:
        """Leave husks: what the flat holds is not what training has come to."""
        self._point_to(self.husks)
        self.addresses = self.husk_addresses

    def release(self) -> None:
        """Free the flat and leave husks. What was written to it meanwhile is lost, and remarked."""
        if self.bound and self.versions != [param._version for param in self.params]:
            changed = zip(self.layout.slots, self.params, self.versions, strict=True)
            name = next(slot.name for slot, param, version in changed if param._version != version)
            self.fault = UsageError(
                f'parameter "{name}" was written to inside a pass, and what was written is gone with the gathered weights',
                fix="write inside engine.gathered()",
            )
        self.hide()
        self.flat.free()

    def lend(self) -> None:
        """Give the parameters copies of their own, which stay valid when the flat is gone."""
        if self.split:
            self._point_to([view.clone() for view in self.flat.slots])
            self.flat.free()

    def take_back(self) -> None:
        """Keep what was written, as far as it is this rank's, also where parameters were given other data."""
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
            self.bound, self.addresses = False, []
            self.bind()
        else:
            shard = self.layout.shard(self.group.rank)
            copies = {slot.name: param.data.reshape(-1) for slot, param in zip(self.layout.slots, self.params, strict=True)}
            for slot, span in self.layout.owned(self.group.rank):
                part = copies[slot.name][span.start - slot.span.start : span.stop - slot.span.start]
                self.shard[span.start - shard.start : span.stop - shard.start].copy_(part)
            self.release()

    def hand_over(self) -> None:
        """Give the parameters gathered weights of their own for good."""
        self._point_to([view.clone() for view in self.flat.slots])
        self.flat.free()
        if self.split:
            self.flat.meter.change("weights", -self.shard.nbytes)

    def amiss(self) -> UsageError | None:
        """What somebody has done to the parameters that makes a step wrong."""
        fault, self.fault = self.fault, None
        return fault or self._moved()

    def _moved(self) -> UsageError | None:
        if not self.addresses or self.addresses == [param.data_ptr() for param in self.params]:
            return None
        places = zip(self.layout.slots, self.params, self.addresses, strict=True)
        name = next(slot.name for slot, param, address in places if param.data_ptr() != address)
        return UsageError(
            f'parameter "{name}" was moved, converted or given other data after the engine was made',
            fix="call model.to() or model.half() before naught.initialize, and write inside engine.gathered()",
        )

    def _point_to(self, tensors: Sequence[Tensor]) -> None:
        for param, tensor in zip(self.params, tensors, strict=True):
            param.data = tensor
        self.bound = False
        self.addresses = []


def check_husks(everything: Iterable[Weights]) -> None:
    """Raise if a husk was written to: the write is lost. One look at all marks, for on an accelerator a look is a wait."""
    everything = list(everything)
    if not everything or not bool(torch.cat([_written(weights.marks) for weights in everything]).any()):
        return
    for weights in everything:
        written = _written(weights.marks)
        if bool(written.any()):
            name = weights.layout.slots[int(written.nonzero()[0])].name
            weights.marks.fill_(_blank(weights.marks.dtype))
            raise UsageError(
                f'parameter "{name}" was written to while it was released',
                fix="write inside engine.gathered(), or before the engine is made",
            )


def _written(marks: Tensor) -> Tensor:
    return ~marks.isnan() if marks.is_floating_point() else marks != 0


def _blank(dtype: torch.dtype) -> float:
    """What a husk reads as."""
    return float("nan") if dtype.is_floating_point else 0.0
