"""Checkpoints: training on a disk, whole or absent. Pure: neither ranks nor tensors are known here."""

from naught.checkpoints.disk import Disk, RealDisk
from naught.checkpoints.manifest import Manifest, Param, Piece, Run, Sealed, Table
from naught.checkpoints.shard import CHUNK_BYTES, SIZES, Entry, Shard, ShardFile, header_of
from naught.checkpoints.store import Saved, Store

__all__ = [
    "CHUNK_BYTES",
    "SIZES",
    "Disk",
    "Entry",
    "Manifest",
    "Param",
    "Piece",
    "RealDisk",
    "Run",
    "Saved",
    "Sealed",
    "Shard",
    "ShardFile",
    "Store",
    "Table",
    "header_of",
]
