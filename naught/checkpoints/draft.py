"""Draft: a checkpoint that is being written.

It is written into a folder with a name of its own, and one rename gives it its tag once every byte of it is safe. Whatever
stops a save leaves at most a folder that nobody takes for a checkpoint. No pointer decides anything.
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Executor

from naught.checkpoints.disk import Bytes, Hold
from naught.checkpoints.manifest import Manifest, Sealed, Table, seal, text_of
from naught.checkpoints.names import LATEST, MANIFEST, POINTER, UNDER_WAY, refuse_tag, shard_name, table_name
from naught.checkpoints.removing import clear
from naught.checkpoints.shard import write_shard
from naught.checkpoints.store import Saved, Store
from naught.errors import CheckpointError, StorageError

__all__ = ["Draft"]


class Draft:
    """What is to have a tag in a store. One process of a job begins, commits and abandons; every rank writes its own files."""

    def __init__(self, store: Store, tag: str, identity: str) -> None:
        self.store, self.tag, self.identity = store, tag, identity
        self.folder = f"{UNDER_WAY}{tag}-{identity}"
        self.held: Hold | None = None  # while it is, nobody else sweeps the folder away

    def begin(self, nbytes: int) -> None:
        """Make the folder, where so many bytes will find room, and keep it to this process."""
        refuse_tag(self.tag)
        disk, root = self.store.disk, self.store.root
        disk.ensure_folder(root)
        free = disk.free_bytes(root)
        if free < nbytes:
            raise StorageError(f"saving needs {nbytes} bytes in {root}, and {free} are free", fix="make room, or save elsewhere")
        if self.tag in disk.names(root):
            raise CheckpointError(
                f"{self.store.path(self.tag)} is there already, and a checkpoint is never overwritten",
                fix="save under another tag, or remove it",
            )
        disk.make_folder(self.store.path(self.folder))
        self.held = disk.hold(self.store.path(self.folder))

    def write_rank(self, table: Table, header: bytes, data: Iterable[Bytes], *, threads: Executor | None = None) -> Sealed:
        """Write one rank's shard and the table of it, which lacks the checksums. Returns what the manifest must say of it."""
        path = self.store.path(self.folder, shard_name(table.rank))
        shard = write_shard(self.store.disk, path, header, data, table.nbytes, threads=threads)
        text = text_of(table.model_copy(update={"checksums": shard.checksums}))
        self._write((self.folder, table_name(table.rank)), text)
        return seal(text)

    def commit(self, manifest: Manifest) -> None:
        """Every rank has written its files: look at them, say so in a manifest, and give the folder its tag."""
        disk, here = self.store.disk, self.store.path(self.folder)
        self._refuse_other_files(manifest)
        self._write((self.folder, MANIFEST), text_of(manifest))
        disk.sync_folder(here)
        disk.rename(here, self.store.path(self.tag))
        try:
            disk.sync_folder(self.store.root)
        except StorageError:
            disk.rename(self.store.path(self.tag), here)  # nobody can promise that it stays: it is none
            raise
        self.let_go()

    def _refuse_other_files(self, manifest: Manifest) -> None:
        saved = Saved(self.folder, manifest)
        for rank in range(manifest.world):
            try:
                self.store.shard(saved, self.store.table(saved, rank))
            except CheckpointError as error:
                raise StorageError(
                    f"what rank {rank} wrote is not what this rank sees: {error.what}",
                    fix="save to a folder that all hosts share",
                ) from error

    def point(self) -> None:
        """Say in a text which checkpoint is the latest: for people. Nothing here reads it."""
        disk, passing = self.store.disk, f"{POINTER}{self.identity}"
        try:
            self._write((passing,), f"{self.tag}\n".encode())
            disk.rename(self.store.path(passing), self.store.path(LATEST))
        except StorageError:
            if passing in disk.names(self.store.root):
                disk.remove(self.store.path(passing))
            raise

    def abandon(self) -> None:
        """Remove what has been written so far, if it has begun."""
        self.let_go()
        if self.folder in self.store.disk.names(self.store.root):
            clear(self.store, self.folder)

    def let_go(self) -> None:
        if self.held is not None:
            self.held.let_go()
            self.held = None

    def _write(self, names: tuple[str, ...], text: bytes) -> None:
        file = self.store.disk.create(self.store.path(*names), len(text))
        try:
            file.write(text)
        except BaseException:
            file.abandon()
            raise
        file.finish()
