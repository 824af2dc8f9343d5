"""Run folders: which of the folders `NNNN-name` a user means. Reads no run and makes none."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from naught.errors import UsageError

__all__ = ["find_run"]

_NAME = re.compile(r"([0-9]+)-(.+)", re.DOTALL)
_MARKS = ("run.json", "stages.json")  # either of them makes a folder a run
_LISTED = 10


def find_run(text: str, runs: Path, marks: Sequence[str] = _MARKS) -> Path:
    """The folder of a run: by its path, its number, its name (the newest of that name), or as `last`. What has none of the
    marks is no run."""
    if text and _is_run(Path(text), marks):
        return Path(text)
    if os.sep in text:
        raise UsageError(f'"{text}" is no run: {_why_not(Path(text))}', fix="give the folder of a run, its number or its name")
    there = _all(runs, marks)
    found = [run for run in there if _means(text, run)] if text != "last" else there
    if not found:
        raise UsageError(f'there is no run "{text}"', where=str(runs), fix=_choices(there, runs))
    return found[-1].folder


class _Found(NamedTuple):
    number: int
    name: str
    folder: Path


def _is_run(folder: Path, marks: Sequence[str]) -> bool:
    return any((folder / mark).is_file() for mark in marks)


def _why_not(folder: Path) -> str:
    return "it has no run.json" if folder.is_dir() else "it is not a folder" if folder.exists() else "there is no such folder"


def _all(runs: Path, marks: Sequence[str]) -> list[_Found]:
    """Every run of a folder, the newest last."""
    if not runs.is_dir():
        return []
    matches = ((folder, _NAME.fullmatch(folder.name)) for folder in runs.iterdir() if _is_run(folder, marks))
    return sorted(_Found(int(match[1]), match[2], folder) for folder, match in matches if match)


def _means(text: str, run: _Found) -> bool:
    return run.number == int(text) if text.isascii() and text.isdigit() else text in (run.name, run.folder.name)


def _choices(there: list[_Found], runs: Path) -> str:
    if not there:
        return f"give the path of a run, or say where runs are with --runs DIR; {runs} has none"
    newest = ", ".join(run.folder.name for run in there[: -_LISTED - 1 : -1])
    more = f" and {len(there) - _LISTED} older" if len(there) > _LISTED else ""
    return f"the newest are {newest}{more}" if len(there) > 1 else f"there is only {newest}"
