"""Measured: figures of this machine that `naught bench` has found, kept in one small file. It measures nothing itself."""

from __future__ import annotations

import json
import logging
import os
import socket
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import date
from pathlib import Path

from naught.cache import cache_folder
from naught.errors import StorageError, UsageError
from naught.quantity import show_bytes, show_count
from naught.whole_files import replacing

__all__ = ["FIGURES", "Measured", "keep", "recall", "show_figure"]

_LOG = logging.getLogger("naught")

# What a planner would else guess, and the words for it.
FIGURES: Mapping[str, str] = {
    "collective_bytes_s": "collectives",
    "update_numel_s": "AdamW",
    "disk_bytes_s": "disk",
    "link_bytes_s": "host link",
    "flops": "arithmetic",
}

_MOST = 1e21


@dataclass(frozen=True)
class Measured:
    """Rates of one host with one kind of device; None: nobody has measured it. `dates` has the day of each that was."""

    host: str
    device: str
    collective_bytes_s: float | None = None  # what one rank sends, gathering and reducing alike
    update_numel_s: float | None = None  # AdamW on all cores
    disk_bytes_s: float | None = None  # writing and reading alike
    link_bytes_s: float | None = None  # between host and device, there and back alike
    flops: float | None = None  # of a training step
    dates: Mapping[str, str] = field(default_factory=dict)

    def when(self) -> str:
        """A phrase: which figures are measured, and on which day; empty if none is."""
        days: dict[str, list[str]] = {}
        for name, words in FIGURES.items():
            if name in self.dates:
                days.setdefault(self.dates[name], []).append(words)
        said = [f"{_listed(words)} {'as measured ' * (not at)}on {day}" for at, (day, words) in enumerate(days.items())]
        return ", ".join(said)


def _listed(words: list[str]) -> str:
    return " and ".join([", ".join(words[:-1]), words[-1]] if words[1:] else words)


def recall(device: str) -> Measured:
    """What was measured on this host with this device. A file of another, or none, is nothing; so is a damaged one, which is
    told once."""
    nothing = Measured(_host(), device)
    try:
        found = _parse(_path().read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError, UsageError):  # there is none, or no place for one
        return nothing
    except (OSError, ValueError, RecursionError) as error:
        _LOG.warning("%s is not used: %s; remove it with: rm %s", _shown(), error, _shown())
        return nothing
    return found if (found.host, found.device) == (nothing.host, device) else nothing


def keep(found: Mapping[str, float], device: str, *, today: str = "") -> str:
    """Add figures to those of this host and device, in place of another's. Returns where they are."""
    known = asdict(recall(device))
    dates = known["dates"] | dict.fromkeys(found, today or date.today().isoformat())
    text = json.dumps(known | dict(found) | {"dates": dates}, indent=2) + "\n"
    _parse(text)  # what is written here must be what is read there
    path = _path()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as file:
            file.write(text.encode())
    except OSError as error:
        raise StorageError(
            f"cannot keep what was measured: {error.strerror or error}",
            where=_shown(),
            fix="set NAUGHT_CACHE to a folder that you may write to, or give --no-store",
        ) from error
    return _shown()


def show_figure(name: str, value: float) -> str:
    """With its unit."""
    if name == "flops":
        return f"{value / 1e12:.3g} TFLOP/s" if value >= 1e12 else f"{value / 1e9:.3g} GFLOP/s"
    return f"{show_count(value)} elements/s" if name == "update_numel_s" else f"{show_bytes(value)}/s"


def _host() -> str:
    return socket.gethostname()


def _path() -> Path:
    try:
        return cache_folder() / "machine.json"
    except RuntimeError as error:
        raise UsageError("this user has no home folder", fix="set NAUGHT_CACHE to a folder") from error


def _shown() -> str:
    """The path as a shell would take it, without the user's name: it may be pasted into a report."""
    for name, rest in (("NAUGHT_CACHE", ""), ("XDG_CACHE_HOME", "/naught")):
        if os.environ.get(name):
            return f'"${name}{rest}/machine.json"'
    return "~/.cache/naught/machine.json"


def _parse(text: str) -> Measured:
    """Raises ValueError for whatever a file of ours could not say."""
    raw = json.loads(text)
    if not isinstance(raw, dict) or not all(isinstance(raw.get(name), str) for name in ("host", "device")):
        raise ValueError("it names no host and device")
    dates = raw.get("dates")
    rates = {name: _rate(name, raw[name]) for name in FIGURES if raw.get(name) is not None}
    if not isinstance(dates, dict) or set(dates) != set(rates):
        raise ValueError("not every figure has its date")
    for name, day in dates.items():
        if not isinstance(day, str):
            raise ValueError(f"the date of {name} is none")
        date.fromisoformat(day)
    return Measured(raw["host"], raw["device"], dates=dates, **rates)


def _rate(name: str, raw: object) -> float:
    if isinstance(raw, bool) or not isinstance(raw, int | float) or not 0 < raw < _MOST:
        raise ValueError(f"{name} is no rate")
    return float(raw)
