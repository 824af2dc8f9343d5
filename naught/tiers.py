"""Tiers: what a rank has on its host and on disk, and who works there, as a configuration says."""

from __future__ import annotations

import errno
import os
import platform
from functools import partial
from pathlib import Path

import torch

from naught.activation_disk import OnDisk
from naught.activation_rests import OnDevice, OnHost, Rest
from naught.comm import Group
from naught.config import Config, disk_folder, disk_threads, named_folder, placement_of
from naught.disk_side import DiskSide
from naught.ferry import Ferry
from naught.file_errors import telling
from naught.flat import Meter
from naught.home import HostSide
from naught.host_crew import Crew, HostCrew, cores_of
from naught.present import present
from naught.rooms import TILE_STEP, SharedRooms
from naught.rota import Rota
from naught.shelves import HostShelf
from naught.spill import Desk
from naught.spill_file import NoFile, UnnamedFile
from naught.staging import Staging
from naught.sum_rooms import SumRooms

__all__ = [
    "activation_rest",
    "disk_side",
    "hire_crew",
    "host_side",
]


def disk_side(config: Config, device: torch.device, meter: Meter, largest_numel: int) -> DiskSide | None:
    """What a rank needs on disk; None: nothing can rest there."""
    folder = disk_folder(config)
    return None if folder is None else _disk_side_in(folder, config, device, meter, largest_numel)


def activation_rest(config: Config, device: torch.device, meter: Meter) -> Rest | None:
    """Where what a backward needs rests until then; None: where it was made."""
    asked, ours = config.activation_checkpointing, config.naught
    if ours.activations == "disk":
        folder = named_folder(config)
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
    tile_numel, threads = max(1, -(-numel // TILE_STEP)) * TILE_STEP, disk_threads(config)
    if device.type == "meta":
        rota = Rota(threads)
        return DiskSide(partial(NoFile, folder), Desk(tile_numel, meter, device, rota.worker), rota)
    fixes = dict.fromkeys((errno.ENOTDIR, errno.EEXIST), "name a folder in nvme_path, not a file")
    fixes[errno.ENOENT] = "mount the disk, or make the folder that it is to lie in"  # else states would fill some other disk
    with telling("make the folder", folder, fixes):
        Path(folder).mkdir(0o700, exist_ok=True)
    return DiskSide(partial(UnnamedFile, folder), Desk(tile_numel, meter, device), HostCrew([None] * threads, device))


def host_side(
    config: Config, group: Group, device: torch.device, meter: Meter, *, largest_numel: int, most_berths: int, shared: SharedRooms
) -> HostSide | None:
    """What a rank needs on its host; None: nothing can rest there. No part of a flat that travels has more elements. All sums of
    gradients share rooms, if there are any of these; else each has its own."""
    placement, zero = placement_of(config), config.zero_optimization
    if not placement.travels and config.naught.placement == "stage":
        return None
    pins = all(block.pin_memory for block in (zero.offload_optimizer, zero.offload_param) if block is not None)
    around = present()
    limit = config.naught.host_memory and config.naught.host_memory // around.local_ranks
    shelf = HostShelf(device, meter, pins=pins, limit=limit)
    apart = around.is_apart(device)
    ferry = Ferry(Staging(device, largest_numel, most_berths if apart else 0), meter, apart=apart)
    rooms = SumRooms(shelf, shared.numel, torch.float32, shared.count) if shared.count else None
    return HostSide(shelf, ferry, hire_crew(device, group), config.naught.host_sums, rooms)


def hire_crew(device: torch.device, group: Group) -> Crew:
    """Whoever updates what rests on the host. Ranks that may use the same cores divide them; launchers often have done so."""
    if device.type == "meta":
        return Rota(1)
    if device.type == "cpu":  # training itself needs the cores, and as many threads as it was given
        return HostCrew(None)
    mine = f"{platform.node()} {sorted(os.sched_getaffinity(0))}"
    sharing = [rank for rank, cores in enumerate(group.exchange_texts(mine)) if cores == mine]
    return HostCrew(cores_of(sharing.index(group.rank), len(sharing)), device)
