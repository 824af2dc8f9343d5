"""Disk: bytes a second of large sequential writes and reads in a folder, past the page cache. The file is gone at once.

Its name is removed as soon as it is open, so nothing is left behind even by a process that is killed.
"""

from __future__ import annotations

import errno
import mmap
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from naught.errors import StorageError

__all__ = ["DiskRate", "direct_alignment", "disk_rate"]

_BLOCK_BYTES = 16 << 20
_SYNC_BLOCKS = 8  # a page cache takes what it is given: without a sync now and then the clock would see memory
_SHARE_OF_FREE = 10
_ALIGNMENTS = (512, 1024, 2048, 4096, 8192, 16384, 65536)


class DiskRate(NamedTuple):
    """Bytes a second, how many were moved each way, and to what O_DIRECT aligns; None: the file system has none."""

    write_bytes_s: float
    read_bytes_s: float
    nbytes: int
    alignment: int | None

    @property
    def bytes_s(self) -> float:
        """For as much in either direction."""
        return 2 / (1 / self.write_bytes_s + 1 / self.read_bytes_s)


def disk_rate(folder: Path, *, most_bytes: int = 2**30, budget_s: float = 4.0) -> DiskRate:
    """Write for half of the budget, or until the file is as large as it may be, and read it again."""
    alignment = direct_alignment(folder)
    with _telling(folder), _nameless(folder, direct=alignment is not None) as handle, mmap.mmap(-1, _BLOCK_BYTES) as block:
        room = os.fstatvfs(handle)
        blocks = min(most_bytes, room.f_bavail * room.f_frsize // _SHARE_OF_FREE) // _BLOCK_BYTES
        if blocks < 1:
            raise OSError(errno.ENOSPC, "too little room for a file to measure with")
        block.write(os.urandom(_BLOCK_BYTES))  # some file systems compress, and zeros would cost nothing

        def write(at: int) -> None:
            _whole(os.pwritev(handle, [block], at * _BLOCK_BYTES))
            if at % _SYNC_BLOCKS == _SYNC_BLOCKS - 1:
                os.fdatasync(handle)

        written = _rounds(write, blocks, budget_s / 2, finish=lambda: os.fsync(handle))
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        read = _rounds(lambda at: _whole(os.preadv(handle, [block], at * _BLOCK_BYTES)), written.blocks, budget_s / 2)
    return DiskRate(written.bytes_s, read.bytes_s, written.blocks * _BLOCK_BYTES, alignment)


def direct_alignment(folder: Path) -> int | None:
    """The least number of bytes to which O_DIRECT wants offsets and lengths aligned there; None: it cannot be had."""
    with _telling(folder):
        try:
            with _nameless(folder, direct=True) as handle, mmap.mmap(-1, _ALIGNMENTS[-1]) as page, memoryview(page) as view:
                return next((size for size in _ALIGNMENTS if _takes(handle, view[:size])), None)
        except OSError as error:
            if error.errno in (errno.EINVAL, errno.EOPNOTSUPP):
                return None
            raise


def _takes(handle: int, piece: memoryview) -> bool:
    """Whether a piece can be written just behind another of its size."""
    with piece:
        try:
            return os.pwritev(handle, [piece], len(piece)) == len(piece)
        except OSError as error:
            if error.errno == errno.EINVAL:
                return False
            raise


@contextmanager
def _telling(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StorageError(
            f"cannot measure the disk: {error.strerror or error}", where=str(folder), fix="name another folder with --folder"
        ) from error


@contextmanager
def _nameless(folder: Path, *, direct: bool) -> Iterator[int]:
    """An open file that is in no folder any more."""
    first, name = tempfile.mkstemp(prefix=".naught-disk-", dir=folder)
    try:
        os.close(first)
        handle = os.open(name, os.O_RDWR | os.O_CLOEXEC | (os.O_DIRECT if direct else 0))
    finally:
        Path(name).unlink()
    try:
        yield handle
    finally:
        os.close(handle)


class _Run(NamedTuple):
    blocks: int
    bytes_s: float


def _rounds(work: Callable[[int], None], most: int, budget_s: float, finish: Callable[[], None] = lambda: None) -> _Run:
    """Blocks one behind the other until there are enough or time is up."""
    start, count = time.perf_counter(), 0
    while count < most and (count == 0 or time.perf_counter() - start < budget_s):
        work(count)
        count += 1
    finish()
    return _Run(count, count * _BLOCK_BYTES / (time.perf_counter() - start))


def _whole(nbytes: int) -> None:
    if nbytes != _BLOCK_BYTES:
        raise OSError(errno.EIO, f"{nbytes} of {_BLOCK_BYTES} bytes were moved at once")
