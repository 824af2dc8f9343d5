"""Report: a run folder, two of them, or the papers' statements on scaling, as one HTML file. Trains nothing, needs no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from naught.errors import UsageError
from naught.pictures import Statement
from naught.report.one_run import one_run
from naught.report.run_data import read_run
from naught.report.scaling_page import scaling_page
from naught.report.stages_data import read_stages
from naught.report.stages_page import stages_page
from naught.report.two_runs import two_runs
from naught.report.writing import write_page

__all__ = ["write_report", "write_scaling", "write_stages"]


def write_report(runs: Sequence[Path], out: Path) -> None:
    """Write the page of one run, or of two that are compared; the first is drawn first."""
    if not 1 <= len(runs) <= 2:
        raise UsageError(f"a report shows one run or two, not {len(runs)}")
    read = [read_run(folder) for folder in runs]
    if len({run.title for run in read}) < len(read):  # two folders of one name, which only their paths tell apart
        read = [replace(run, title=str(folder)) for run, folder in zip(read, runs, strict=True)]
    write_page(one_run(read[0]) if len(read) == 1 else two_runs(read[0], read[1]), out)


def write_stages(folder: Path, out: Path) -> None:
    """Write the page of a folder's stages.json."""
    write_page(stages_page(read_stages(folder)), out)


def write_scaling(statements: Sequence[Statement], out: Path) -> None:
    """Write the page of what the papers say of more and more devices."""
    write_page(scaling_page(statements), out)
