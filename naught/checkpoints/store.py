"""Store: the folder in which checkpoints lie, each whole or absent.

A checkpoint is written into a folder with a name of its own, and one rename gives it its tag once every byte of it is safe.
Whatever stops a save leaves at most a folder that nobody takes for a checkpoint. No pointer decides anything.
"""

from __future__ import annotations

import logging
import re
import secrets
from collections.abc import Iterable, Sequence
from concurrent.futures import Executor
from typing import NamedTuple

from naught.checkpoints.disk import Bytes, Disk, Hold
from naught.checkpoints.manifest import Manifest, Run, Sealed, Table, parse, seal, text_of
from naught.checkpoints.shard import Shard, ShardFile, write_shard
from naught.errors import CheckpointDamaged, CheckpointError, StorageError

__all__ = ["Keep", "Saved", "Store", "Survey", "tag_of"]

_LOG = logging.getLogger("naught")
_TAG = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,119}")
_MANIFEST = "manifest.json"
_UNDER_WAY, _GOING = ".tmp-", ".trash-"
_POINTER = ".tmp-.latest-"  # no tag begins with a dot
_PICKLES = (".pt", ".pth", ".bin", ".distcp")
_CONVERT = (
    "where you trust the files, let DeepSpeed's own zero_to_fp32.py write safetensors (--safe_serialization), and give its "
    "folder to engine.load_weights"
)
_MOST_TEXT_BYTES = 1 << 28  # of a manifest or a table: more than any model needs, and less than any memory


class Saved(NamedTuple):
    """A whole checkpoint that was found."""

    tag: str
    manifest: Manifest


class Survey(NamedTuple):
    """What a folder holds: checkpoints, and by their names those that cannot be one any more, and why."""

    whole: list[Saved]
    damaged: dict[str, CheckpointError | StorageError]


class Keep(NamedTuple):
    """Which checkpoints stay when a newer one is there: the last few, and every so many steps. None, None: all."""

    last: int | None = None
    every: int | None = None

    @property
    def all(self) -> bool:
        return self.last is None and self.every is None

    def holds(self, age: int, step: int) -> bool:
        """Whether the checkpoint of a step stays that has so many newer ones."""
        return self.all or age < (self.last or 1) or (self.every is not None and step % self.every == 0)


def tag_of(step: int) -> str:
    """What a checkpoint is called unless somebody calls it otherwise. Hugging Face looks for these."""
    return f"global_step{step}"


class Store:
    """A folder of checkpoints. One process of a job begins, commits and removes; every rank writes its own files."""

    def __init__(self, disk: Disk, root: str) -> None:
        self.disk, self.root = disk, root
        self.held: Hold | None = None  # the folder of a save that has begun; nobody else sweeps it away

    def _let_go(self) -> None:
        if self.held is not None:
            self.held.let_go()
            self.held = None

    # --- saving ---

    def make_room(self, nbytes: int) -> None:
        """See that the folder is there, and stays, and that so many bytes will find room in it."""
        self.disk.ensure_folder(self.root)
        free = self.disk.free_bytes(self.root)
        if free < nbytes:
            raise StorageError(
                f"saving needs {nbytes} bytes in {self.root}, and {free} are free", fix="make room, or save elsewhere"
            )

    def begin(self, tag: str, save: str) -> str:
        """Make a folder for a checkpoint that is to have this tag, and keep it to this process. Returns its name for now."""
        self._refuse_tag(tag)
        if tag in self.disk.names(self.root):
            raise CheckpointError(
                f"{self._path(tag)} is there already, and a checkpoint is never overwritten",
                fix="save under another tag, or remove it",
            )
        folder = self.folder(tag, save)
        self.disk.make_folder(self._path(folder))
        self.held = self.disk.hold(self._path(folder))
        return folder

    @staticmethod
    def folder(tag: str, save: str) -> str:
        """The name of a checkpoint that is being written."""
        return f"{_UNDER_WAY}{tag}-{save}"

    def write_rank(
        self, folder: str, table: Table, header: bytes, data: Iterable[Bytes], *, threads: Executor | None = None
    ) -> Sealed:
        """Write one rank's shard and the table of it, which lacks the checksums. Returns what the manifest must say of it."""
        shard = write_shard(self.disk, self._path(folder, _shard(table.rank)), header, data, table.nbytes, threads=threads)
        text = text_of(table.model_copy(update={"checksums": shard.checksums}))
        self._write(self._path(folder, _table(table.rank)), text)
        return seal(text)

    def commit(self, folder: str, tag: str, manifest: Manifest) -> None:
        """Every rank has written its files: look at them, say so in a manifest, and give the folder its tag."""
        for rank in range(manifest.world):
            try:
                self.shard(Saved(folder, manifest), self.table(Saved(folder, manifest), rank))
            except CheckpointError as error:
                raise StorageError(
                    f"what rank {rank} wrote is not what this rank sees: {error.what}",
                    fix="save to a folder that all hosts share",
                ) from error
        self._write(self._path(folder, _MANIFEST), text_of(manifest))
        self.disk.sync_folder(self._path(folder))
        self.disk.rename(self._path(folder), self._path(tag))
        try:
            self.disk.sync_folder(self.root)
        except StorageError:
            self.disk.rename(self._path(tag), self._path(folder))  # nobody can promise that it stays: it is none
            raise
        self._let_go()

    def point(self, tag: str, save: str) -> None:
        """Say in a text which checkpoint is the latest: for people. Nothing here reads it."""
        passing = f"{_POINTER}{save}"
        try:
            self._write(self._path(passing), f"{tag}\n".encode())
            self.disk.rename(self._path(passing), self._path("latest"))
        except StorageError:
            if passing in self.disk.names(self.root):
                self.disk.remove(self._path(passing))
            raise

    def _write(self, path: str, text: bytes) -> None:
        file = self.disk.create(path, len(text))
        try:
            file.write(text)
        except BaseException:
            file.abandon()
            raise
        file.finish()

    # --- finding and loading ---

    def find(self, tag: str) -> Saved:
        """A checkpoint by its tag, if it is whole as far as its manifest can tell."""
        self._refuse_tag(tag)
        if tag not in self.disk.names(self.root):
            raise CheckpointError(f"there is no checkpoint {self._path(tag)}", fix=self._others())
        names = self.disk.names(self._path(tag))
        if _has_pickles(names):
            raise self._pickled(tag)
        if _MANIFEST not in names:
            raise CheckpointError(f"{self._path(tag)} has no manifest: it is not a checkpoint of ours", fix=self._others())
        return self._open(tag)

    def newest(self) -> Saved:
        """The whole checkpoint of the highest step. One that is damaged may be newer: that is said."""
        found = self.survey()
        for error in found.damaged.values():
            _LOG.warning("a checkpoint is passed over: %s", error)
        if found.whole:
            return found.whole[-1]
        if _MANIFEST in self.disk.names(self.root):
            raise CheckpointError(f"{self.root} is a checkpoint itself", fix="give the folder around it, and its name as the tag")
        for name in self.disk.names(self.root):
            if _TAG.fullmatch(name) and self.disk.is_folder(self._path(name)) and _has_pickles(self.disk.names(self._path(name))):
                raise self._pickled(name)
        raise CheckpointError(f"there is no whole checkpoint in {self.root}", fix="look at the path, or begin training anew")

    def _pickled(self, tag: str) -> CheckpointError:
        return CheckpointError(f"{self._path(tag)} has pickles, which can run any code: they are never loaded", fix=_CONVERT)

    def _open(self, tag: str) -> Saved:
        path = self._path(tag, _MANIFEST)
        return Saved(tag, parse(Manifest, self._read_text(path), path))

    def all(self) -> list[Saved]:
        """Every checkpoint whose manifest is whole, the oldest step first."""
        return self.survey().whole

    def survey(self) -> Survey:
        """What is whole as far as its manifest tells, and what has a manifest that does not. Other folders are nothing to us."""
        whole: list[Saved] = []
        damaged: dict[str, CheckpointError | StorageError] = {}
        for name in self.disk.names(self.root):
            path = self._path(name)
            if _TAG.fullmatch(name) and self.disk.is_folder(path) and _MANIFEST in self.disk.names(path):
                try:
                    whole.append(self._open(name))
                except (CheckpointError, StorageError) as error:
                    damaged[name] = error
        return Survey(sorted(whole, key=lambda saved: (saved.manifest.step, saved.tag)), damaged)

    def _others(self) -> str:
        tags = [saved.tag for saved in self.all()]
        return f"whole ones here: {', '.join(tags[-4:])}" if tags else "there is no whole one in this folder"

    def table(self, saved: Saved, rank: int) -> Table:
        """What one rank has written, as the manifest vouches for it."""
        path, sealed = self._path(saved.tag, _table(rank)), saved.manifest.tables[rank]
        text = self._read_text(path)
        if seal(text) != sealed:
            raise CheckpointDamaged(f"{path} is not the file that its manifest means", fix="load another checkpoint")
        table = parse(Table, text, path)
        if (table.save, table.rank) != (saved.manifest.save, rank):
            raise CheckpointDamaged(f"{path} belongs to another save", fix="load another checkpoint")
        self._refuse_pieces(saved, table.runs, path)
        return table

    def _refuse_pieces(self, saved: Saved, runs: Sequence[Run], path: str) -> None:
        for run in runs:
            for piece in run.pieces:
                param = saved.manifest.params.get(piece.param)
                if param is None or piece.first + piece.count > param.numel:
                    raise CheckpointDamaged(
                        f'{path} has elements of "{piece.param}" that it cannot have', fix="load another checkpoint"
                    )

    def shard(self, saved: Saved, table: Table) -> ShardFile:
        return ShardFile(self.disk, self._path(saved.tag, _shard(table.rank)), Shard(table.nbytes, table.checksums))

    def verify(self, saved: Saved) -> None:
        """Read every byte of a checkpoint, and raise if one is not what was written."""
        for rank in range(saved.manifest.world):
            self.shard(saved, self.table(saved, rank)).verify()

    def _read_text(self, path: str) -> bytes:
        nbytes = self.disk.size(path)
        if nbytes > _MOST_TEXT_BYTES:
            raise CheckpointDamaged(f"{path} is {nbytes} bytes: no manifest or table is", fix="load another checkpoint")
        return bytes(self.disk.read(path, 0, nbytes))

    # --- removing ---

    def remove(self, tag: str) -> None:
        """Take a checkpoint away: from the first moment on it is none, and nobody finds half of it."""
        self._refuse_tag(tag)
        going = f"{_GOING}{tag}-{secrets.token_hex(8)}"  # another that is still going may have had the tag
        self.disk.rename(self._path(tag), self._path(going))
        self.disk.sync_folder(self.root)
        self._clear(going)

    def retire(self, newest: int, keep: Keep) -> list[str]:
        """Remove what is not to be kept of the checkpoints up to a step, which is kept. Those of another name than we give,
        and of later steps, are somebody's own. Returns the tags of what is gone."""
        ours = [saved for saved in self.all() if saved.tag == tag_of(saved.manifest.step) and saved.manifest.step <= newest]
        ages = range(len(ours) - 1, -1, -1)
        gone = [saved.tag for age, saved in zip(ages, ours, strict=True) if not keep.holds(age, saved.manifest.step)]
        for tag in gone:
            self.remove(tag)
        return gone

    def abandon(self, folder: str) -> None:
        """Remove what a save has written so far, if it has begun."""
        self._let_go()
        if folder in self.disk.names(self.root):
            self._clear(folder)

    def sweep(self) -> list[str]:
        """Remove what saves and removals that were stopped have left. What a living process holds is not touched."""
        left = [name for name in self.disk.names(self.root) if name.startswith((_UNDER_WAY, _GOING))]
        return [name for name in left if self._swept(name)]

    def _swept(self, name: str) -> bool:
        if name.startswith(_POINTER):
            self.disk.remove(self._path(name))
            return True
        if not self.disk.is_folder(self._path(name)):
            return False  # somebody else's
        hold = self.disk.hold(self._path(name))
        if hold is None:
            return False
        try:
            self._clear(name)
        finally:
            hold.let_go()
        return True

    def _clear(self, folder: str) -> None:
        for name in self.disk.names(self._path(folder)):
            self.disk.remove(self._path(folder, name))
        self.disk.remove_folder(self._path(folder))

    # --- names ---

    def _path(self, *names: str) -> str:
        return "/".join((self.root, *names))

    def _refuse_tag(self, tag: str) -> None:
        if not _TAG.fullmatch(tag) or tag == "latest":
            raise CheckpointError(
                f'"{tag[:80]}" cannot be a tag',
                fix="use letters, digits, dots, dashes and underlines, begin with a letter or digit, and not latest",
            )


def _has_pickles(names: Sequence[str]) -> bool:
    return any(name.endswith(_PICKLES) for name in names)


def _shard(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"


def _table(rank: int) -> str:
    return f"rank-{rank:05d}.json"
