"""Within: where the elements of a parameter lie in another one that a checkpoint knows: a layer's, of which it is a piece, or a
whole one, of which this rank has a part. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from naught.layout import Span

__all__ = ["Within"]


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

    def spans(self, start: int, stop: int) -> Iterator[Span]:
        """Where this parameter's elements from one to another lie."""
        row, at = self.row or max(stop, 1), start
        while at < stop:
            line, column = divmod(at, row)
            count = min(stop - at, row - column)
            begin = self.first + line * self.stride + column
            yield Span(begin, begin + count)
            at += count
