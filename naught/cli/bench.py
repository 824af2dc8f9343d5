"""`naught bench`: measures what the planner goes by, prints it, and keeps it for the next plan."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from naught.machine import device_here, driver_gpus
from naught.measured import FIGURES, keep, show_figure
from naught.quantity import show_bytes, show_seconds
from naught.text import print_table

__all__ = ["run_bench"]


def run_bench(options: argparse.Namespace) -> int:
    if options.action == "stages":
        from naught.cli.stages import run_stages

        return run_stages(options)
    notes = _busy()
    found = {"comm": _comm, "adam": _adam, "disk": _disk, "step": _step}[options.action](options)
    notes += [found.note] if found.note else []
    kept = "" if options.no_store or not found.figures else keep(found.figures, device_here())
    if options.json:
        data = {"figures": found.figures, "measured": found.data, "notes": notes, "kept": bool(kept)}
        print(json.dumps(data, indent=2))
        return 0
    print_table(found.title, found.header, found.rows)
    for note in notes:
        print(f"note: {note}")
    for name, value in found.figures.items():
        print(f"for the planner: {FIGURES[name]} {show_figure(name, value)}{'' if kept else ', not kept'}")
    if kept:
        print(f"kept in {kept}", file=sys.stderr)
    return 0


def _busy() -> list[str]:
    """A figure of a machine that does other things besides is kept as well, but its user should know."""
    cores, load = os.cpu_count() or 1, os.getloadavg()[0]
    if load < cores / 2:
        return []
    return [f"other programs were at work (a load of {load:.1f} on {cores} cores): measure again when they are not"]


@dataclass(frozen=True)
class _Found:
    """A table, and those of its figures that the planner uses."""

    title: str
    header: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    data: Sequence[Mapping[str, object]]
    figures: Mapping[str, float] = field(default_factory=dict)
    note: str = ""


def _comm(options: argparse.Namespace) -> _Found:
    from naught.measuring.comm import comm_rates

    found = comm_rates(options.nproc)
    rows = [
        (rate.collective, show_bytes(rate.flat_bytes), show_seconds(rate.seconds), f"{show_bytes(rate.bytes_s)}/s")
        for rate in found.rates
    ]
    title = f"{found.ranks} ranks, {'CPU over gloo' if found.device == 'cpu' else 'a GPU each'}"
    header = ("collective", "flat", "time", "sent by one rank")
    data = [{"ranks": found.ranks, "device": found.device, "bytes_s": rate.bytes_s, **rate._asdict()} for rate in found.rates]
    if found.device == "cpu" and driver_gpus():
        note = f"not for the planner, whose ranks have a GPU each: this was between CPUs, for there are not {found.ranks} GPUs"
        return _Found(title, header, rows, data, note=note)
    return _Found(title, header, rows, data, {"collective_bytes_s": found.bytes_s})


def _adam(_: argparse.Namespace) -> _Found:
    from naught.measuring.adam import adam_numel_s
    from naught.measuring.rounds import CPU, all_cores, present_device

    with all_cores() as cores:
        on_host = adam_numel_s(CPU)
    found = {f"{cores} cores": on_host}
    device = present_device()
    if device.type != "cpu":
        found[str(device)] = adam_numel_s(device, budget_s=0.5)
    rows = [(name, show_figure("update_numel_s", speed)) for name, speed in found.items()]
    data = [{"on": name, "numel_s": speed} for name, speed in found.items()]
    return _Found("fused AdamW, 32-bit weights and moments", ("on", "speed"), rows, data, {"update_numel_s": on_host})


def _disk(options: argparse.Namespace) -> _Found:
    from naught.measuring.disk import disk_rate

    found = disk_rate(Path(options.folder))
    rows = [
        ("write and sync", show_bytes(found.nbytes), f"{show_bytes(found.write_bytes_s)}/s"),
        ("read", show_bytes(found.nbytes), f"{show_bytes(found.read_bytes_s)}/s"),
    ]
    direct = (
        f"O_DIRECT by {found.alignment} bytes" if found.alignment else "no O_DIRECT: past the page cache as far as it lets go"
    )
    title = f"disk of {options.folder}, {direct}"
    return _Found(title, ("way", "moved", "speed"), rows, [found._asdict()], {"disk_bytes_s": found.bytes_s})


def _step(_: argparse.Namespace) -> _Found:
    from naught.measuring.link import link_rate
    from naught.measuring.rounds import all_cores, present_device
    from naught.measuring.step import step_rate

    device = present_device()
    with all_cores():
        found = step_rate(device)
    rows = [
        ("forward and backward of a small GPT", show_figure("flops", found.step_flops)),
        ("one product of square matrices", show_figure("flops", found.product_flops)),
    ]
    figures, data = {"flops": found.step_flops}, [found._asdict()]
    if device.type != "cpu":
        link = link_rate(device)
        rows += [("host to device", f"{show_bytes(link.to_device)}/s"), ("device to host", f"{show_bytes(link.to_host)}/s")]
        figures["link_bytes_s"] = link.bytes_s
        data.append(link._asdict())
    title, header = f"{device}, {found.dtype}", ("what", "speed")
    if device.type == "cpu" and driver_gpus():
        return _Found(title, header, rows, data, note="not for the planner, which would use the GPU: this was the CPU")
    return _Found(title, header, rows, data, figures)
