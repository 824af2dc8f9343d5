"""Seating: which folder a run gets, or has already: agreed on by all ranks, and found again by those that are restarted."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path

from naught.comm import Group
from naught.trainer.run_folder import make_folder, plain_name

__all__ = ["agree_on_folder", "launch_names", "redirect_output"]


def launch_names(env: Mapping[str, str]) -> dict[str, str]:
    """Names of this launch that its restarts have too: of Slurm's job, which may hold several launches and be queued again, and
    of the agent, which starts ranks anew."""
    return {"agent": _agent_name(env), "job": f"slurm-{env['SLURM_JOB_ID']}" if "SLURM_JOB_ID" in env else ""}


def _agent_name(env: Mapping[str, str]) -> str:
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
            earlier = resumed or _of_launch(runs, name, os.environ)
            told = json.dumps([str((earlier or make_folder(runs, name)).resolve()), earlier is not None])
    path, goes_on = json.loads(group.exchange_texts(told)[0])
    return Path(path), bool(goes_on)


def _of_launch(runs: Path, name: str, env: Mapping[str, str]) -> Path | None:
    """The folder that an earlier start of this launch has made, if this is a restart; None: it did not come so far."""
    which = next((key for key, variable in _RESTARTS.items() if env.get(variable, "0") not in ("", "0")), None)
    if which is None:
        return None
    mine = launch_names(env)[which]
    for folder in sorted(runs.glob(f"*-{plain_name(name)}"), key=lambda path: path.name.zfill(255), reverse=True):
        try:
            facts = json.loads((folder / "run.json").read_text(encoding="utf-8"))
            if facts["launch"][which] == mine and facts["status"] != "done":
                return folder
        except (OSError, ValueError, KeyError, TypeError):
            continue  # no run, or one that somebody has damaged: not the one that is looked for
    return None


_RESTARTS = {"agent": "TORCHELASTIC_RESTART_COUNT", "job": "SLURM_RESTART_COUNT"}


def redirect_output(path: Path) -> None:
    """From here on all that this process prints goes into a file, also what native code prints."""
    sys.stdout.flush()
    sys.stderr.flush()
    path.parent.mkdir(parents=True, exist_ok=True)  # on a node that does not share its disk with rank 0's
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
