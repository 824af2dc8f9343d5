"""Machine: what a cluster offers to each rank, given by hand, by the name of a GPU, or read off the present one.

Figures of the present one that somebody has measured (`naught bench`) go before those that its name suggests.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from naught.errors import UsageError
from naught.measured import Measured, recall
from naught.placement import Tier
from naught.quantity import parse_bytes
from naught.rooms import LEAST_BERTHS, MOST_BERTHS

__all__ = ["GPUS", "Gpu", "Machine", "detect", "device_here", "driver_gpus", "host_limit_bytes", "parse_gpu", "recognise"]


class Gpu(NamedTuple):
    """A device: its memory, the arithmetic a good training step sustains, its link to the host when alone, and its
    link to the other devices of its node."""

    memory_bytes: int
    flops: float
    link_bytes_s: float
    peer_bytes_s: float = 25e9
    has_bf16: bool = True


_NVLINK, _PCIE3, _PCIE4, _PCIE5 = 150e9, 12e9, 25e9, 55e9

# Sustained rates, not data-sheet peaks: the planner compares placements, and all of them share these figures.
GPUS: Mapping[str, Gpu] = MappingProxyType(
    {
        "v100": Gpu(32 * 10**9, 70e12, _PCIE3, _NVLINK / 2, has_bf16=False),
        "t4": Gpu(16 * 10**9, 30e12, _PCIE3, _PCIE3, has_bf16=False),
        "a10": Gpu(24 * 10**9, 70e12, _PCIE4, _PCIE4),
        "l4": Gpu(24 * 10**9, 60e12, _PCIE4, _PCIE4),
        "l40s": Gpu(48 * 10**9, 200e12, _PCIE4, _PCIE4),
        "rtx3090": Gpu(24 * 10**9, 60e12, _PCIE4, _PCIE4),
        "rtx4090": Gpu(24 * 10**9, 130e12, _PCIE4, _PCIE4),
        "a100-40gb": Gpu(40 * 10**9, 200e12, _PCIE4, _NVLINK),
        "a100-80gb": Gpu(80 * 10**9, 200e12, _PCIE4, _NVLINK),
        "h100": Gpu(80 * 10**9, 500e12, _PCIE5, 2 * _NVLINK),
        "h200": Gpu(139 * 2**30, 500e12, _PCIE5, 2 * _NVLINK),
        "b200": Gpu(180 * 10**9, 1000e12, _PCIE5, 4 * _NVLINK),
    }
)
_UNNAMED = GPUS["a100-80gb"]
_BETWEEN_NODES_BYTES_S = 25e9  # 200 Gb/s for each rank
_DEVICE_UPDATE_NUMEL_S = 50e9  # a fused AdamW, which device memory bounds; seldom what decides

# The part of each tier that model states may have. The rest is the CUDA context and allocator slack, the operating
# system and the data loader, and the file system's own.
_USABLE = {Tier.DEVICE: 0.96, Tier.HOST: 1.0, Tier.DISK: 0.95}


@dataclass(frozen=True)
class Machine:
    """A cluster of equal nodes. Memory and rates of host and disk belong to a node and are shared by its ranks."""

    ranks: int = 1
    ranks_per_node: int = 1
    gpu: Gpu = _UNNAMED
    host_bytes: int = 0
    disk_bytes: int = 0
    host_bytes_s: float = 100e9  # memory copies to all devices of a node at once
    disk_bytes_s: float = 3.5e9
    network_bytes_s: float = 0.0  # what one rank sends in a collective; 0: what its GPU and the number of nodes suggest
    disk_threads: int = 16  # of each rank
    disk_request_bytes: int = 1 << 22
    update_numel_s: float = 4e9  # AdamW on all cores of a node
    unified: bool = False  # no GPU: the device is the host's own memory, and there is no other
    host_share: float = 0.90  # of it that states may have: a script and its libraries need some
    berths: int = MOST_BERTHS  # of staging on the device, at most, through which goes what goes between it and the host

    def __post_init__(self) -> None:
        if self.ranks < 1 or self.ranks_per_node < 1:
            raise UsageError(f"a machine has at least one rank, not {self.ranks} with {self.ranks_per_node} on a node")
        if self.ranks % min(self.ranks, self.ranks_per_node):
            raise UsageError(
                f"{self.ranks} ranks do not fill nodes of {self.ranks_per_node}",
                fix="give --ranks as a multiple of --per-node",
            )
        if min(self.gpu.memory_bytes, self.host_bytes, self.disk_bytes) < 0:
            raise UsageError("memory sizes cannot be negative")

    @property
    def local_ranks(self) -> int:
        return min(self.ranks, self.ranks_per_node)

    @property
    def host_for_states(self) -> int:
        """Bytes of a node that its ranks may have together."""
        return int(self.host_bytes * self.host_share)

    def capacity(self, tier: Tier) -> int:
        """Bytes of a tier that one rank may plan with."""
        whole = {
            Tier.DEVICE: self.gpu.memory_bytes / (self.local_ranks if self.unified else 1),
            Tier.HOST: self.host_for_states / self.local_ranks,
            Tier.DISK: self.disk_bytes / self.local_ranks,
        }[tier]
        return int(whole * _USABLE[tier])

    def with_less_staging(self) -> list[Machine]:
        """Itself, and the same with ever less staging: what takes a unit whole is faster, but what fits beside less trains."""
        counts = (self.berths, self.berths // 2, self.berths // 4, LEAST_BERTHS)
        fewer = dict.fromkeys(min(self.berths, max(count, LEAST_BERTHS)) for count in counts)
        return [replace(self, berths=count) for count in fewer]

    @property
    def collective_bytes_s(self) -> float:
        within = self.gpu.peer_bytes_s
        return self.network_bytes_s or (within if self.ranks == self.local_ranks else min(within, _BETWEEN_NODES_BYTES_S))

    @property
    def rank_disk_bytes_s(self) -> float:
        """Of the disk, for one rank while its neighbours do the same."""
        return self.disk_bytes_s / self.local_ranks

    @property
    def host_update_numel_s(self) -> float:
        """On the host, for one rank while its neighbours do the same."""
        return self.update_numel_s / self.local_ranks

    @property
    def device_update_numel_s(self) -> float:
        """Without a GPU the device's cores are the host's, and all ranks of the node share them."""
        return self.host_update_numel_s if self.unified else _DEVICE_UPDATE_NUMEL_S

    @property
    def link_bytes_s(self) -> float:
        """Host to device for one rank while its neighbours do the same."""
        return min(self.gpu.link_bytes_s, self.host_bytes_s / self.local_ranks)


def parse_gpu(text: str) -> Gpu:
    """A GPU by its name (h100) or by its memory alone (80GB)."""
    named = GPUS.get(text.lower())
    if named:
        return named
    if text[:1].isdigit():
        memory_bytes = parse_bytes(text, what="--gpu")
        if not memory_bytes:
            raise UsageError("--gpu: a GPU has more than 0 bytes", fix="leave it out for the present machine")
        return _UNNAMED._replace(memory_bytes=memory_bytes)
    raise UsageError(f'no GPU "{text[:80]}"', fix=f"give its memory, such as 80GB, or one of {', '.join(GPUS)}")


def detect() -> tuple[Machine, str]:
    """The present machine and a sentence that says what was found."""
    host_bytes = host_limit_bytes()
    gpus = driver_gpus()
    measured = recall(device_here(gpus))
    machine = Machine(host_bytes=host_bytes, disk_bytes=shutil.disk_usage(".").free)
    if gpus:
        name, memory_bytes = gpus[0]
        gpu = recognise(name)._replace(memory_bytes=memory_bytes)
        machine = replace(machine, ranks=len(gpus), ranks_per_node=len(gpus), gpu=gpu)
        found = f"this machine: {len(gpus)} x {name}"
    else:
        # Without a GPU the device is the host's own memory: there is nothing to offload to but the disk.
        cpu = Gpu(host_bytes, _cores() * 30e9, 10e9, 2e9)
        machine = replace(machine, gpu=cpu, host_bytes=0, unified=True)
        found = "this machine has no GPU, so its memory is the device; ask about another with --gpu 80GB"
    return _as_measured(machine, measured), "; ".join(part for part in (found, measured.when()) if part)


def device_here(gpus: Sequence[tuple[str, int]] | None = None) -> str:
    """What the figures of this machine belong to: its first GPU by name, or its cores."""
    found = driver_gpus() if gpus is None else gpus
    return found[0][0] if found else f"CPU, {_cores()} cores"


def _cores() -> int:
    return os.cpu_count() or 1


def _as_measured(machine: Machine, measured: Measured) -> Machine:
    """What ranks send was measured within a node, and says nothing of ranks on several."""
    gpu = machine.gpu._replace(
        flops=measured.flops or machine.gpu.flops,
        link_bytes_s=measured.link_bytes_s or machine.gpu.link_bytes_s,
        peer_bytes_s=measured.collective_bytes_s or machine.gpu.peer_bytes_s,
    )
    return replace(
        machine,
        gpu=gpu,
        disk_bytes_s=measured.disk_bytes_s or machine.disk_bytes_s,
        update_numel_s=measured.update_numel_s or machine.update_numel_s,
    )


def recognise(name: str) -> Gpu:
    """A GPU by what its driver calls it, such as NVIDIA A100-SXM4-80GB."""
    words = re.split(r"[^a-z0-9]+", name.lower().replace("rtx ", "rtx").replace("geforce ", ""))
    for key, gpu in GPUS.items():
        if key.partition("-")[0] in words:
            return gpu
    return _UNNAMED


def host_limit_bytes() -> int:
    """Memory of the host, or what its control group allows."""
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = Path("/sys/fs/cgroup/memory.max")
    try:
        text = limit.read_text(encoding="ascii").strip()
    except OSError:
        return pages
    return min(pages, int(text)) if text.isdigit() else pages


def driver_gpus() -> list[tuple[str, int]]:
    """Names and memory of the GPUs, by the driver's own tool: importing torch would take seconds."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    query = [tool, "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []  # a driver that does not answer is as good as none for planning
    rows = [line.rpartition(",") for line in answer.splitlines() if line.strip()]
    found = [(name.strip(), int(mib) * 2**20) for name, _, mib in rows if mib.strip().isdigit()]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return found
    chosen = [item for item in visible.split(",") if item.strip()]
    return found[: len(chosen)]
