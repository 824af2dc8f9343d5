"""Limits: what a rank may have of its device, its host and its disk, and what training keeps of each parameter, as a
configuration says and all ranks can."""

from __future__ import annotations

from dataclasses import replace

import torch

from naught.comm import Group
from naught.config import Config, disk_folder, disk_threads
from naught.formulas import SMALL_MOMENT, Recipe
from naught.job import Job
from naught.pooling import Limits
from naught.precision import Precision
from naught.present import present
from naught.rooms import MOST_BERTHS

__all__ = ["job_of", "limits_here", "limits_of_bytes"]


def limits_here(
    config: Config, precision: Precision, moments: int, group: Group, device: torch.device, own: int
) -> Limits | None:
    """What a rank of this process's kind may have; None: it is placed by stage, and nothing limits it. `moments` is how many
    numbers the rule remembers of each element, and `own` what the model takes on the device already."""
    ours = config.naught
    if ours.placement == "stage" and ours.gpu_memory is None and ours.host_memory is None:
        return None
    around, folder = present(), disk_folder(config)
    spare = 0 if folder is None else around.disk_bytes(folder) or 0
    gpu, host = ours.gpu_memory or around.device_bytes(device, own), ours.host_memory or around.host_bytes()
    mine = torch.tensor([gpu, host, spare])
    gpu, host, disk = group.exchange(mine).amin(0).tolist()  # all ranks place alike: none counts on more than another has
    return limits_of_bytes(config, precision, moments, group.parts, device, gpu=gpu, host=host, disk=disk)


def limits_of_bytes(
    config: Config, precision: Precision, moments: int, world: int, device: torch.device, *, gpu: int, host: int, disk: int = 0
) -> Limits:
    """What a rank may have, of so many bytes of its device, of its host, and of one rank on disk. Where no limit is set and the
    device is the host itself, its ranks share them."""
    ours, around = config.naught, present()
    here, apart, machine = around.local_ranks, around.is_apart(device), around.machine
    unified = not apart and ours.gpu_memory is None
    each = gpu // here if unified else gpu
    return Limits(
        replace(
            machine,
            ranks=world,
            ranks_per_node=min(here, world),
            # Ranks that have a model together share one host, too.
            gpu=machine.gpu._replace(memory_bytes=each * (min(here, world) if unified else 1)),
            host_bytes=host * min(here, world) // here,
            host_share=1.0 if ours.host_memory is not None else machine.host_share,  # a limit is for states alone
            disk_threads=disk_threads(config),
            disk_request_bytes=config.aio.block_size,
            disk_bytes=disk * min(here, world),
            berths=MOST_BERTHS if apart else 0,
            unified=unified,
        ),
        job_of(config, precision, moments),
        each // 10 if ours.activation_memory is None else ours.activation_memory,
        ours.tiles,
    )


def job_of(config: Config, precision: Precision, moments: int) -> Job:
    """What training keeps of each parameter. `moments` is how many numbers the rule remembers of each element."""
    ours, wide = config.naught, precision.weights.itemsize
    master = 0 if precision.weights is torch.float32 else 2 if ours.small_masters else 4
    return Job(
        accumulation=2 if precision.sums is torch.float32 else 1,  # all that matters here is how wide sums are
        recipe=Recipe(wide, wide, master, moments * (SMALL_MOMENT if ours.small_moments else 4)),
        wide_gradients=precision.wide,
        host_sums=ours.host_sums,
        update_in_backward=ours.update_in_backward,
    )
