"""Layout: where each parameter of a segment lies in one flat buffer. Pure arithmetic; knows no ranks but their count."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from naught.errors import ModelError

__all__ = ["ALIGN_NUMEL", "Layout", "Piece", "Slot", "Span", "intersect", "lay_out", "pad", "reshard"]

# Slots and shards start on multiples of this, so that no element's update depends on where it lies: a fused CPU
# kernel rounds its scalar tail differently from its vector body (16 fp32 lanes at the widest).
ALIGN_NUMEL = 64


class Span(NamedTuple):
    """A half-open range of elements."""

    start: int
    stop: int

    @property
    def numel(self) -> int:
        return self.stop - self.start


def intersect(a: Span, b: Span) -> Span | None:
    """The common part of two half-open ranges, or None if they do not meet."""
    start, stop = max(a.start, b.start), min(a.stop, b.stop)
    return Span(start, stop) if start < stop else None


def pad(numel: int, world: int, align: int) -> int:
    """The least multiple of world * align that holds numel elements."""
    quantum = world * align
    return -(-numel // quantum) * quantum


@dataclass(frozen=True)
class Slot:
    """One parameter's elements in the flat."""

    name: str
    shape: tuple[int, ...]
    span: Span


@dataclass(frozen=True)
class Layout:
    """The slots of a flat in definition order, and how the ranks divide it into equal contiguous shards.

    Where a slot lies does not depend on the world size; only the padding at the flat's tail does.
    """

    slots: tuple[Slot, ...]
    world: int
    align: int = ALIGN_NUMEL

    @property
    def numel(self) -> int:
        """Elements of the flat, its padding included."""
        used = self.slots[-1].span.stop if self.slots else 0
        return pad(used, self.world, self.align)

    @property
    def shard_numel(self) -> int:
        return self.numel // self.world

    def shard(self, rank: int) -> Span:
        """The range of the flat that a rank owns."""
        assert 0 <= rank < self.world, f"rank {rank} of {self.world}"
        return Span(rank * self.shard_numel, (rank + 1) * self.shard_numel)

    def gaps(self) -> Iterator[Span]:
        """What lies between the slots and behind them: padding, which is zero in every flat."""
        end = 0
        for slot in self.slots:
            if slot.span.start > end:
                yield Span(end, slot.span.start)
            end = slot.span.stop
        if self.numel > end:
            yield Span(end, self.numel)

    def owned(self, rank: int) -> Iterator[tuple[Slot, Span]]:
        """Each slot that a rank's shard touches, with the touched range in flat coordinates."""
        shard = self.shard(rank)
        for slot in self.slots:
            common = intersect(slot.span, shard)
            if common:
                yield slot, common


def lay_out(params: Iterable[tuple[str, tuple[int, ...]]], *, world: int, align: int = ALIGN_NUMEL) -> Layout:
    """Lay parameters into one flat in the order given, each on an aligned start."""
    if world < 1 or align < 1:
        raise ModelError(f"a layout needs at least one rank and an alignment of at least 1, not {world} and {align}")
    slots: list[Slot] = []
    names: set[str] = set()
    end = 0
    for name, shape in params:
        if name in names:
            raise ModelError(f'parameter "{name}" is laid out twice', fix="give each parameter one slot")
        if any(extent < 0 for extent in shape):
            raise ModelError(f'parameter "{name}" has a negative extent: {shape}')
        names.add(name)
        start = pad(end, 1, align)
        end = start + math.prod(shape)
        slots.append(Slot(name, tuple(shape), Span(start, end)))
    return Layout(tuple(slots), world, align)


class Piece(NamedTuple):
    """Elements that go from one rank's old shard to a new shard; both starts count from the shard's own start."""

    slot: str
    source_rank: int
    source_start: int
    target_start: int
    numel: int


def reshard(old: Layout, new: Layout, rank: int) -> Iterator[Piece]:
    """What a rank of the new layout must fetch, and from which old shard. Slots are matched by name."""
    sources = {slot.name: slot for slot in old.slots}
    for slot in new.slots:  # all of them, so that every rank finds the same fault
        source = sources.get(slot.name)
        if source is None or source.shape != slot.shape:
            raise ModelError(
                f'parameter "{slot.name}" {list(slot.shape)} is '
                + ("missing" if source is None else f"{list(source.shape)} in the old layout"),
                fix="re-shard between layouts of the same parameters",
            )
    target_shard = new.shard(rank)
    for slot, wanted in new.owned(rank):
        shift = sources[slot.name].span.start - slot.span.start
        yield from _across(slot.name, Span(wanted.start + shift, wanted.stop + shift), old, wanted.start - target_shard.start)


def _across(name: str, wanted: Span, old: Layout, target_start: int) -> Iterator[Piece]:
    """Cut a range of the old flat where the old shards end."""
    at = wanted.start
    while at < wanted.stop:
        rank, offset = divmod(at, old.shard_numel)
        numel = min(wanted.stop - at, old.shard_numel - offset)
        yield Piece(name, rank, offset, target_start + at - wanted.start, numel)
        at += numel
