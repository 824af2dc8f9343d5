"""Disk: the folder and the threads of what rests on disk, as a configuration says."""

from __future__ import annotations

from pathlib import Path

from naught.config.placing import placement_of
from naught.config.schema import Config
from naught.placement import Kind, Tier

__all__ = ["disk_folder", "disk_threads", "named_folder"]

_MOST_THREADS = 16  # more only wait for each other's Python


def disk_folder(config: Config) -> str | None:
    """Where states spill to; None: nowhere."""
    placement = placement_of(config)
    if config.naught.placement != "stage":
        return named_folder(config) if config.naught.nvme_path else None
    return named_folder(config) if any(placement.of(kind).tier is Tier.DISK for kind in Kind) else None


def named_folder(config: Config) -> str | None:
    """The folder on disk that a configuration names first, for whatever."""
    zero = config.zero_optimization
    blocks = (zero.offload_optimizer, zero.offload_param)
    named = [block.nvme_path for block in blocks if block is not None and block.nvme_path]
    found = named[0] if named else config.naught.nvme_path
    return None if found is None else str(Path(found).expanduser())


def disk_threads(config: Config) -> int:
    """That read and write, of each rank."""
    return min(config.aio.queue_depth * config.aio.intra_op_parallelism, _MOST_THREADS)
