"""Seats: which rank a launcher's environment says that this process is. Pure: it reads a mapping and starts nothing."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from naught.errors import UsageError

__all__ = ["DEFAULT_PORT", "Seat", "expand_hosts", "find_seat", "local_rank", "local_ranks", "number"]

DEFAULT_PORT = 29500
_WHERE = "the environment"
_ALL_OR_NONE = "start with torchrun, which sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, or set all of them or none"


class Seat(NamedTuple):
    """Which process this is among all and among those of its node, and where they meet."""

    rank: int
    world: int
    local_rank: int
    address: str
    port: int


def find_seat(env: Mapping[str, str], *, port: int = DEFAULT_PORT, mpi: bool = True) -> Seat | None:
    """The seat that torchrun, OpenMPI or Slurm gave to this process; None: nobody did, it is alone.

    A job that OpenMPI starts within Slurm's has Slurm's variables too, and they number nodes there: OpenMPI goes first.
    """
    seat = _torchrun(env, port)
    if seat is None and mpi:
        seat = _openmpi(env, port)
    if seat is None:
        seat = _slurm(env, port)
    if seat is None and "WORLD_SIZE" in env:
        raise UsageError("WORLD_SIZE is set, but not RANK", where=_WHERE, fix=_ALL_OR_NONE)
    if seat is not None and not 0 <= seat.rank < seat.world:
        raise UsageError(f"rank {seat.rank} is not one of {seat.world} ranks", where=_WHERE, fix="ranks count from 0")
    return seat


def _torchrun(env: Mapping[str, str], port: int) -> Seat | None:
    if "RANK" not in env:
        return None
    missing = [name for name in ("WORLD_SIZE", "MASTER_ADDR") if name not in env]
    if missing:
        raise UsageError(f"RANK is set, but not {' and '.join(missing)}", where=_WHERE, fix=_ALL_OR_NONE)
    rank = number(env, "RANK")
    local = number(env, "LOCAL_RANK", rank)  # right on one node; on several a rank soon has no device
    return Seat(rank, number(env, "WORLD_SIZE"), local, env["MASTER_ADDR"], number(env, "MASTER_PORT", port))


def _openmpi(env: Mapping[str, str], port: int) -> Seat | None:
    if "OMPI_COMM_WORLD_RANK" not in env:
        return None
    world = number(env, "OMPI_COMM_WORLD_SIZE")
    if world == 1:
        return None  # it has nobody to meet
    address = env.get("MASTER_ADDR")
    if address is None:
        if number(env, "OMPI_COMM_WORLD_LOCAL_SIZE", 0) != world:
            raise UsageError(
                "OpenMPI does not say on which node rank 0 is",
                where=_WHERE,
                fix="pass it on: mpirun -x MASTER_ADDR=the-node-of-rank-0",
            )
        address = "127.0.0.1"
    rank, local = number(env, "OMPI_COMM_WORLD_RANK"), number(env, "OMPI_COMM_WORLD_LOCAL_RANK")
    return Seat(rank, world, local, address, number(env, "MASTER_PORT", port))


def _slurm(env: Mapping[str, str], port: int) -> Seat | None:
    # A step may have fewer tasks, on fewer nodes, than its job.
    tasks = next((name for name in ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS") if name in env), None)
    if "SLURM_PROCID" not in env or tasks is None or number(env, tasks) == 1:
        return None
    world = number(env, tasks)
    if "SLURM_STEP_ID" not in env:
        # A batch script is process 0 of a job of many tasks, and would wait for others that nobody has started.
        raise UsageError(
            f"Slurm's job has {world} tasks, but srun has not started this process (SLURM_STEP_ID is not set)",
            where=_WHERE,
            fix="start it with srun or torchrun, or for a single process run it with: env -u SLURM_PROCID python ...",
        )
    nodes = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_NODELIST") or env.get("SLURM_JOB_NODELIST")
    address = env.get("MASTER_ADDR") or (expand_hosts(nodes)[0] if nodes else env.get("SLURM_LAUNCH_NODE_IPADDR"))
    if address is None:
        raise UsageError("Slurm does not name its nodes", where=_WHERE, fix="set MASTER_ADDR to the node of rank 0")
    if port == DEFAULT_PORT:
        port += number(env, "SLURM_JOB_ID", 0) % 1000  # jobs that share a node must not meet
    local = number(env, "SLURM_LOCALID", 0)
    return Seat(number(env, "SLURM_PROCID"), world, local, address, number(env, "MASTER_PORT", port))


def local_ranks(env: Mapping[str, str]) -> int:
    """How many ranks share this machine, as far as their launcher says."""
    for name in ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "SLURM_STEP_TASKS_PER_NODE", "SLURM_NTASKS_PER_NODE"):
        count = re.match(r"\d+", env.get(name, ""))  # Slurm may write 4(x2)
        if count is not None:
            return int(count[0])
    return 1


def local_rank(env: Mapping[str, str]) -> int:
    """Which of them this one is, as far as its launcher says."""
    names = ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID")
    return next((number(env, name) for name in names if name in env), 0)


def number(env: Mapping[str, str], name: str, default: int | None = None) -> int:
    """An integer of the environment; without a default it must be there."""
    text = env.get(name)
    if text is None and default is not None:
        return default
    try:
        return int(text or "")
    except ValueError:
        said = "is not set" if text is None else f'is "{text[:80]}", which is no integer'
        raise UsageError(f"{name} {said}", where=_WHERE, fix=_ALL_OR_NONE) from None


_SPAN = r"\d+(?:-\d+)?"
_HOST = rf"(?:[^\[\],\s]|\[{_SPAN}(?:,{_SPAN})*\])+"
_HOSTS = re.compile(rf"{_HOST}(?:,{_HOST})*")


def expand_hosts(text: str) -> list[str]:
    """The hosts of a Slurm node list in its order: "gpu[03-05,9],big" is gpu03, gpu04, gpu05, gpu9 and big."""
    if not _HOSTS.fullmatch(text):
        raise UsageError(f'"{text[:80]}" is no list of nodes', where=_WHERE, fix="write it like gpu[03-05,9],big")
    return [host for pattern in re.findall(_HOST, text) for host in _expand(pattern)]


def _expand(pattern: str) -> list[str]:
    head, bracket, rest = pattern.partition("[")
    if not bracket:
        return [head]
    spans, _, tail = rest.partition("]")
    return [head + digits + end for digits in _digits(spans) for end in _expand(tail)]


def _digits(spans: str) -> Iterator[str]:
    """The numbers of "03-05,9", as wide as the first of each span is written."""
    for span in spans.split(","):
        first, _, last = span.partition("-")
        yield from (str(at).zfill(len(first)) for at in range(int(first), int(last or first) + 1))
