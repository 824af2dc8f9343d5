"""Failing: one cause and one fix of a run that ends in an error, whichever rank it was and whoever tells it.

Each rank that fails leaves its error in a folder; whoever has started the ranks, or else rank 0, tells the first that is a
cause and not a consequence. Tracebacks go to the ranks' logs.
"""

from __future__ import annotations

import json
import os
import re
import signal
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from naught.comm.agent import RankExit
from naught.devices import is_out_of_memory
from naught.errors import ConfigError, NaughtError
from naught.report import write_report
from naught.trainer.run_folder import RunFolder

__all__ = [
    "ERRORS",
    "Failure",
    "cause",
    "failure_of",
    "forget",
    "leave",
    "left",
    "mark_failed",
    "status_of",
    "tell_folder",
    "tell_saved",
    "was_saved",
]

ERRORS = "NAUGHT_ERRORS"  # the folder in which ranks leave their errors, if somebody reads them

# What a rank meets when another is gone: a consequence.
_LOST = re.compile(
    r"connection (was )?(closed|reset|refused)|broken pipe|socket (timeout|closed)|timed out|pair closure|NCCL|gloo.*read",
    re.IGNORECASE,
)
_HEARD = re.compile(r"\brank \d+$")  # how comm.together marks what another rank has found
_LOST_A_RANK = 2


class Failure(NamedTuple):
    """An error of one rank: what is said of it, how far it is from the cause (0: it is one; 1: it was heard from another
    rank; 2: another rank is gone), its status, and when it was."""

    rank: int
    text: str
    distance: int
    status: int
    time_s: float


def failure_of(error: BaseException, rank: int) -> Failure:
    if isinstance(error, ConfigError):
        text = str(error)
    elif isinstance(error, NaughtError):
        text = f"naught: {error}"
    elif isinstance(error, KeyboardInterrupt):
        text = "naught: interrupted, and not saved"
    else:
        text = _story(error, rank)
    return Failure(rank, text, _distance(error), status_of(error), time.time())


def _story(error: BaseException, rank: int) -> str:
    notes = getattr(error, "__notes__", [])
    if is_out_of_memory(error) and notes:  # which say it better
        return "\n".join([f"naught: rank {rank}: {notes[0].removeprefix('naught: ')}", *notes[1:], _ROOM])
    said = (str(error).strip().splitlines() or [""])[0]
    return "\n".join([f"naught: rank {rank} failed with {type(error).__name__}: {said} [{_place(error)}]", *notes])


_ROOM = "  with naught train: model.checkpointing=true, micro_batch=N with accumulation=N, --dtype bf16, --stage 3, --nproc N"


def _distance(error: BaseException) -> int:
    if isinstance(error, NaughtError):
        return 1 if _HEARD.search(error.where) else 0
    return _LOST_A_RANK if isinstance(error, RuntimeError | OSError) and _LOST.search(str(error)) else 0


def _place(error: BaseException) -> str:
    """Where an error was raised: the innermost line."""
    frames = traceback.extract_tb(error.__traceback__)
    return f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else "?"


def status_of(error: BaseException) -> int:
    """2: the command line cannot be meant; 1: all else."""
    return 2 if isinstance(error, NaughtError) and not isinstance(error, ConfigError) else 1


def leave(failure: Failure) -> bool:
    """Put an error where whoever started the ranks will look. Returns whether there is somebody."""
    folder = os.environ.get(ERRORS)
    if folder is None:
        return False
    try:
        Path(folder, f"rank{failure.rank}.json").write_text(json.dumps(failure._asdict()), encoding="utf-8")
    except OSError:
        return False  # nobody will find it there: it must be told here
    return True


def forget(rank: int) -> None:
    """A rank that is started anew has not failed."""
    folder = os.environ.get(ERRORS)
    if folder is not None:
        Path(folder, f"rank{rank}.json").unlink(missing_ok=True)


def tell_folder(path: Path) -> None:
    """Say in which folder the run is, for the case that rank 0 is killed and cannot say that it failed."""
    folder = os.environ.get(ERRORS)
    if folder is not None:
        Path(folder, "folder").write_text(str(path), encoding="utf-8")


def tell_saved() -> None:
    """Say that the run was stopped and saved."""
    folder = os.environ.get(ERRORS)
    if folder is not None:
        Path(folder, "saved").touch()


def was_saved(folder: Path) -> bool:
    return (folder / "saved").exists()


def mark_failed(folder: Path, text: str) -> None:
    """Write into the run's folder why it has failed: rank 0 may have known less, or nothing any more."""
    told = folder / "folder"
    with suppress(OSError, ValueError, NaughtError):  # rank 0 may have died before it wrote anything; the disk may be full
        run = RunFolder(Path(told.read_text(encoding="utf-8")))
        run.reread()
        run.tell(status="failed", error=text)
        write_report([run.path], run.path / "report.html")


def left(folder: Path) -> list[Failure]:
    """All errors that ranks have left, the earliest first."""
    found = [Failure(**json.loads(path.read_text(encoding="utf-8"))) for path in folder.glob("rank*.json")]
    return sorted(found, key=lambda failure: failure.time_s)


def cause(failures: Sequence[Failure], exits: Sequence[RankExit]) -> tuple[str, int]:
    """The one thing to tell of a run that failed, and the status with which to end."""
    nearest = min(failures, key=lambda failure: failure.distance, default=None)
    if nearest is not None and nearest.distance < _LOST_A_RANK:
        return nearest.text, nearest.status
    killed = next((found for found in exits if found.status < 0 and found.status != -signal.SIGTERM), None)
    if killed is not None:
        return f"naught: rank {killed.rank} was killed by {_signal(-killed.status)}", 1
    if nearest is not None:
        return nearest.text, nearest.status
    return f"naught: rank {exits[0].rank} ended with status {exits[0].status}", max(1, exits[0].status)


def _signal(number: int) -> str:
    name = signal.Signals(number).name
    if number == signal.SIGKILL:
        return f"{name}: often the kernel, where memory runs out (see dmesg). Make the batch smaller, or use more ranks"
    return f"{name}: a fault in native code. Its log has what was on its stack"
