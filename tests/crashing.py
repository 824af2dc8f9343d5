"""A file system in memory that can fail at any call, and lose in a crash whatever nobody has waited for."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from naught.errors import StorageError


class Crash(BaseException):
    """The machine is gone."""


@dataclass
class Inode:
    """A file: what a reader sees, and what a crash leaves for sure."""

    data: bytearray = field(default_factory=bytearray)
    safe: bytes = b""


@dataclass
class Folder:
    """Names that a reader sees, and those that a crash leaves for sure."""

    entries: dict[str, Inode | Folder] = field(default_factory=dict)
    safe: dict[str, Inode | Folder] = field(default_factory=dict)


class MemoryDisk:
    """`stop_at` is the call at which `fault` happens: a crash, or an error of the disk."""

    def __init__(self, root: Folder | None = None, *, stop_at: int | None = None, fault: BaseException | None = None) -> None:
        self.root = root or Folder()
        self.calls, self.stop_at, self.fault = 0, stop_at, fault

    def _call(self) -> None:
        self.calls += 1
        if self.stop_at is not None and self.calls - 1 == self.stop_at and self.fault is not None:
            raise self.fault

    def _find(self, path: str) -> Inode | Folder:
        at: Inode | Folder = self.root
        for name in path.split("/")[1:]:
            if not isinstance(at, Folder) or name not in at.entries:
                raise StorageError(f"there is no {path}")
            at = at.entries[name]
        return at

    def _folder(self, path: str) -> Folder:
        found = self._find(path)
        if not isinstance(found, Folder):
            raise StorageError(f"{path} is no folder")
        return found

    def _file(self, path: str) -> Inode:
        found = self._find(path)
        if not isinstance(found, Inode):
            raise StorageError(f"{path} is no plain file")
        return found

    def _parent(self, path: str) -> tuple[Folder, str]:
        folder, _, name = path.rpartition("/")
        return self._folder(folder), name

    # --- what a checkpoint calls ---

    def ensure_folder(self, path: str) -> None:
        self._folder(path)

    def make_folder(self, path: str) -> None:
        self._call()
        parent, name = self._parent(path)
        if name in parent.entries:
            raise StorageError(f"{path} exists")
        parent.entries[name] = Folder()

    def create(self, path: str, nbytes: int) -> MemoryFile:
        self._call()
        parent, name = self._parent(path)
        if name in parent.entries:
            raise StorageError(f"{path} exists")
        inode = parent.entries[name] = Inode()
        return MemoryFile(self, inode, nbytes)

    def read(self, path: str, start: int, stop: int, into: memoryview | None = None) -> memoryview:
        del into
        data = self._file(path).data
        if stop > len(data):
            raise StorageError(f"{path} ends early")
        return memoryview(bytes(data[start:stop]))

    def size(self, path: str) -> int:
        return len(self._file(path).data)

    def is_folder(self, path: str) -> bool:
        return isinstance(self._find(path), Folder)

    def names(self, path: str) -> list[str]:
        return sorted(self._folder(path).entries)

    def rename(self, path: str, to: str) -> None:
        self._call()
        (source, old), (target, new) = self._parent(path), self._parent(to)
        if new in target.entries:
            raise StorageError(f"{to} exists")
        target.entries[new] = source.entries.pop(old)

    def remove(self, path: str) -> None:
        self._call()
        parent, name = self._parent(path)
        del parent.entries[name]

    def remove_folder(self, path: str) -> None:
        self._call()
        parent, name = self._parent(path)
        if self._folder(path).entries:
            raise StorageError(f"{path} is not empty")
        del parent.entries[name]

    def sync_folder(self, path: str) -> None:
        self._call()
        folder = self._folder(path)
        folder.safe = dict(folder.entries)

    def free_bytes(self, path: str) -> int:
        del path
        return 1 << 40

    def hold(self, path: str) -> MemoryHold:
        """Nobody else is there."""
        self._folder(path)
        return MemoryHold()

    # --- what a crash leaves ---

    def after_crash(self, dice: random.Random) -> MemoryDisk:
        """For every name and every file one of the states that may have reached the disk."""
        return MemoryDisk(_left(self.root, dice, {}))


class MemoryHold:
    def let_go(self) -> None:
        pass


class MemoryFile:
    def __init__(self, disk: MemoryDisk, inode: Inode, nbytes: int) -> None:
        self.disk, self.inode, self.nbytes = disk, inode, nbytes

    def write(self, data: bytes | memoryview) -> None:
        self.disk._call()
        self.inode.data += bytes(data)

    def finish(self) -> None:
        self.disk._call()
        self.inode.safe = bytes(self.inode.data)

    def abandon(self) -> None:
        pass


def _left(folder: Folder, dice: random.Random, seen: dict[int, Inode | Folder]) -> Folder:
    left = Folder()
    for name in {**folder.safe, **folder.entries}:
        member = dice.choice([folder.safe, folder.entries]).get(name)
        if member is None:
            continue
        if id(member) not in seen:
            seen[id(member)] = _left(member, dice, seen) if isinstance(member, Folder) else _torn(member, dice)
        left.entries[name] = seen[id(member)]
    left.safe = dict(left.entries)
    return left


def _torn(inode: Inode, dice: random.Random) -> Inode:
    """What was waited for is there; of the rest anything may be, and zeros where blocks were never written."""
    if len(inode.data) == len(inode.safe):
        return Inode(bytearray(inode.data), bytes(inode.data))
    kept = dice.randint(len(inode.safe), len(inode.data))
    data = bytearray(inode.data[:kept])
    if dice.random() < 0.3:
        data[len(inode.safe) :] = bytes(len(data) - len(inode.safe))
    return Inode(data, bytes(data))
