"""Place: the folder in which a command was given, as a place for checkpoints and for a tier of training."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

from naught.checkpoints.disk import RealDisk
from naught.doctor.finding import Fact, Finding, Verdict
from naught.measuring.disk import direct_alignment
from naught.quantity import show_bytes

__all__ = ["file_system_of", "locks", "room"]

_FULL_SHARE = 20
_IN_MEMORY = ("tmpfs", "ramfs")


def room() -> Sequence[Finding]:
    """Free bytes, the file system, and whether it can be reached past the page cache."""
    here = Path.cwd()
    usage = shutil.disk_usage(here)
    kind = file_system_of(here, Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace"))
    facts: dict[str, Fact] = {"free_bytes": usage.free, "total_bytes": usage.total, "file_system": kind}
    said = f"{show_bytes(usage.free)} of {show_bytes(usage.total)} free here, {kind}"
    if not os.access(here, os.W_OK):
        return [Finding("disk", f"{said}; it cannot be written", Verdict.NOTE, "look again where checkpoints will be", facts)]
    alignment = direct_alignment(here)
    facts |= {"direct_alignment": alignment}
    said += f", O_DIRECT by {alignment} bytes" if alignment else ", no O_DIRECT"
    if kind in _IN_MEMORY:
        return [Finding("disk", said, Verdict.NOTE, "this is memory: a checkpoint here is gone with the machine", facts)]
    if usage.free < usage.total // _FULL_SHARE:
        return [Finding("disk", said, Verdict.NOTE, "nearly full: make room, or save elsewhere", facts)]
    return [Finding("disk", said, facts=facts)]


def file_system_of(folder: Path, mounts: str) -> str:
    """The kind of file system that holds a folder, from /proc/self/mountinfo."""
    best, kind = -1, "unknown"
    for line in mounts.splitlines():
        before, _, after = line.partition(" - ")
        fields = before.split()
        if len(fields) < 5 or not after:
            continue
        point = Path(re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), fields[4]))
        if folder.is_relative_to(point) and len(point.parts) >= best:  # a later mount covers an earlier one
            best, kind = len(point.parts), after.split()[0]
    return kind


def locks() -> Sequence[Finding]:
    """Whether one process can keep a folder to itself, as saving does."""
    if not os.access(".", os.W_OK):
        return [Finding("file locks", "not tried: the folder cannot be written")]
    disk = RealDisk()
    with tempfile.TemporaryDirectory(prefix=".naught-lock-", dir=".") as folder:
        first = disk.hold(folder)
        if first is None:
            fix = "saves there cannot tell a crashed one from one under way: mount with locks, or save elsewhere"
            return [Finding("file locks", "this file system has none", Verdict.NOTE, fix, {"locks": False})]
        second = disk.hold(folder)
        first.let_go()
        if second is not None:
            second.let_go()
            fix = "two jobs that save to one folder would not see each other: save elsewhere"
            return [Finding("file locks", "granted twice at once", Verdict.BAD, fix, {"locks": False})]
    return [Finding("file locks", "work here", facts={"locks": True})]
