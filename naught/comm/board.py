"""Board: notes that ranks pin up for each other in their store. Nobody waits for a note, and nobody asks a store that is gone."""

from __future__ import annotations

import select
from contextlib import suppress
from pathlib import Path

import torch.distributed as dist

from naught.errors import StorageError

__all__ = ["Board"]

_OPEN_FILES = Path("/proc/self/fd")


class Board:
    """Every rank has the same name for it. For threads that work in the background."""

    def __init__(self, name: str) -> None:
        self.prefix = f"naught/board/{name}"
        # A connection of its own: others may wait in theirs, and nobody else can use it meanwhile.
        before = _sockets()
        self.store = dist.distributed_c10d._get_default_store().clone()  # type: ignore[attr-defined]  # torch's stubs lag
        made = _sockets() - before
        self.line = made.pop()[0] if len(made) == 1 else None  # None: the store is a file, or nobody can tell

    def is_open(self) -> bool:
        """Whether the ranks are still together and somebody keeps their store. torch writes pages to the log about a store
        that does not answer, and it is no fault if the process that kept it has ended before this one."""
        return dist.is_initialized() and (self.line is None or not _is_hung_up(self.line))

    def pin(self, name: str, text: str) -> None:
        try:
            self.store.set(f"{self.prefix}/{name}", text)
        except RuntimeError as error:  # torch's errors of stores are some
            raise _lost(error) from error

    def read(self, name: str) -> str | None:
        """None: nobody has pinned it up yet."""
        key = f"{self.prefix}/{name}"
        try:
            return self.store.get(key).decode() if self.store.check([key]) else None
        except RuntimeError as error:
            raise _lost(error) from error


def _sockets() -> set[tuple[int, str]]:
    """This process's open sockets, each with the system's name for it; none where the system does not tell."""
    found = set()
    with suppress(FileNotFoundError):
        for path in _OPEN_FILES.iterdir():
            with suppress(FileNotFoundError):  # the one through which they are listed is closed again
                found.add((int(path.name), str(path.readlink())))
    return {(number, name) for number, name in found if name.startswith("socket:")}


def _is_hung_up(line: int) -> bool:
    """Between questions there is nothing to be read but the end of the connection."""
    ready = select.poll()
    ready.register(line, select.POLLIN)
    return bool(ready.poll(0))


def _lost(error: RuntimeError) -> StorageError:
    return StorageError(f"the ranks' store is gone: {error}", fix="look at the log of rank 0")
