"""Store: the folder in which checkpoints lie, each whole or absent: what is there, and what is in it. It changes nothing."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import NamedTuple

from naught.checkpoints.disk import Disk
from naught.checkpoints.manifest import Manifest, Run, Table, parse, seal
from naught.checkpoints.names import MANIFEST, is_tag, refuse_tag, shard_name, table_name
from naught.checkpoints.shard import Shard, ShardFile
from naught.errors import CheckpointDamaged, CheckpointError, StorageError

__all__ = ["Saved", "Store", "Survey"]

_LOG = logging.getLogger("naught")
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


class Store:
    """A folder of checkpoints, to look for them and to read them."""

    def __init__(self, disk: Disk, root: str) -> None:
        self.disk, self.root = disk, root

    def path(self, *names: str) -> str:
        return "/".join((self.root, *names))

    def find(self, tag: str) -> Saved:
        """A checkpoint by its tag, if it is whole as far as its manifest can tell."""
        refuse_tag(tag)
        if tag not in self.disk.names(self.root):
            raise CheckpointError(f"there is no checkpoint {self.path(tag)}", fix=self._others())
        names = self.disk.names(self.path(tag))
        if _has_pickles(names):
            raise self._pickled(tag)
        if MANIFEST not in names:
            raise CheckpointError(f"{self.path(tag)} has no manifest: it is not a checkpoint of ours", fix=self._others())
        return self._open(tag)

    def newest(self) -> Saved:
        """The whole checkpoint of the highest step. One that is damaged may be newer: that is said."""
        found = self.survey()
        for error in found.damaged.values():
            _LOG.warning("a checkpoint is passed over: %s", error)
        if found.whole:
            return found.whole[-1]
        if MANIFEST in self.disk.names(self.root):
            raise CheckpointError(f"{self.root} is a checkpoint itself", fix="give the folder around it, and its name as the tag")
        for name in self.disk.names(self.root):
            if is_tag(name) and self.disk.is_folder(self.path(name)) and _has_pickles(self.disk.names(self.path(name))):
                raise self._pickled(name)
        raise CheckpointError(f"there is no whole checkpoint in {self.root}", fix="look at the path, or begin training anew")

    def _pickled(self, tag: str) -> CheckpointError:
        return CheckpointError(f"{self.path(tag)} has pickles, which can run any code: they are never loaded", fix=_CONVERT)

    def _open(self, tag: str) -> Saved:
        path = self.path(tag, MANIFEST)
        return Saved(tag, parse(Manifest, self._read_text(path), path))

    def all(self) -> list[Saved]:
        """Every checkpoint whose manifest is whole, the oldest step first."""
        return self.survey().whole

    def survey(self) -> Survey:
        """What is whole as far as its manifest tells, and what has a manifest that does not. Other folders are nothing to us."""
        whole: list[Saved] = []
        damaged: dict[str, CheckpointError | StorageError] = {}
        for name in self.disk.names(self.root):
            path = self.path(name)
            if is_tag(name) and self.disk.is_folder(path) and MANIFEST in self.disk.names(path):
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
        path, sealed = self.path(saved.tag, table_name(rank)), saved.manifest.tables[rank]
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
                if param is None or piece.stop > param.numel:
                    raise CheckpointDamaged(
                        f'{path} has elements of "{piece.param}" that it cannot have', fix="load another checkpoint"
                    )

    def shard(self, saved: Saved, table: Table) -> ShardFile:
        return ShardFile(self.disk, self.path(saved.tag, shard_name(table.rank)), Shard(table.nbytes, table.checksums))

    def verify(self, saved: Saved) -> None:
        """Read every byte of a checkpoint, and raise if one is not what was written."""
        for rank in range(saved.manifest.world):
            self.shard(saved, self.table(saved, rank)).verify()

    def _read_text(self, path: str) -> bytes:
        nbytes = self.disk.size(path)
        if nbytes > _MOST_TEXT_BYTES:
            raise CheckpointDamaged(f"{path} is {nbytes} bytes: no manifest or table is", fix="load another checkpoint")
        return bytes(self.disk.read(path, 0, nbytes))


def _has_pickles(names: Sequence[str]) -> bool:
    return any(name.endswith(_PICKLES) for name in names)
