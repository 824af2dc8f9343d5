"""Reading: bytes that are wanted out of files, in large reads, none of them twice, and no more than the chunks around them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import groupby
from operator import attrgetter
from typing import NamedTuple, Protocol

from naught.checkpoints.shard import CHUNK_BYTES, SIZES

__all__ = ["Got", "Source", "Want", "read_all"]

_BLOCK_BYTES = 16 * CHUNK_BYTES


class Source(Protocol):
    """A file to be read."""

    def read(self, start: int, stop: int) -> memoryview: ...


class Want(NamedTuple):
    """Neighbouring elements in a file. `key` is the asker's own."""

    file: int
    start: int
    stop: int
    dtype: str
    key: int


class Got(NamedTuple):
    """Some of the elements that were wanted: from which on, and their bytes."""

    want: Want
    first: int
    data: memoryview


def read_all(files: Sequence[Source], wants: Sequence[Want]) -> Iterator[Got]:
    """Everything that is wanted, in the order of the files. What is returned is good until the next is asked for."""
    for file, group in groupby(sorted(wants), key=attrgetter("file")):
        yield from _read_file(files[file], list(group))


def _read_file(source: Source, wants: Sequence[Want]) -> Iterator[Got]:
    spans = _chunks_around(wants)
    starts = [start for start, _ in spans]
    begin, block = 0, memoryview(b"")
    for want in wants:
        size, at = SIZES[want.dtype], want.start
        while at < want.stop:
            if not begin <= at <= at + size <= begin + len(block):
                _, end = spans[bisect_right(starts, at) - 1]
                begin = at - at % CHUNK_BYTES
                # An element that lies across the end of a block begins the next one.
                block = source.read(begin, min(begin + _BLOCK_BYTES, end))
            count = (min(want.stop, begin + len(block)) - at) // size
            yield Got(want, (at - want.start) // size, block[at - begin : at - begin + count * size])
            at += count * size


def _chunks_around(wants: Sequence[Want]) -> list[tuple[int, int]]:
    """Where the chunks lie in which something is wanted: stretches of bytes that do not meet, in their order."""
    spans: list[tuple[int, int]] = []
    for want in wants:
        start, stop = want.start - want.start % CHUNK_BYTES, want.stop
        if spans and start <= -(-spans[-1][1] // CHUNK_BYTES) * CHUNK_BYTES:
            spans[-1] = (spans[-1][0], max(spans[-1][1], stop))
        else:
            spans.append((start, stop))
    return spans
