"""Moments: a number that a rule remembers of every element, in 32 bits, or in 8 and in blocks of which each has a scale.

Eight bits are a sign, where there is one, and steps of equal ratio below the block's largest: no value down to the last step is
off by more than half a step, and what an update divides by never becomes zero. Slots and shards are aligned to blocks, so none is
divided, whatever the number of ranks; and what is taken out and put back again is the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from naught.layout import ALIGN_NUMEL
from naught.rooms import STRETCH_NUMEL
from naught.shelves import Shelf
from naught.spill import Stored

__all__ = ["BLOCK_NUMEL", "Held", "Packed", "Portion", "Wide", "pack", "unpack"]

BLOCK_NUMEL = ALIGN_NUMEL
After = Callable[[], None]


class Portion(NamedTuple):
    """Elements for an update, and what is to be done once they are updated; None: nothing."""

    values: Tensor
    after: After | None = None


class Wide:
    """In 32 bits."""

    def __init__(self, values: Tensor, category: str = "states") -> None:
        self.values, self.category = values, category

    @property
    def nbytes(self) -> int:
        return self.values.nbytes

    def whole(self) -> Tensor:
        """All of it in 32 bits. Who writes to it says so."""
        return self.values

    def written(self) -> None:
        """What `whole` gave was written to: that is itself."""

    def will_change(self) -> None:
        """An update begins: what `whole` gave changes with it."""

    def part(self, span: slice) -> Portion:
        """Some of it in 32 bits, for an update."""
        return Portion(self.values[span])

    def copied(self, to: torch.device) -> Wide:
        """The same elsewhere."""
        return Wide(self.values.to(to, copy=True), self.category)

    def give_back(self, shelf: Shelf) -> None:
        shelf.give_back(self.values, self.category)


class _Levels(NamedTuple):
    """How many values there are beside zero, the largest included, and over how many powers of two."""

    number: int
    octaves: int

    @property
    def each(self) -> float:
        """Steps for each power of two."""
        return (self.number - 1) / self.octaves


# With a sign there are half as many codes: fewer powers of two, for steps that are nearly as small (9 % and 7 %).
_SIGNED, _UNSIGNED = _Levels(127, 16), _Levels(255, 24)


class Packed:
    """In 8 bits. Who asks for all of it gets a copy on the host, which counts again once it is told to be written to."""

    def __init__(self, codes: Tensor, scales: Tensor, *, signed: bool) -> None:
        self.codes, self.scales, self.signed = codes, scales, signed
        self.copy: Tensor | None = None  # while somebody may have it

    @classmethod
    def on(cls, shelf: Shelf, numel: int, *, signed: bool) -> Packed:
        """Zeros."""
        codes = shelf.take(numel, torch.uint8, "states")
        return cls(codes, shelf.take(numel // BLOCK_NUMEL, torch.float32, "states"), signed=signed)

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scales.nbytes

    def whole(self) -> Tensor:
        if self.copy is None:
            self.copy = torch.empty(self.codes.shape, dtype=torch.float32)
            for wide, codes, scales in self._stretches(self.copy):
                wide.copy_(unpack(codes, scales, signed=self.signed))
        return self.copy

    def written(self) -> None:
        if self.copy is not None:
            for wide, codes, scales in self._stretches(self.copy):
                pack(wide.to(codes.device), codes, scales, signed=self.signed)

    def will_change(self) -> None:
        self.copy = None

    def part(self, span: slice) -> Portion:
        blocks = slice(span.start // BLOCK_NUMEL, span.stop // BLOCK_NUMEL)
        codes, scales = self.codes[span], self.scales[blocks]
        wide = unpack(codes, scales, signed=self.signed)
        return Portion(wide, partial(pack, wide, codes, scales, signed=self.signed))

    def copied(self, to: torch.device) -> Packed:
        return Packed(self.codes.to(to, copy=True), self.scales.to(to, copy=True), signed=self.signed)

    def give_back(self, shelf: Shelf) -> None:
        for tensor in (self.codes, self.scales):
            shelf.give_back(tensor, "states")

    def _stretches(self, wide: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        for start in range(0, wide.numel(), STRETCH_NUMEL):
            span = slice(start, min(start + STRETCH_NUMEL, wide.numel()))
            yield wide[span], self.codes[span], self.scales[span.start // BLOCK_NUMEL : span.stop // BLOCK_NUMEL]


Held = Wide | Packed | Stored


def unpack(codes: Tensor, scales: Tensor, *, signed: bool) -> Tensor:
    """What codes stand for."""
    values = _table(signed, codes.device).index_select(0, codes.int())
    return values.view(-1, BLOCK_NUMEL).mul_(scales.unsqueeze(1)).view(-1)


def pack(values: Tensor, codes: Tensor, scales: Tensor, *, signed: bool) -> None:
    """Find the codes that are nearest to values. Zero is zero; what is less than the last step is zero too where it has a sign,
    and else the last step."""
    levels = _SIGNED if signed else _UNSIGNED
    blocks = values.view(-1, BLOCK_NUMEL)
    sizes = blocks.abs()
    torch.amax(sizes, 1, out=scales)
    # Codes from 1 on, the largest value first. Of zero the ratio is infinite, or no number where the whole block is zero.
    ratios = scales.unsqueeze(1) / sizes
    found = ratios.log2_().mul_(levels.each).round_().add_(1)
    if signed:
        found.masked_fill_((found > levels.number) | (sizes == 0), 0)
        found.add_((blocks < 0) & (found > 0), alpha=_NEGATIVE)
    else:
        found.clamp_(max=levels.number).masked_fill_(sizes == 0, 0)
    codes.view(-1, BLOCK_NUMEL).copy_(found.nan_to_num_(0, 0, 0))


_NEGATIVE = 128  # more than the code of the same number without its sign
_TABLES: dict[tuple[bool, torch.device], Tensor] = {}


def _table(signed: bool, device: torch.device) -> Tensor:
    """What each code stands for, in parts of its block's largest."""
    found = _TABLES.get((signed, device))
    if found is None:
        levels = _SIGNED if signed else _UNSIGNED
        sizes = [0.0, *(math.exp2(-step / levels.each) for step in range(levels.number))]
        numbers = [*sizes, *(-size for size in sizes)] if signed else sizes
        found = _TABLES[signed, device] = torch.tensor(numbers, dtype=torch.float32, device=device)
    return found
