"""Network: the interfaces of this machine, what ranks would use of them, and the seat that a launcher has given."""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from naught.doctor.finding import Finding, Verdict

__all__ = ["interfaces", "launcher", "seat_of", "unknown_names"]

_CHOICES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def interfaces() -> Sequence[Finding]:
    names = {name: _state(name) for _, name in socket.if_nameindex()}
    listed = ", ".join(f"{name} {state}" for name, state in names.items())
    chosen = {name: os.environ[name] for name in _CHOICES if os.environ.get(name)}
    facts = {"interfaces": [f"{name} {state}" for name, state in names.items()], **chosen}
    wrong = unknown_names(chosen, names)
    if wrong:
        fix = f"unset {' and '.join(wrong)}, or choose of {', '.join(names)}"
        return [Finding("network", f"{' and '.join(wrong)} names no interface of {listed}", Verdict.BAD, fix, facts)]
    if chosen:
        return [
            Finding(
                "network", f"{listed}; ranks use {', '.join(f'{name}={value}' for name, value in chosen.items())}", facts=facts
            )
        ]
    said = f"{listed}; ranks of this machine use the loopback"
    amiss = _own_name()
    facts |= {"own_name": amiss or "known"}
    if amiss:
        fix = "before training on several machines set GLOO_SOCKET_IFNAME to the interface between them"
        return [Finding("network", f"{said}; {amiss}", Verdict.NOTE, fix, facts)]
    return [Finding("network", f"{said}, of several that of the machine's name", facts=facts)]


def _state(name: str) -> str:
    try:
        state = Path("/sys/class/net", name, "operstate").read_text(encoding="ascii").strip()
    except OSError:
        return "unknown"
    return "up" if name == "lo" and state == "unknown" else state


def unknown_names(chosen: Mapping[str, str], names: Iterable[str]) -> list[str]:
    """The variables that name no interface. As NCCL reads them they hold prefixes: of names (=), or of those to leave (^)."""
    known = list(names)
    wrong = []
    for variable, value in chosen.items():
        wanted = [part.lstrip("=") for part in value.split(",")]
        found = any(name.startswith(part) for name in known for part in wanted)
        if not value.startswith("^") and not found:
            wrong.append(variable)
    return wrong


def _own_name() -> str:
    """What is amiss with the name of this machine, by which gloo finds its interface; empty: nothing."""
    try:
        address = str(socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError:
        return "nobody knows this machine by its name"
    loopback = ipaddress.ip_address(address.partition("%")[0]).is_loopback
    return "this machine's name is that of its loopback" if loopback else ""


def launcher() -> Sequence[Finding]:
    return [seat_of(os.environ)]


_LAUNCHERS = {"torchrun": ("RANK", "WORLD_SIZE"), "Slurm": ("SLURM_PROCID",), "OpenMPI": ("OMPI_COMM_WORLD_RANK",)}


def seat_of(env: Mapping[str, str]) -> Finding:
    """What a launcher's variables make of this process. Raises what training would raise."""
    from naught.seats import find_seat

    found = [name for name, variables in _LAUNCHERS.items() if any(variable in env for variable in variables)]
    seat = find_seat(env)
    by = f"variables of {' and '.join(found)}" if found else "no launcher's variables"
    if seat is None:
        return Finding("launcher", f"{by}: a script here is a single process", facts={"launchers": found})
    said = f"{by}: rank {seat.rank} of {seat.world}, {seat.local_rank} on its node"
    return Finding("launcher", said, facts={"launchers": found, "rank": seat.rank, "world": seat.world})
