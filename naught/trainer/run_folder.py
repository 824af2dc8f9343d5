"""Run folder: what a run leaves behind, written by one rank as it happens. A folder is made once and added to, never replaced."""

from __future__ import annotations

import csv
import json
import math
import os
import re
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from naught.errors import UsageError

__all__ = ["RunFolder", "make_folder", "shown_path"]

_COLUMNS = (
    *("step", "time_s", "loss", "bpb", "grad_norm", "lr", "loss_scale", "skipped", "samples", "tokens"),
    *("seconds", "tokens_s", "mfu"),
)


def make_folder(runs: Path, name: str) -> Path:
    """The next of the numbered folders. Two runs that begin at once get two."""
    plain = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.")[:60] or "run"
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
        self.since = time.monotonic() - self._seconds_so_far()
        (path / "logs").mkdir(exist_ok=True)

    def _seconds_so_far(self) -> float:
        """When the last record of an earlier start was written, on this run's own clock."""
        last = 0.0
        if self._metrics.exists():
            with self._metrics.open("rb+") as file:
                for line in file:
                    try:
                        last = json.loads(line)["time_s"]
                    except (ValueError, KeyError):
                        file.seek(-len(line), os.SEEK_CUR)  # the line under way when a run was killed
                        file.truncate()
                        break
        return last

    @property
    def _metrics(self) -> Path:
        return self.path / "metrics.jsonl"

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
        with tempfile.NamedTemporaryFile("w", dir=self.path, delete=False, encoding="utf-8") as file:
            file.write(text)
        Path(file.name).chmod(0o644)
        Path(file.name).replace(self.path / name)

    @property
    def seconds(self) -> float:
        """How long the run has been under way, over all of its starts."""
        return time.monotonic() - self.since

    def record(self, kind: str, step: int, **values: Any) -> dict[str, Any]:
        """Add a line to the metrics, and a row to the table of steps. Returns the record."""
        found = {"kind": kind, "step": step, "time_s": round(self.seconds, 4), **values}
        with self._metrics.open("a", encoding="utf-8") as file:
            file.write(json.dumps(_plain(found), separators=(",", ":")) + "\n")
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
