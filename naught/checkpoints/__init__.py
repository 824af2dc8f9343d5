"""Checkpoints: training on a disk, whole or absent. Pure: neither ranks nor tensors are known here."""

from naught.checkpoints.disk import Disk, RealDisk
from naught.checkpoints.draft import Draft
from naught.checkpoints.elements import Located, locate, within
from naught.checkpoints.manifest import Manifest, Param, Piece, Run, Sealed, Table
from naught.checkpoints.names import tag_of
from naught.checkpoints.reading import Got, Source, Want, read_all
from naught.checkpoints.removing import Keep, remove, retire, sweep
from naught.checkpoints.shard import CHUNK_BYTES, SIZES, Entry, Shard, ShardFile, header_of, write_shard
from naught.checkpoints.store import Saved, Store, Survey
from naught.checkpoints.weights_file import WeightsFile

__all__ = [
    "CHUNK_BYTES",
    "SIZES",
    "Disk",
    "Draft",
    "Entry",
    "Got",
    "Keep",
    "Located",
    "Manifest",
    "Param",
    "Piece",
    "RealDisk",
    "Run",
    "Saved",
    "Sealed",
    "Shard",
    "ShardFile",
    "Source",
    "Store",
    "Survey",
    "Table",
    "Want",
    "WeightsFile",
    "header_of",
    "locate",
    "read_all",
    "remove",
    "retire",
    "sweep",
    "tag_of",
    "within",
    "write_shard",
]
