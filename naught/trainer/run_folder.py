"""Run folder: what a run leaves behind, written by one rank as it happens. A folder is made once and added to, never replaced."""

from __future__ import annotations

import csv
import fcntl
import json
import logging
import math
import os
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from naught.errors import UsageError
from naught.whole_files import replacing

__all__ = ["RunFolder", "make_folder", "plain_name", "shown_path"]

_LOG = logging.getLogger("naught")

_COLUMNS = (
    *("step", "time_s", "loss", "bpb", "grad_norm", "lr", "loss_scale", "skipped", "samples", "tokens"),
    *("seconds", "tokens_s", "mfu"),
)


def make_folder(runs: Path, name: str) -> Path:
    """The next of the numbered folders. Two runs that begin at once get two."""
    plain = plain_name(name)
    try:
        runs.mkdir(parents=True, exist_ok=True)
        while True:
            numbers = [int(found[1]) for path in runs.iterdir() if (found := re.match(r"(\d+)-", path.name))]
            path = runs / f"{max(numbers, default=0) + 1:04}-{plain}"
            if not _claimed(runs, path):
                return path
    except OSError as error:
        raise UsageError(
            f'no run folder can be made in "{runs}": {error.strerror}', fix="give another with --runs DIR"
        ) from error


def plain_name(name: str) -> str:
    """A name as a folder can have it."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.")[:60] or "run"


def _claimed(runs: Path, path: Path) -> bool:
    """Make a folder; whether somebody else was quicker with its number."""
    number = path.name.partition("-")[0]
    try:
        path.mkdir()
    except FileExistsError:
        return True
    if sum(other.name.startswith(f"{number}-") for other in runs.iterdir()) == 1:
        return False
    path.rmdir()  # two names with one number, at once: both try again
    return True


class RunFolder:
    """Metrics are appended line by line, so a run that dies loses none; what describes the run is replaced as a whole."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.facts: dict[str, Any] = {}
        self.handle: int | None = None  # None: other processes may write here too
        self.since = time.monotonic() - self._seconds_so_far()
        (path / "logs").mkdir(exist_ok=True)

    def _seconds_so_far(self) -> float:
        """When the last record of an earlier start was written, on this run's own clock."""
        last, line = 0.0, b"\n"
        if self._metrics.exists():
            with self._metrics.open("rb+") as file:
                for line in file:
                    try:
                        last = json.loads(line)["time_s"] if line.endswith(b"\n") else last
                    except (ValueError, KeyError):
                        continue  # somebody has written into it: the report leaves it out as well
                if not line.endswith(b"\n"):
                    file.seek(-len(line), os.SEEK_END)  # it was under way when the run was killed
                    file.truncate()
        return last

    @property
    def _metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    def claim(self) -> None:
        """Keep the folder to this process as long as it lives. Where the file system has no locks nobody can tell."""
        self.handle = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(self.handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(f"the run {shown_path(self.path)} is under way", fix="wait until it is over, or stop it") from None
        except OSError as error:
            _LOG.debug("no locks in %s: %s", self.path, error)

    def reread(self) -> None:
        """Take up the facts of an earlier start."""
        self.facts = json.loads((self.path / "run.json").read_text(encoding="utf-8"))

    def tell(self, **facts: Any) -> None:
        """Say what the run is, or how it is."""
        self.facts |= facts
        self.write("run.json", self.facts)

    def write(self, name: str, document: Mapping[str, Any] | str) -> None:
        """Put a whole file in place of what was there."""
        text = document if isinstance(document, str) else json.dumps(_plain(document), indent=2) + "\n"
        with replacing(self.path / name) as file:
            file.write(text.encode())

    @property
    def seconds(self) -> float:
        """How long the run has been under way, over all of its starts."""
        return time.monotonic() - self.since

    def record(self, kind: str, step: int, **values: Any) -> dict[str, Any]:
        """Add a line to the metrics, and a row to the table of steps. Returns the record."""
        found: dict[str, Any] = _plain({"kind": kind, "step": step, "time_s": round(self.seconds, 4), **values})
        with self._metrics.open("a", encoding="utf-8") as file:
            file.write(json.dumps(found, separators=(",", ":")) + "\n")
        if kind == "step":
            table = self.path / "metrics.csv"
            with table.open("a", newline="", encoding="utf-8") as file:
                rows = csv.writer(file, lineterminator="\n")
                if file.tell() == 0:
                    rows.writerow(_COLUMNS)
                rows.writerow([found.get(name) for name in _COLUMNS])
        return found


def shown_path(path: Path) -> str:
    """A path as short as it is from here."""
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)


def _plain(value: Any) -> Any:
    """As JSON has it, which has no NaN: what is not finite becomes null."""
    if isinstance(value, Mapping):
        return {str(key): _plain(member) for key, member in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(member) for member in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
