"""Placing: the placement that a configuration asks for, and the folder and the threads of what rests on disk."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from naught.config.schema import Config
from naught.placement import STAGES, Kind, Place, Placement, Tier, place_stage

__all__ = ["disk_folder", "disk_threads", "named_folder", "place_by_stage", "placement_of"]

_MOST_DISK_THREADS = 16  # more only wait for each other's Python
_TIERS = {"none": Tier.DEVICE, "cpu": Tier.HOST, "nvme": Tier.DISK}


def placement_of(config: Config) -> Placement:
    """Where a unit's state rests, unless `naught.placement` pools the tiers: one that is not an exception."""
    zero = config.zero_optimization
    optim = _TIERS[zero.offload_optimizer.device] if zero.offload_optimizer else Tier.DEVICE
    param = _TIERS[zero.offload_param.device] if zero.offload_param else Tier.DEVICE
    wanted = config.naught.gradients
    # Whole gradients stay; split ones follow the optimizer unless the user says where.
    grad = Tier(wanted) if wanted != "follow" and STAGES[zero.stage][1] else None
    return place_stage(zero.stage, optim=optim, param=param, grad=grad)


def place_by_stage(numels: Sequence[int], config: Config, world: int) -> list[Placement]:
    """Where each unit of so many elements rests, as the stage says; but small ones stay whole, the smallest first, as far as
    there is room; and the first ones are nearer, as far as is said."""
    zero, base = config.zero_optimization, placement_of(config)
    found = [base] * len(numels)
    if base.param.split:
        room = zero.stage3_model_persistence_threshold
        for at in sorted(range(len(numels)), key=numels.__getitem__):
            if numels[at] < zero.stage3_param_persistence_threshold and numels[at] <= room:
                room -= numels[at]
                found[at] = replace(base, param=Place(split=False))
    if zero.offload_param is not None and base.param.tier is Tier.DISK:
        # So many elements of a rank need not go through the disk.
        room = zero.offload_param.max_in_cpu * world
        for at, numel in enumerate(numels):
            if found[at].param.split and numel <= room:
                room -= numel
                found[at] = replace(found[at], param=Place(split=True, tier=Tier.HOST))
    if zero.offload_optimizer is not None and base.optim.tier is not Tier.DEVICE:
        # What the next forward needs first stays on the device: it is updated at once, and the host has time for the rest.
        room = round((1 - zero.offload_optimizer.ratio) * sum(numels))
        for at, numel in enumerate(numels):
            if numel <= room:
                room -= numel
                stays = found[at]
                found[at] = replace(stays, optim=Place(stays.optim.split), grad=Place(stays.grad.split))
    return found


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
