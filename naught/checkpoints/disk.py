"""Disk: every call to a file system that a checkpoint makes. Nothing else opens a file, so that tests can fail any of them.

Paths are joined here from a folder that the user named and names that this package made: none is ever read from a file.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Protocol

from naught.file_errors import telling

__all__ = ["Disk", "File", "Hold", "RealDisk"]

Bytes = bytes | memoryview
_EARLY_BYTES = 16 << 20


class File(Protocol):
    """A new file. Its bytes are safe once it is finished."""

    def write(self, data: Bytes) -> None: ...

    def finish(self) -> None:
        """Wait until everything is on the disk, and close."""

    def abandon(self) -> None:
        """Close, whatever has become of it."""


class Hold(Protocol):
    """A folder that is kept to one process."""

    def let_go(self) -> None: ...


class Disk(Protocol):
    """What a checkpoint needs of a file system. Every failure is a StorageError that names the path."""

    def ensure_folder(self, path: str) -> None:
        """Make a folder, and those around it, where they are not, and wait until they are on the disk."""

    def make_folder(self, path: str) -> None: ...

    def create(self, path: str, nbytes: int) -> File:
        """A file that was not there, with room for so many bytes."""

    def read(self, path: str, start: int, stop: int, into: memoryview | None = None) -> memoryview:
        """Exactly these bytes of a plain file, in memory of the caller's or new."""

    def size(self, path: str) -> int:
        """Bytes of a plain file; a link or a folder is an error."""

    def is_folder(self, path: str) -> bool: ...

    def names(self, path: str) -> list[str]: ...

    def rename(self, path: str, to: str) -> None: ...

    def remove(self, path: str) -> None: ...

    def remove_folder(self, path: str) -> None: ...

    def sync_folder(self, path: str) -> None:
        """Wait until what was made, renamed or removed in a folder is so on the disk."""

    def free_bytes(self, path: str) -> int: ...

    def hold(self, path: str) -> Hold | None:
        """Keep a folder to this process until it lets go or dies. None: another has it, or nobody can tell."""


class RealDisk:
    """The operating system's. Files are private, links are not followed."""

    def ensure_folder(self, path: str) -> None:
        with _telling("make the folder", path):
            missing = [folder for folder in (Path(path), *Path(path).parents) if not folder.exists()]
            Path(path).mkdir(0o700, parents=True, exist_ok=True)
        for folder in missing:
            self.sync_folder(str(folder.parent))

    def make_folder(self, path: str) -> None:
        with _telling("make the folder", path):
            Path(path).mkdir(0o700)

    def create(self, path: str, nbytes: int) -> File:
        with _telling("create", path):
            handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        file = _RealFile(handle, path)
        try:
            with _telling(f"find room for {nbytes} bytes in", path):
                _reserve(handle, nbytes)
        except BaseException:
            file.abandon()
            raise
        return file

    def read(self, path: str, start: int, stop: int, into: memoryview | None = None) -> memoryview:
        with _telling("read", path), _opened(path) as handle:
            found = memoryview(bytearray(stop - start)) if into is None else into[: stop - start]
            done = 0
            while start + done < stop:
                count = os.preadv(handle, [found[done:]], start + done)
                if count == 0:
                    raise OSError(errno.EIO, "the file ends before the bytes that were asked for")
                done += count
            return found

    def size(self, path: str) -> int:
        with _telling("look at", path), _opened(path) as handle:
            return os.fstat(handle).st_size

    def is_folder(self, path: str) -> bool:
        return Path(path).is_dir() and not Path(path).is_symlink()

    def names(self, path: str) -> list[str]:
        with _telling("list", path):
            return sorted(entry.name for entry in Path(path).iterdir())

    def rename(self, path: str, to: str) -> None:
        with _telling(f"rename to {to}", path):
            Path(path).rename(to)

    def remove(self, path: str) -> None:
        with _telling("remove", path):
            Path(path).unlink()

    def remove_folder(self, path: str) -> None:
        with _telling("remove the folder", path):
            Path(path).rmdir()

    def sync_folder(self, path: str) -> None:
        with _telling("sync the folder", path):
            handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)

    def free_bytes(self, path: str) -> int:
        with _telling("ask for the room in", path):
            found = os.statvfs(path)
            return found.f_bavail * found.f_frsize

    def hold(self, path: str) -> Hold | None:
        with _telling("open the folder", path):
            handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:  # held, or a file system without locks
            os.close(handle)
            return None
        return _RealHold(handle)


class _RealHold:
    def __init__(self, handle: int) -> None:
        self.handle = handle

    def let_go(self) -> None:
        os.close(self.handle)


class _RealFile:
    def __init__(self, handle: int, path: str) -> None:
        self.handle, self.path = handle, path
        self.nbytes = self.begun = 0  # written, and those of them that are on their way to the disk

    def write(self, data: Bytes) -> None:
        rest = memoryview(data).cast("B")
        with _telling("write to", self.path):
            while rest:
                written = os.write(self.handle, rest)
                if written == 0:
                    raise OSError(errno.EIO, "nothing was written")
                rest = rest[written:]
                self.nbytes += written
            if self.nbytes - self.begun >= _EARLY_BYTES:
                # The system would begin when the memory is full of them, and the sync at the end would wait for all.
                os.posix_fadvise(self.handle, self.begun, self.nbytes - self.begun, os.POSIX_FADV_DONTNEED)
                self.begun = self.nbytes

    def finish(self) -> None:
        # A failed sync is final: the kernel may have dropped the pages, and a second one would say that all is well.
        try:
            with _telling("sync", self.path):
                os.fsync(self.handle)
        finally:
            os.close(self.handle)

    def abandon(self) -> None:
        os.close(self.handle)


def _reserve(handle: int, nbytes: int) -> None:
    """Have a disk that is too full refuse now, where the file system can tell."""
    if nbytes == 0:
        return
    try:
        os.posix_fallocate(handle, 0, nbytes)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
            raise


@contextmanager
def _opened(path: str) -> Iterator[int]:
    """A plain file; a pipe must not make us wait, and a link must not lead us elsewhere."""
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise OSError(errno.EINVAL, "this is not a plain file")
        yield handle
    finally:
        os.close(handle)


_FIXES: dict[int, str] = {
    errno.ENOSPC: "make room on the disk, or save elsewhere",
    errno.EDQUOT: "make room within your quota, or save elsewhere",
    errno.EACCES: "save to a folder that you may write to",
    errno.EROFS: "save to a file system that can be written",
    errno.ELOOP: "a link stands where a file should be: remove it",
    errno.ENOENT: "look whether the folder is there, on every host",
    errno.EIO: "the disk may be failing: look at the kernel's log",
}


def _telling(what: str, path: str) -> AbstractContextManager[None]:
    return telling(what, path, _FIXES)


_: Callable[[], Disk] = RealDisk  # it is one
