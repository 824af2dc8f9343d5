"""Placing: the placement that a configuration asks for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from naught.config.schema import Config
from naught.placement import STAGES, Place, Placement, Tier, place_stage

__all__ = ["place_by_stage", "placement_of"]

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
