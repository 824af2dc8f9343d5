"""Hardware: GPUs and their links, cores, memory, and the limits that a system sets to a process."""

from __future__ import annotations

import os
import re
import resource
import shutil
import subprocess
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from naught.doctor.finding import Fact, Finding, Verdict
from naught.machine import driver_gpus, host_limit_bytes
from naught.quantity import show_bytes

if TYPE_CHECKING:
    from naught.devices import GpuFacts

__all__ = ["cores", "gpus", "gpus_finding", "limits", "links_of", "memory", "shared_memory"]


def gpus() -> Sequence[Finding]:
    from naught.devices import gpu_facts

    found = gpu_facts()
    return [gpus_finding(found, driver_gpus(), links_of(_topology(), len(found)) if len(found) > 1 else {})]


def gpus_finding(found: Sequence[GpuFacts], known: Sequence[tuple[str, int]], links: Mapping[str, int]) -> Finding:
    """What torch can use, beside what the driver knows."""
    if not found:
        return _no_gpus(known)
    name, total = found[0].name, found[0].total_bytes
    free = min(gpu.free_bytes for gpu in found)
    apart = sum(len(gpu.peers) < len(found) - 1 for gpu in found)
    said = f"{len(found)} x {name}, {show_bytes(total)} each, at least {show_bytes(free)} of it free"
    said += f"; links: {', '.join(f'{count} x {kind}' for kind, count in links.items())}" if links else ""
    facts: dict[str, Fact] = {"torch": len(found), "name": name, "total_bytes": total, "free_bytes": free, "without_peers": apart}
    facts |= {f"links_{kind}": count for kind, count in links.items()}
    if free < total // 2:
        return Finding("gpus", said, Verdict.NOTE, "another process holds memory there; nvidia-smi shows which", facts)
    if apart:
        fix = "what they send to each other goes through the host; look at nvidia-smi topo -p2p r"
        return Finding("gpus", f"{said}; {apart} of them cannot reach every other one", Verdict.NOTE, fix, facts)
    return Finding("gpus", said, facts=facts)


def _no_gpus(known: Sequence[tuple[str, int]]) -> Finding:
    if not known:
        return Finding("gpus", "none: ranks are processes on the CPU, over gloo", facts={"torch": 0})
    fix = "install torch's CUDA build for this driver, or hide the GPUs with CUDA_VISIBLE_DEVICES="
    said = f"the driver has {len(known)} x {known[0][0]}, and torch can use none of them"
    return Finding("gpus", said, Verdict.BAD, fix, {"torch": 0, "driver": len(known)})


def _topology() -> str:
    """The driver's matrix of links; empty where there is none."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return ""
    try:
        return subprocess.run([tool, "topo", "-m"], capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ""  # it is only told, nothing depends on it


def links_of(matrix: str, count: int) -> dict[str, int]:
    """How many pairs of GPUs have which kind of link (NV18, PIX, SYS ...), from `nvidia-smi topo -m`."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", matrix)
    rows = [line.split() for line in plain.splitlines() if re.match(r"GPU\d+\s", line) and "X" in line.split()]
    kinds = Counter(row[1 + other] for at, row in enumerate(rows[:count]) for other in range(at + 1, min(count, len(row) - 1)))
    return dict(kinds)


def cores() -> Sequence[Finding]:
    import torch

    allowed = len(os.sched_getaffinity(0))
    quota = _quota()
    usable = min(allowed, int(quota) or 1) if quota else allowed
    threads = torch.get_num_threads()
    said = f"{os.cpu_count()} cores, {usable} for this process; torch computes with {threads} threads"
    facts = {"cores": os.cpu_count(), "allowed": allowed, "quota": quota, "threads": threads}
    if threads > usable:
        return [Finding("cores", said, Verdict.NOTE, f"set OMP_NUM_THREADS={usable}: threads without cores wait", facts)]
    return [Finding("cores", said, facts=facts)]


def _quota() -> float | None:
    """Cores that the control group grants; None: it does not say."""
    try:
        most, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="ascii").split()
        return int(most) / int(period)
    except (OSError, ValueError):  # there is none, or it says "max"
        return None


def memory() -> Sequence[Finding]:
    from naught.devices import free_host_bytes

    whole = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit, free = host_limit_bytes(), free_host_bytes()
    bound = f", {show_bytes(limit)} by control group" if limit < whole else ""
    facts = {"total_bytes": whole, "limit_bytes": limit, "free_bytes": free}
    said = f"{show_bytes(whole)}{bound}, {show_bytes(free)} free"
    if free < min(limit, whole) // 10:
        return [Finding("memory", said, Verdict.NOTE, "less than a tenth is free: the system may end processes", facts)]
    return [Finding("memory", said, facts=facts)]


_FEW_FILES = 1024


def limits() -> Sequence[Finding]:
    """Open files, and memory that may be locked, which network cards need that write to it themselves."""
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    cards = Path("/sys/class/infiniband").is_dir()
    endless = resource.RLIM_INFINITY
    said = f"ulimit -n {'unlimited' if files == endless else files}, ulimit -l "
    said += "unlimited" if locked == endless else f"{locked // 1024} kB"
    facts = {"open_files": None if files == endless else files, "locked_bytes": None if locked == endless else locked}
    if cards and locked != endless:
        fix = "InfiniBand needs locked memory: set ulimit -l unlimited, or --ulimit memlock=-1 for a container"
        return [Finding("limits", said, Verdict.NOTE, fix, facts)]
    if files != endless and files < _FEW_FILES:
        return [Finding("limits", said, Verdict.NOTE, "few open files for data loaders: set ulimit -n 65536", facts)]
    return [Finding("limits", said, facts=facts)]


_LEAST_SHARED = 10**9


def shared_memory() -> Sequence[Finding]:
    """What data loaders with workers and NCCL use between processes."""
    try:
        usage = shutil.disk_usage("/dev/shm")
    except OSError:
        fix = "data loaders with workers need it: mount a tmpfs there"
        return [Finding("/dev/shm", "there is none", Verdict.NOTE, fix)]
    said = f"{show_bytes(usage.total)}, {show_bytes(usage.free)} free"
    facts = {"total_bytes": usage.total, "free_bytes": usage.free}
    if usage.free < _LEAST_SHARED:
        fix = "data loaders with workers and NCCL may fail: start the container with --shm-size=8g"
        return [Finding("/dev/shm", said, Verdict.NOTE, fix, facts)]
    return [Finding("/dev/shm", said, facts=facts)]
