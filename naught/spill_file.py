"""Spill file: what lies below states on disk: a file without a name, or none at all where tensors have no contents."""

from __future__ import annotations

import errno
import os
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

from naught.file_errors import telling

__all__ = ["File", "NoFile", "UnnamedFile"]

_FIXES = {
    errno.ENOSPC: "make room on the disk, name another folder in nvme_path, or let more states rest elsewhere",
    errno.EDQUOT: "make room within your quota, or name another folder in nvme_path",
    errno.EACCES: "name a folder in nvme_path that you may write to",
    errno.EROFS: "name a folder in nvme_path on a file system that can be written",
    errno.ENOENT: "name a folder in nvme_path that is there, on every host",
    errno.EIO: "the disk may be failing: look at the kernel's log, and resume from the last checkpoint",
}


class File(Protocol):
    """Bytes at places. Any thread may read and write."""

    folder: str

    def grow(self, at: int, nbytes: int) -> None:
        """Have room for so many bytes from a place on. A disk that is too full says so now."""

    def write(self, at: int, data: memoryview) -> None: ...

    def read(self, at: int, into: memoryview) -> None: ...

    def close(self) -> None:
        """Its bytes are nobody's any more."""


class UnnamedFile:
    """A file of one rank."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        with telling("make a file in", folder, _FIXES):
            self.handle = _open(folder)
        self._close = weakref.finalize(self, os.close, self.handle)

    def grow(self, at: int, nbytes: int) -> None:
        with telling(f"find room for {nbytes} bytes in", self.folder, _FIXES):
            try:
                os.posix_fallocate(self.handle, at, nbytes)
            except OSError as error:
                if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                    raise

    def write(self, at: int, data: memoryview) -> None:
        with telling("write to a file in", self.folder, _FIXES):
            self._move(os.pwritev, at, data, "nothing was written")

    def read(self, at: int, into: memoryview) -> None:
        with telling("read from a file in", self.folder, _FIXES):
            self._move(os.preadv, at, into, "the file ends before the bytes that were asked for")

    def _move(self, call: Callable[[int, list[memoryview], int], int], at: int, data: memoryview, otherwise: str) -> None:
        """To its end: a call may do a part of it."""
        done = 0
        while done < len(data):
            count = call(self.handle, [data[done:]], at + done)
            if count == 0:
                raise OSError(errno.EIO, otherwise)
            done += count

    def close(self) -> None:
        self._close()


def _open(folder: str) -> int:
    """A file without a name, past the system's cache where the file system can do that."""
    flags = os.O_RDWR | os.O_CLOEXEC
    for more in (os.O_TMPFILE | os.O_DIRECT, os.O_TMPFILE):
        with suppress(OSError):  # not every file system has one or the other
            return os.open(folder, flags | more, 0o600)
    path = os.path.join(folder, f"naught-{os.getpid()}-{threading.get_ident()}")  # noqa: PTH118  # tests fail os.open, not Path
    handle = os.open(path, flags | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    os.unlink(path)  # noqa: PTH108
    return handle


class NoFile:
    """Has room for everything and keeps nothing: for tensors without contents, whose bytes are only counted."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def grow(self, at: int, nbytes: int) -> None:
        pass

    def write(self, at: int, data: memoryview) -> None:
        pass

    def read(self, at: int, into: memoryview) -> None:
        pass

    def close(self) -> None:
        pass
