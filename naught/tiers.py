"""Tiers: what a rank may have of its device and of its host, and what it has on the host, as a configuration says."""

from __future__ import annotations

import errno
import os
import platform
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from naught.activation_disk import OnDisk
from naught.activation_rests import OnDevice, OnHost, Rest
from naught.comm import Group
from naught.config import Config, placement_of
from naught.disk_side import DiskSide
from naught.ferry import Ferry
from naught.file_errors import telling
from naught.flat import Meter
from naught.formulas import SMALL_MOMENT, Recipe
from naught.home import HostSide
from naught.host_crew import Crew, HostCrew, cores_of
from naught.job import Job
from naught.placement import Kind, Tier
from naught.pooling import Limits
from naught.precision import Precision
from naught.present import present
from naught.rooms import MOST_BERTHS, TILE_STEP
from naught.rota import Rota
from naught.shelves import HostShelf
from naught.spill import Desk
from naught.spill_file import NoFile, UnnamedFile
from naught.staging import Staging

__all__ = [
    "activation_rest",
    "disk_folder",
    "disk_side",
    "hire_crew",
    "host_side",
    "job_of",
    "limits_here",
    "limits_of_bytes",
]

_MOST_DISK_THREADS = 16  # more only wait for each other's Python


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
    """The same, where the bytes of device and host, and of one rank on disk, are known. Where no limit is set and the device is
    the host itself, its ranks share them."""
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
            disk_threads=_disk_threads(config),
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
    )


def disk_side(config: Config, device: torch.device, meter: Meter, largest_numel: int) -> DiskSide | None:
    """What a rank needs on disk; None: nothing can rest there."""
    folder = disk_folder(config)
    return None if folder is None else _disk_side_in(folder, config, device, meter, largest_numel)


def activation_rest(config: Config, device: torch.device, meter: Meter) -> Rest | None:
    """Where what a backward needs rests until then; None: where it was made."""
    asked, ours = config.activation_checkpointing, config.naught
    if ours.activations == "disk":
        folder = _named_folder(config)
        assert folder is not None, "a configuration without one is refused"
        disk = _disk_side_in(folder, config, device, meter, config.aio.block_size // 4)
        return OnDisk(device, meter, disk)
    if ours.activations == "host" or asked.cpu_checkpointing:
        return OnHost(device, meter)
    if asked.contiguous_memory_optimization:
        return OnDevice(device, meter, asked.number_checkpoints or 0)
    return None


def _disk_side_in(folder: str, config: Config, device: torch.device, meter: Meter, largest_numel: int) -> DiskSide:
    numel = min(config.aio.block_size // 4, largest_numel)
    tile_numel, threads = max(1, -(-numel // TILE_STEP)) * TILE_STEP, _disk_threads(config)
    if device.type == "meta":
        rota = Rota(threads)
        return DiskSide(partial(NoFile, folder), Desk(tile_numel, meter, device, rota.worker), rota)
    fixes = dict.fromkeys((errno.ENOTDIR, errno.EEXIST), "name a folder in nvme_path, not a file")
    fixes[errno.ENOENT] = "mount the disk, or make the folder that it is to lie in"  # else states would fill some other disk
    with telling("make the folder", folder, fixes):
        Path(folder).mkdir(0o700, exist_ok=True)
    return DiskSide(partial(UnnamedFile, folder), Desk(tile_numel, meter, device), HostCrew([None] * threads))


def _disk_threads(config: Config) -> int:
    return min(config.aio.queue_depth * config.aio.intra_op_parallelism, _MOST_DISK_THREADS)


def disk_folder(config: Config) -> str | None:
    """Where states spill to; None: nowhere."""
    placement = placement_of(config)
    if config.naught.placement != "stage":
        return _named_folder(config) if config.naught.nvme_path else None
    return _named_folder(config) if any(placement.of(kind).tier is Tier.DISK for kind in Kind) else None


def _named_folder(config: Config) -> str | None:
    zero = config.zero_optimization
    blocks = (zero.offload_optimizer, zero.offload_param)
    named = [block.nvme_path for block in blocks if block is not None and block.nvme_path]
    found = named[0] if named else config.naught.nvme_path
    return None if found is None else str(Path(found).expanduser())


def host_side(
    config: Config, group: Group, device: torch.device, meter: Meter, *, largest_numel: int, most_berths: int
) -> HostSide | None:
    """What a rank needs on its host; None: nothing can rest there. No part of a flat that travels has more elements."""
    placement, zero = placement_of(config), config.zero_optimization
    if not placement.travels and config.naught.placement == "stage":
        return None
    pins = all(block.pin_memory for block in (zero.offload_optimizer, zero.offload_param) if block is not None)
    around = present()
    limit = config.naught.host_memory and config.naught.host_memory // around.local_ranks
    shelf = HostShelf(device, meter, pins=pins, limit=limit)
    apart = around.is_apart(device)
    ferry = Ferry(Staging(device, largest_numel, most_berths if apart else 0), meter, apart=apart)
    return HostSide(shelf, ferry, hire_crew(device, group), config.naught.host_sums)


def hire_crew(device: torch.device, group: Group) -> Crew:
    """Whoever updates what rests on the host. Ranks that may use the same cores divide them; launchers often have done so."""
    if device.type == "meta":
        return Rota(1)
    if device.type == "cpu":  # training itself needs the cores, and as many threads as it was given
        return HostCrew(None)
    mine = f"{platform.node()} {sorted(os.sched_getaffinity(0))}"
    sharing = [rank for rank, cores in enumerate(group.exchange_texts(mine)) if cores == mine]
    return HostCrew(cores_of(sharing.index(group.rank), len(sharing)))
