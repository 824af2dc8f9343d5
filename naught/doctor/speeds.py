"""Speeds: what `naught bench` has measured of this machine, or what a quick measurement says. Keeps nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from naught.doctor.finding import Finding, Probe
from naught.machine import device_here
from naught.measured import FIGURES, recall, show_figure
from naught.quantity import show_bytes

__all__ = ["kept", "measured_now"]

_ACTIONS = {
    "collective_bytes_s": "comm",
    "update_numel_s": "adam",
    "disk_bytes_s": "disk",
    "link_bytes_s": "step",
    "flops": "step",
}


def kept() -> Sequence[Finding]:
    """Only what was measured before."""
    measured = recall(device_here())
    found = [_kept(name, getattr(measured, name), day) for name, day in measured.dates.items()]
    return found or [Finding("speeds", "nothing was measured yet; naught bench does, and naught plan uses it")]


def _kept(name: str, value: float, day: str) -> Finding:
    return Finding(f"speed, {FIGURES[name]}", f"{show_figure(name, value)}, measured on {day}", facts={name: value, "date": day})


def measured_now() -> Mapping[str, Probe]:
    """A probe for every speed: what was kept of it, or else a short measurement."""
    measured = recall(device_here())
    probes: dict[str, Probe] = {}
    for name, words in FIGURES.items():
        value = getattr(measured, name)
        probes[f"speed, {words}"] = (
            partial(_now, name) if value is None else partial(_listed, _kept(name, value, measured.dates[name]))
        )
    return probes


def _listed(finding: Finding) -> Sequence[Finding]:
    return [finding]


def _now(name: str) -> Sequence[Finding]:
    quick: Mapping[str, Callable[[], tuple[float, str] | None]] = {
        "collective_bytes_s": _collectives,
        "update_numel_s": _adam,
        "disk_bytes_s": _disk,
        "link_bytes_s": _link,
        "flops": _flops,
    }
    found = quick[name]()
    if found is None:
        return []
    value, how = found
    said = f"{show_figure(name, value)} {how}, just now; naught bench {_ACTIONS[name]} measures longer and keeps it"
    return [Finding(f"speed, {FIGURES[name]}", said, facts={name: value})]


def _collectives() -> tuple[float, str]:
    from naught.measuring.comm import comm_rates

    found = comm_rates(2, budget_s=0.8)
    return found.bytes_s, f"from each of {found.ranks} ranks on the {'CPU' if found.device == 'cpu' else 'GPUs'}"


def _adam() -> tuple[float, str]:
    from naught.measuring.adam import adam_numel_s
    from naught.measuring.rounds import CPU, all_cores

    with all_cores() as cores:
        return adam_numel_s(CPU, budget_s=0.4), f"on {cores} cores"


def _disk() -> tuple[float, str]:
    from naught.measuring.disk import disk_rate

    found = disk_rate(Path(), most_bytes=2**28, budget_s=1.5)
    return found.bytes_s, f"here (writing {show_bytes(found.write_bytes_s)}/s, reading {show_bytes(found.read_bytes_s)}/s)"


def _link() -> tuple[float, str] | None:
    from naught.measuring.link import link_rate
    from naught.measuring.rounds import present_device

    device = present_device()
    if device.type == "cpu":
        return None
    return link_rate(device, budget_s=0.2).bytes_s, "between host and device, either way"


def _flops() -> tuple[float, str]:
    from naught.measuring.rounds import all_cores, present_device
    from naught.measuring.step import step_rate

    with all_cores():
        found = step_rate(present_device(), budget_s=0.4)
    return found.step_flops, f"in a small step in {found.dtype}"
