"""Within: where the elements of a parameter lie in another one that a checkpoint knows: a layer's, of which it is a piece, or a
whole one, of which this rank has a part. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

__all__ = ["Strip", "Within"]


class Within(NamedTuple):
    """In which parameter, from which of its elements on, and of what shape that is. Elements follow one another, or lie in rows
    of so many with a stride between where they begin."""

    name: str
    first: int
    shape: tuple[int, ...]
    row: int = 0  # 0: all in one
    stride: int = 0

    @classmethod
    def cut(cls, name: str, shape: tuple[int, ...], dim: int, index: int, count: int) -> Within:
        """One of so many equal parts along a dimension of a whole of this shape."""
        inner = math.prod(shape[dim + 1 :])
        extent = shape[dim] // count
        return cls(name, index * extent * inner, shape, extent * inner, shape[dim] * inner)

    def strips(self, start: int, stop: int) -> Iterator[Strip]:
        """Where this parameter's elements from one to another lie: a part of a row, whole rows, and a part of one."""
        at = start
        while at < stop:
            line, column = divmod(at, self.row) if self.row else (0, at)
            left = self.row - column if self.row else stop - at
            whole = (stop - at) // self.row if self.row and not column else 0
            first = self.first + line * self.stride + column
            if whole > 1:
                yield Strip(first, whole * self.row, self.row, self.stride)
                at += whole * self.row
            else:
                yield Strip(first, min(stop - at, left))
                at += min(stop - at, left)


class Strip(NamedTuple):
    """So many elements from one on, one behind the other, or in rows with a stride between where they begin."""

    first: int
    numel: int
    row: int = 0
    stride: int = 0
