"""Placing: the placement that a configuration asks for."""

from __future__ import annotations

from naught.config.schema import Config
from naught.placement import STAGES, Placement, Tier, place_stage

__all__ = ["placement_of"]

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
