"""Reading: bytes that are wanted out of files, in large reads, none of them twice, and no more than the chunks around them."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import groupby
from operator import attrgetter
from typing import NamedTuple, Protocol

from naught.checkpoints.shard import CHUNK_BYTES, SIZES

__all__ = ["Got", "Source", "Want", "read_all"]

_BLOCK_BYTES = 8 * CHUNK_BYTES
_AHEAD = 4  # blocks, each with a thread


class Source(Protocol):
    """A file to be read."""

    def read(self, start: int, stop: int, into: memoryview | None = None) -> memoryview: ...


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


class _Block(NamedTuple):
    """Bytes of a file that are read at once, and what of them is wanted: from which byte to which, of which."""

    file: int
    start: int
    stop: int
    parts: list[tuple[int, int, Want]]


def read_all(files: Sequence[Source], wants: Sequence[Want]) -> Iterator[Got]:
    """Everything that is wanted, in the order of the files. What is returned is good until the next is asked for.

    Threads read and check a few blocks ahead.
    """
    blocks = iter(_blocks(wants))
    with ThreadPoolExecutor(_AHEAD, "naught-reader") as readers:
        under_way: deque[tuple[_Block, memoryview, Future[memoryview]]] = deque()

        def go_on(room: memoryview | None) -> None:
            block = next(blocks, None)
            if block is not None:
                room = memoryview(bytearray(_BLOCK_BYTES + CHUNK_BYTES)) if room is None else room
                under_way.append((block, room, readers.submit(files[block.file].read, block.start, block.stop, room)))

        for _ in range(_AHEAD):
            go_on(None)
        while under_way:
            block, room, reading = under_way.popleft()
            found = reading.result()
            for start, stop, want in block.parts:
                yield Got(want, (start - want.start) // SIZES[want.dtype], found[start - block.start : stop - block.start])
            go_on(room)


def _blocks(wants: Sequence[Want]) -> Iterator[_Block]:
    """Blocks begin with a chunk, and end with one or where nothing more is wanted."""
    for file, group in groupby(sorted(wants), key=attrgetter("file")):
        members = list(group)
        spans = _chunks_around(members)
        starts = [start for start, _ in spans]
        block: _Block | None = None
        for want in members:
            size, at = SIZES[want.dtype], want.start
            while at < want.stop:
                if block is None or at + size > block.stop:  # an element across the end of a block begins the next one
                    if block is not None:
                        yield block
                    begin = at - at % CHUNK_BYTES
                    end = spans[bisect_right(starts, at) - 1][1]
                    block = _Block(file, begin, min(begin + _BLOCK_BYTES, end), [])
                count = (min(want.stop, block.stop) - at) // size
                block.parts.append((at, at + count * size, want))
                at += count * size
        if block is not None:
            yield block


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
