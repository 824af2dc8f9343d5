"""Tiers: what a rank may have of its device and of its host, and what it has on the host, as a configuration says."""

from __future__ import annotations

import os
from dataclasses import replace

import torch

from naught.comm import Group
from naught.comm.launch import find_seat, local_ranks
from naught.config import Config, placement_of
from naught.devices import free_host_bytes, room_on
from naught.ferry import Ferry
from naught.flat import Meter
from naught.formulas import SMALL_MOMENT, Recipe
from naught.home import HostSide
from naught.host_crew import HostCrew, cores_of
from naught.job import Job
from naught.machine import detect
from naught.placement import Kind, Tier
from naught.pooling import Limits
from naught.precision import Precision
from naught.shelves import HostShelf

__all__ = ["host_side", "limits_here", "limits_of_bytes"]


def limits_here(
    config: Config, precision: Precision, moments: int, group: Group, device: torch.device, own: int
) -> Limits | None:
    """What a rank of this process's kind may have; None: it is placed by stage, and nothing limits it. `moments` is how many
    numbers the rule remembers of each element, and `own` what the model takes on the device already."""
    ours = config.naught
    if ours.placement == "stage" and ours.gpu_memory is None and ours.host_memory is None:
        return None
    room = room_on(device)
    free = room.free // (1 if device.type != "cpu" else local_ranks(os.environ)) + (room.kept or 0) + own
    mine = torch.tensor([ours.gpu_memory or free, ours.host_memory or free_host_bytes()])
    gpu, host = group.exchange(mine).amin(0).tolist()  # all ranks place alike: none counts on more than another has
    return limits_of_bytes(config, precision, moments, group.size, device, gpu=gpu, host=host)


def limits_of_bytes(
    config: Config, precision: Precision, moments: int, world: int, device: torch.device, *, gpu: int, host: int
) -> Limits:
    """The same, where the bytes of device and host are known."""
    ours, here, apart = config.naught, local_ranks(os.environ), device.type != "cpu"
    machine, wide = detect()[0], precision.weights.itemsize
    master = 0 if precision.weights is torch.float32 else 2 if ours.small_masters else 4
    return Limits(
        replace(
            machine,
            ranks=world,
            ranks_per_node=min(here, world),
            gpu=machine.gpu._replace(memory_bytes=gpu),
            host_bytes=host,
            host_share=1.0 if ours.host_memory is not None else machine.host_share,  # a limit is for states alone
            stages=apart,
            unified=not apart and ours.gpu_memory is None,
        ),
        Job(
            accumulation=2 if precision.sums is torch.float32 else 1,  # all that matters here is how wide sums are
            recipe=Recipe(wide, wide, master, moments * (SMALL_MOMENT if ours.small_moments else 4)),
            wide_gradients=precision.wide,
            host_sums=ours.host_sums,
        ),
        gpu // 10 if ours.activation_memory is None else ours.activation_memory,
    )


def host_side(config: Config, device: torch.device, meter: Meter, largest_numel: int) -> HostSide | None:
    """What a rank needs on its host; None: nothing can rest there. No part of a flat that travels has more elements."""
    placement, zero = placement_of(config), config.zero_optimization
    if all(placement.of(kind).tier is Tier.DEVICE for kind in Kind) and config.naught.placement == "stage":
        return None
    pins = all(block.pin_memory for block in (zero.offload_optimizer, zero.offload_param) if block is not None)
    here = find_seat(os.environ)
    apart = device.type != "cpu"  # else training itself needs the cores, and as many threads as it was given
    cores = cores_of(here.local_rank if here else 0, local_ranks(os.environ)) if apart else None
    limit = config.naught.host_memory and config.naught.host_memory // local_ranks(os.environ)
    shelf = HostShelf(device, meter, pins=pins, limit=limit)
    return HostSide(shelf, Ferry(device, meter, largest_numel), HostCrew(cores), config.naught.host_sums)
