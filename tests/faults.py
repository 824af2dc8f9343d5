"""Faults of the operating system's own calls: the Nth one that concerns a folder fails, writes half, or is the last of its
process."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

# What takes a path, and what takes an open file.
BY_PATH = ("open", "mkdir", "rename", "unlink", "rmdir", "statvfs", "listdir", "scandir")
BY_FILE = ("write", "fsync", "posix_fallocate")


class Faults:
    """Counts calls in a folder; at call `at` something happens."""

    def __init__(self, folder: str, at: int | None = None, what: str = "EIO") -> None:
        self.folder, self.at, self.what = folder, at, what
        self.calls: list[str] = []
        self.full = False  # after a short write there is no room
        self.awaited = ""

    def strike_next(self, name: str) -> None:
        """From here on the next call of a name fails."""
        self.awaited = name

    def strike(self, name: str, arguments: tuple[Any, ...]) -> int | None:
        """Called before each call. Raises, or tells how many bytes at most may be written."""
        self.calls.append(name)
        if name == "write" and self.full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if name == self.awaited:
            self.awaited = ""
        elif len(self.calls) - 1 != self.at:
            return None
        if self.what == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.what == "short":
            if name == "write":
                self.full = True
                return len(arguments[1]) // 2
            return None
        number = getattr(errno, self.what)
        raise OSError(number, os.strerror(number))


@contextmanager
def faults(folder: str, at: int | None = None, what: str = "EIO") -> Iterator[Faults]:
    """While open, the calls of all threads of this process are counted and fail as told."""
    told = Faults(folder, at, what)
    before = {name: getattr(os, name) for name in (*BY_PATH, *BY_FILE)}
    for name in BY_PATH:
        setattr(os, name, _by_path(told, name, before[name]))
    for name in BY_FILE:
        setattr(os, name, _by_file(told, name, before[name], before["write"]))
    try:
        yield told
    finally:
        for name, function in before.items():
            setattr(os, name, function)


def _by_path(told: Faults, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
    def call(*arguments: Any, **options: Any) -> Any:
        if arguments and isinstance(arguments[0], str | os.PathLike) and str(os.fspath(arguments[0])).startswith(told.folder):
            told.strike(name, arguments)
        return real(*arguments, **options)

    return call


def _by_file(told: Faults, name: str, real: Callable[..., Any], write: Callable[..., int]) -> Callable[..., Any]:
    def call(handle: int, *arguments: Any) -> Any:
        if str(Path(f"/proc/self/fd/{handle}").readlink()).startswith(told.folder):
            most = told.strike(name, (handle, *arguments))
            if most is not None:
                return write(handle, arguments[0][:most])
        return real(handle, *arguments)

    return call
