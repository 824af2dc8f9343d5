"""`naught report`: a run, two runs compared, or a comparison of stages, as one HTML file."""

from __future__ import annotations

import argparse
from pathlib import Path

from naught.errors import UsageError
from naught.report import write_report, write_stages
from naught.run_folders import find_run

__all__ = ["run_report"]


def run_report(options: argparse.Namespace) -> int:
    run = find_run(options.run, Path(options.runs))
    other = find_run(options.other, Path(options.runs)) if options.other else None
    name = "report.html" if other is None else f"report-vs-{other.resolve().name}.html"
    out = Path(options.output) if options.output else run / name
    if other is not None and other.resolve() == run.resolve():
        raise UsageError(f'"{options.run}" and "{options.other}" are the same run', fix="name two runs, or one alone")
    if (run / "stages.json").is_file() and other is None:
        write_stages(run, out)
    else:
        write_report([run] if other is None else [run, other], out)
    print(f"wrote {out}")
    return 0
