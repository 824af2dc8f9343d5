"""Seating: which folder a run gets, or has already: agreed on by all ranks, and found again by those that are restarted."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path

from naught.comm import Group
from naught.trainer.run_folder import make_folder

__all__ = ["agree_on_folder", "launch_name", "redirect_output", "restarts"]


def restarts(env: Mapping[str, str]) -> int:
    """How often whoever starts the ranks has started them anew."""
    counts = (env.get("TORCHELASTIC_RESTART_COUNT"), env.get("SLURM_RESTART_COUNT"))
    return max((int(count) for count in counts if count and count.isdigit()), default=0)


def launch_name(env: Mapping[str, str]) -> str:
    """A name for this launch that its restarts have too, and no other launch: the job's, or its agent's process."""
    if "SLURM_JOB_ID" in env:
        return f"slurm-{env['SLURM_JOB_ID']}"
    named = env.get("TORCHELASTIC_RUN_ID", "none")
    if named != "none":
        return f"torchrun-{named}"
    agent = os.getppid()
    try:
        born = Path(f"/proc/{agent}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19]
    except OSError:
        born = "?"
    return f"process-{os.uname().nodename}-{agent}-{born}"


def agree_on_folder(group: Group, runs: Path, name: str, resumed: Path | None) -> tuple[Path, bool]:
    """The run's folder, and whether training goes on from what is there. Rank 0 decides."""
    told = ""
    with group.together():
        if group.rank == 0:
            earlier = resumed or (_of_launch(runs, launch_name(os.environ)) if restarts(os.environ) else None)
            told = json.dumps([str((earlier or make_folder(runs, name)).resolve()), earlier is not None])
    path, goes_on = json.loads(group.exchange_texts(told)[0])
    return Path(path), bool(goes_on)


def _of_launch(runs: Path, launch: str) -> Path | None:
    """The folder that an earlier start of this launch has made; None: it did not come so far."""
    for found in sorted(runs.glob("*/run.json"), reverse=True):
        if json.loads(found.read_text(encoding="utf-8")).get("launch") == launch:
            return found.parent
    return None


def redirect_output(path: Path) -> None:
    """From here on all that this process prints goes into a file, also what native code prints."""
    sys.stdout.flush()
    sys.stderr.flush()
    path.parent.mkdir(parents=True, exist_ok=True)  # on a node that does not share its disk with rank 0's
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
