"""Checkpoints: training on a disk, whole or absent. Pure: neither ranks nor tensors are known here."""

from naught.checkpoints.disk import Disk, RealDisk
from naught.checkpoints.elements import Located, locate, within
from naught.checkpoints.manifest import Manifest, Param, Piece, Run, Sealed, Table
from naught.checkpoints.reading import Got, Source, Want, read_all
from naught.checkpoints.shard import CHUNK_BYTES, SIZES, Entry, Shard, ShardFile, header_of, write_shard
from naught.checkpoints.store import Keep, Saved, Store, tag_of
from naught.checkpoints.weights_file import WeightsFile

__all__ = [
    "CHUNK_BYTES",
    "SIZES",
    "Disk",
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
    "Table",
    "Want",
    "WeightsFile",
    "header_of",
    "locate",
    "read_all",
    "tag_of",
    "within",
    "write_shard",
]
