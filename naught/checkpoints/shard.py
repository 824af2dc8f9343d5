"""Shard: one rank's file of a checkpoint. A safetensors file, with a checksum for every megabyte of it kept elsewhere."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Executor, Future, wait
from dataclasses import dataclass
from itertools import chain
from typing import Any

from naught.checkpoints.disk import Bytes, Disk
from naught.errors import CheckpointDamaged

__all__ = ["CHUNK_BYTES", "SIZES", "Entry", "Shard", "ShardFile", "header_of", "write_shard"]

CHUNK_BYTES = 1 << 20
_ALIGN = 8

# Bytes of an element, by safetensors' names.
SIZES: Mapping[str, int] = {
    **{"F64": 8, "F32": 4, "BF16": 2, "F16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "C64": 8},
    **{"I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1},
}


@dataclass(frozen=True)
class Entry:
    """A tensor of a shard: its name, type, shape, and where it lies in the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True)
class Shard:
    """What is known of a shard file without reading it: its bytes, and the checksum of each chunk of them."""

    nbytes: int
    checksums: tuple[int, ...]


def header_of(tensors: Sequence[tuple[str, str, tuple[int, ...]]], metadata: Mapping[str, str]) -> tuple[bytes, list[Entry]]:
    """The beginning of a shard file, and where its tensors lie, one behind the other."""
    offsets: list[tuple[int, int]] = []
    end = 0
    for _, dtype, shape in tensors:
        nbytes = SIZES[dtype]
        for extent in shape:
            nbytes *= extent
        offsets.append((end, end + nbytes))
        end += nbytes
    described: dict[str, Any] = {"__metadata__": dict(metadata)}
    for (name, dtype, shape), span in zip(tensors, offsets, strict=True):
        described[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": list(span)}
    text = json.dumps(described, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGN)
    begin = 8 + len(text)
    entries = [
        Entry(name, dtype, shape, begin + start, begin + stop)
        for (name, dtype, shape), (start, stop) in zip(tensors, offsets, strict=True)
    ]
    return len(text).to_bytes(8, "little") + text, entries


def write_shard(
    disk: Disk, path: str, header: bytes, data: Iterable[Bytes], nbytes: int, *, threads: Executor | None = None
) -> Shard:
    """Write a shard of so many bytes in all, and wait until it is safe. With threads, a part of the data must stay as it is
    until the next but one is asked for."""
    sums = _Checksums()
    file = disk.create(path, nbytes)
    under_way: list[Future[None]] = []
    try:
        for part in chain((header,), data):  # made while the one before is summed up and written
            if threads is None:
                sums.take(part)
                file.write(part)
                continue
            for work in under_way:
                work.result()
            under_way = [threads.submit(sums.take, part), threads.submit(file.write, part)]
        for work in under_way:
            work.result()
    except BaseException:
        wait(under_way)  # nobody may write to a file that is closed: its number may soon be another's
        file.abandon()
        raise
    file.finish()
    shard = sums.shard()
    assert shard.nbytes == nbytes, f"{shard.nbytes} bytes were written, not {nbytes}"
    return shard


class _Checksums:
    """Those of the chunks of a stream of bytes, however it is cut."""

    def __init__(self) -> None:
        self.done: list[int] = []
        self.current, self.nbytes = 0, 0

    def take(self, data: Bytes) -> None:
        rest = memoryview(data).cast("B")
        while rest:
            room = CHUNK_BYTES - self.nbytes % CHUNK_BYTES
            part, rest = rest[:room], rest[room:]
            self.current = zlib.crc32(part, self.current)
            self.nbytes += len(part)
            if self.nbytes % CHUNK_BYTES == 0:
                self.done.append(self.current)
                self.current = 0

    def shard(self) -> Shard:
        last = [self.current] if self.nbytes % CHUNK_BYTES else []
        return Shard(self.nbytes, (*self.done, *last))


class ShardFile:
    """A shard to be read. Every byte that it returns has passed its checksum."""

    def __init__(self, disk: Disk, path: str, shard: Shard) -> None:
        self.disk, self.path, self.shard = disk, path, shard
        found = disk.size(path)
        if found != shard.nbytes:
            kind = "cut off" if found < shard.nbytes else "too long"
            raise CheckpointDamaged(f"{path} is {found} bytes, and {shard.nbytes} were written: it is {kind}", fix=_FIX)

    def read(self, start: int, stop: int, into: memoryview | None = None) -> memoryview:
        """These bytes of the file, and no more than the chunks around them are read, into memory of the caller's if that has
        room for these."""
        assert 0 <= start <= stop <= self.shard.nbytes
        if start == stop:
            return memoryview(b"")
        first, last = start // CHUNK_BYTES, (stop - 1) // CHUNK_BYTES
        begin = first * CHUNK_BYTES
        found = self.disk.read(self.path, begin, min((last + 1) * CHUNK_BYTES, self.shard.nbytes), into)
        for chunk in range(first, last + 1):
            at = (chunk - first) * CHUNK_BYTES
            self._check(chunk, found[at : at + CHUNK_BYTES])
        return found[start - begin : stop - begin]

    def verify(self) -> None:
        """Read all of it, a chunk at a time."""
        for start in range(0, self.shard.nbytes, CHUNK_BYTES):
            self.read(start, min(start + CHUNK_BYTES, self.shard.nbytes))

    def _check(self, chunk: int, data: memoryview) -> None:
        found, wanted = zlib.crc32(data), self.shard.checksums[chunk]
        if found != wanted:
            raise CheckpointDamaged(
                f"{self.path} is damaged in chunk {chunk} (from byte {chunk * CHUNK_BYTES}): "
                f"its checksum is {found:08x}, and {wanted:08x} was written",
                fix=_FIX,
            )


_FIX = "load another checkpoint"
