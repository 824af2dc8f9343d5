"""Elements: where those of a parameter lie in the files of a checkpoint."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from operator import attrgetter
from typing import NamedTuple

from naught.checkpoints.manifest import Table
from naught.checkpoints.shard import SIZES

__all__ = ["Located", "locate", "within"]


class Located(NamedTuple):
    """Neighbouring elements of a parameter in a file."""

    first: int
    numel: int
    file: int
    start: int  # byte
    dtype: str

    @property
    def stop(self) -> int:
        return self.start + self.numel * SIZES[self.dtype]


def locate(tables: Sequence[Table]) -> Mapping[tuple[str, str], list[Located]]:
    """By kind and parameter, in the order of the elements. The file of a rank has its number."""
    found: defaultdict[tuple[str, str], list[Located]] = defaultdict(list)
    for table in tables:
        for run in table.runs:
            for piece in run.pieces:
                for first, count, at in piece.lines():
                    start = run.start + SIZES[run.dtype] * at
                    found[run.kind, piece.param].append(Located(first, count, table.rank, start, run.dtype))
    for located in found.values():
        located.sort()
    return found


def within(located: Sequence[Located], first: int, stop: int) -> Iterator[Located]:
    """Where the elements from `first` to `stop` lie. If not all of them are there, it ends where one is missing."""
    by = attrgetter("first")
    begin = bisect_right(located, first, key=by) - 1
    if begin > 0:
        begin = bisect_left(located, located[begin].first, key=by)  # of what every rank had for itself it is the first one's
    for at in islice(located, max(0, begin), None):
        if at.first >= stop:
            return
        begin, end = max(first, at.first), min(stop, at.first + at.numel)
        if begin >= end:
            continue
        if begin > first:
            return
        yield Located(begin, end - begin, at.file, at.start + SIZES[at.dtype] * (begin - at.first), at.dtype)
        first = end
