"""`naught bench stages`: the six runs on this machine, as two tables, a page and data."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from naught.errors import UsageError
from naught.model_names import parse_model
from naught.quantity import show_bytes, show_seconds
from naught.stages.runs import DDP, PHASES, RUNS, StageRun
from naught.text import print_table

__all__ = ["run_stages"]

_CPU_MODEL = "gpt:layers=6,hidden=128,heads=4,vocab=1024,positions=128"
_GPU_MODEL = "gpt2-medium"


def run_stages(options: argparse.Namespace) -> int:
    runs = _chosen(options)
    from naught.report import write_stages
    from naught.stages.benching import bench_stages
    from naught.stages.worker import Bench
    from naught.trainer.introducing import device_title
    from naught.trainer.run_folder import make_folder

    device = device_title()
    options.model = options.model or (_CPU_MODEL if device == "cpu" else _GPU_MODEL)
    _refuse_nonsense(options)
    folder = make_folder(Path(options.runs), "stages")
    bench = Bench(
        model=options.model,
        micro=options.batch,
        seq=options.seq,
        nproc=options.nproc,
        warmup=options.warmup,
        iterations=options.iterations,
        memory_steps=tuple(options.memory_steps),
        deterministic=options.deterministic,
    )
    found = bench_stages(bench, runs, device, lambda text: print(text, file=sys.stderr, flush=True))
    (folder / "stages.json").write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    write_stages(folder, folder / "report.html")
    if options.json:
        print(json.dumps(found, indent=2))
    else:
        _print(found)
    print(f"report  {folder / 'report.html'}", file=sys.stderr)
    return 0 if any(run["available"] for run in found["runs"]) else 1


def _refuse_nonsense(options: argparse.Namespace) -> None:
    least = {"batch": 1, "seq": 2, "nproc": 1, "iterations": 1, "warmup": 0}
    for name, number in least.items():
        if getattr(options, name) < number:
            raise UsageError(f"--{name} is at least {number}, not {getattr(options, name)}")
    if min(options.memory_steps) < 0:
        raise UsageError("--memory-steps are steps: 0 and more")
    shape = parse_model(options.model).shape
    if shape is not None and 0 < shape.positions < options.seq:
        raise UsageError(
            f"{options.model} has {shape.positions} positions, and --seq is {options.seq}", fix="give a smaller --seq"
        )


def _chosen(options: argparse.Namespace) -> list[StageRun]:
    known = {run.name: run for run in RUNS}
    unknown = [name for name in options.only or () if name not in known]
    if unknown:
        raise UsageError(f'there is no run "{unknown[0]}"', where="--only", fix=f"the runs are {', '.join(known)}")
    chosen = [run for run in RUNS if not options.only or run.name in options.only]
    if options.config is None:
        return chosen
    if len(chosen) != 1 or chosen[0].name == DDP:
        raise UsageError("--config is of one run", fix="name it with --only zero2, say")
    from naught.config import load, to_document

    return [replace(chosen[0], config=to_document(load(Path(options.config))))]


def _print(found: Mapping[str, Any]) -> None:
    taken = [run for run in found["runs"] if run["available"]]
    print(
        f"{found['model']['name']} on {found['world']} ranks of {found['device']}, {found['batch']['micro']} x "
        f"{found['batch']['seq']} tokens each; memory is {found['counts']}\n"
    )
    if taken:
        print_table("memory of rank 0 after each phase", _memory_header(), _memory_rows(taken))
        print()
        title = f"time of {found['iterations']} iterations after {found['warmup']}"
        print_table(title, _TIME_HEADER, _time_rows(taken, found["iterations"]))
        print()
    for run in found["runs"]:
        print(f"{run['name']:<14}{run['why'] if run['available'] else run['reason']}")


def _memory_header() -> tuple[str, ...]:
    return ("run", "step", *(f"after {shown}" for shown in PHASES.values()), "peak")


def _memory_rows(taken: Sequence[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    return [
        (run["name"], str(row["step"]), *(show_bytes(row[phase]) for phase in PHASES), show_bytes(run["peak"]))
        for run in taken
        for row in run["memory"]
    ]


_TIME_HEADER = ("run", "seconds", "a step", "of the first", "sent a step", "weights", "gradients", "states")


def _time_rows(taken: Sequence[Mapping[str, Any]], iterations: int) -> list[tuple[str, ...]]:
    rows = []
    for run in taken:
        held = [show_bytes(run["held"][kind]) for kind in ("weights", "gradients", "states")]
        ratio = f"{run['seconds'] / taken[0]['seconds']:.2f}"
        step = show_seconds(run["seconds"] / iterations)
        rows.append((run["name"], f"{run['seconds']:.2f}", step, ratio, show_bytes(sum(run["sent"].values())), *held))
    return rows
