"""Machines: a machine as a command line says it, and its rates in words."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any

from naught.errors import UsageError
from naught.machine import Machine, detect, parse_gpu
from naught.quantity import parse_bytes, show_bytes

__all__ = ["machine_of", "machine_text", "rates_text"]


def machine_of(options: argparse.Namespace) -> tuple[Machine, str]:
    """The machine asked for; without a GPU's name or size, the present one with what was asked changed."""
    machine, found = detect() if options.gpu is None else (Machine(gpu=parse_gpu(options.gpu)), "")
    gpu = machine.gpu
    if options.tflops is not None:
        gpu = gpu._replace(flops=options.tflops * 1e12)
    if options.link is not None:
        gpu = gpu._replace(link_bytes_s=parse_bytes(options.link, what="--link"))
    changes: dict[str, Any] = {}
    for name, field in _MACHINE_SIZES.items():
        text = getattr(options, name)
        if text is not None:
            changes[field] = parse_bytes(text, what="--" + name.replace("_", "-"))
    if machine.unified and "host_bytes" in changes:
        gpu = gpu._replace(memory_bytes=changes.pop("host_bytes"))
    rates = [gpu.flops, gpu.link_bytes_s, *(changes[field] for field in changes if field.endswith("_s"))]
    if not all(0 < rate < 1e21 for rate in rates):
        raise UsageError("rates must be above 0 and finite", fix="check --tflops, --link, --network and --disk-speed")
    ranks = machine.ranks if options.ranks is None else options.ranks
    per_node = options.per_node if options.per_node is not None else _per_node(ranks, machine.ranks_per_node)
    return replace(machine, ranks=ranks, ranks_per_node=per_node, gpu=gpu, **changes), found


_MACHINE_SIZES = {"host": "host_bytes", "disk": "disk_bytes", "network": "network_bytes_s", "disk_speed": "disk_bytes_s"}


def _per_node(ranks: int, present: int) -> int:
    """As many ranks on a node as there are GPUs here, or up to eight, such that the nodes are full."""
    most = max(8, present)
    return next(count for count in range(min(max(ranks, 1), most), 0, -1) if ranks % count == 0)


def rates_text(machine: Machine) -> str:
    rates = {
        "collectives": machine.collective_bytes_s,
        "host link": machine.link_bytes_s,
        "disk": machine.disk_bytes_s / machine.local_ranks,
    }
    shown = ", ".join(f"{name} {show_bytes(rate)}/s" for name, rate in rates.items())
    return f"{machine.gpu.flops / 1e12:.3g} TFLOP/s, {shown} for each rank"


def machine_text(machine: Machine) -> str:
    ranks = f"{machine.ranks} rank{'s' * (machine.ranks > 1)}"
    nodes = f", {machine.local_ranks} on a node" if machine.ranks > 1 else ""
    device, host, disk = (show_bytes(size) for size in (machine.gpu.memory_bytes, machine.host_bytes, machine.disk_bytes))
    if machine.unified:
        return f"{ranks}{nodes}: {device} that they share, and {disk} disk"
    return f"{ranks}{nodes}: {device} each, {host} host and {disk} disk a node"
