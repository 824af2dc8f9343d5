"""Placing: the placement that a configuration asks for, and the folder and the threads of what rests on disk."""

from __future__ import annotations

from pathlib import Path

from naught.config.schema import Config
from naught.placement import STAGES, Kind, Placement, Tier, place_stage

__all__ = ["disk_folder", "disk_threads", "named_folder", "placement_of"]

_MOST_DISK_THREADS = 16  # more only wait for each other's Python
_TIERS = {"none": Tier.DEVICE, "cpu": Tier.HOST, "nvme": Tier.DISK}


def placement_of(config: Config) -> Placement:
    """Where every unit's state rests, unless `naught.placement` pools the tiers."""
    zero = config.zero_optimization
    optim = _TIERS[zero.offload_optimizer.device] if zero.offload_optimizer else Tier.DEVICE
    param = _TIERS[zero.offload_param.device] if zero.offload_param else Tier.DEVICE
    wanted = config.naught.gradients
    # Whole gradients stay; split ones follow the optimizer unless the user says where.
    grad = Tier(wanted) if wanted != "follow" and STAGES[zero.stage][1] else None
    return place_stage(zero.stage, optim=optim, param=param, grad=grad)


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
    return min(config.aio.queue_depth * config.aio.intra_op_parallelism, _MOST_DISK_THREADS)
