"""Doctor: looks at everything that training here would rest on, one line each. Changes nothing and keeps nothing."""

from __future__ import annotations

from collections.abc import Iterator

from naught.doctor import hardware, network, numerics, place, software, speeds
from naught.doctor.finding import Finding, Probe, Verdict, findings_of

__all__ = ["Finding", "Verdict", "examine"]

_FACTS: dict[str, Probe] = {
    "naught": software.naught_itself,
    "torch": software.torch_itself,
    "packages": software.packages,
    "extras": software.extras,
    "gpus": hardware.gpus,
    "cores": hardware.cores,
    "memory": hardware.memory,
    "limits": hardware.limits,
    "/dev/shm": hardware.shared_memory,
    "disk": place.room,
    "file locks": place.locks,
    "network": network.interfaces,
    "launcher": network.launcher,
}
_TRIALS: dict[str, Probe] = {"training, CPU": numerics.on_cpu, "training, GPU": numerics.on_gpu}


def examine(*, quick: bool) -> Iterator[Finding]:
    """Each finding as soon as it is there. A quick examination measures nothing and trains nothing."""
    for topic, probe in _FACTS.items():
        yield from findings_of(topic, probe)
    if quick:
        yield from findings_of("speeds", speeds.kept)
        return
    for topic, probe in {**speeds.measured_now(), **_TRIALS}.items():
        yield from findings_of(topic, probe)
