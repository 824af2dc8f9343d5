"""Benching: takes the six runs one after the other, and puts what they found side by side."""

from __future__ import annotations

import json
import platform
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import naught
from naught.comm.agent import run_ranks
from naught.errors import NaughtError
from naught.model_names import parse_model
from naught.stages.runs import StageRun, why
from naught.stages.worker import Bench
from naught.trainer.failing import ERRORS, cause, left

__all__ = ["bench_stages"]


def bench_stages(bench: Bench, runs: Sequence[StageRun], device: str, say: Callable[[str], None]) -> dict[str, Any]:
    """Every run, and why it differs from the one that it is compared with."""
    found: dict[str, dict[str, Any]] = {}
    for run in runs:
        found[run.name] = about = {"name": run.name, "title": run.title, "available": True, "reason": None}
        say(f"{run.title} ...")
        try:
            taken = _take(run, bench)
            about |= taken | {"why": why(run, taken, _compared(run, found))}
        except NaughtError as error:  # one that fails, for want of memory, say, is a result too
            about |= {"available": False, "reason": str(error)}
    return _whole(bench, device) | {"runs": list(found.values())}


def _compared(run: StageRun, found: Mapping[str, dict[str, Any]]) -> dict[str, Any] | None:
    against = found.get(run.against)
    return against if against is not None and against["available"] else None


def _take(run: StageRun, bench: Bench) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="naught-") as folder:
        task, out = Path(folder, "task.json"), Path(folder, "found.json")
        asked = {"name": run.name, "config": dict(run.config), "out": str(out), "bench": bench._asdict()}
        task.write_text(json.dumps(asked), encoding="utf-8")
        ended = run_ranks(["-P", "-m", "naught.stages.worker", str(task)], nproc=bench.nproc, environment={ERRORS: folder})
        if ended.signal is not None:
            raise KeyboardInterrupt
        if ended.failed:
            raise NaughtError(cause(left(Path(folder)), ended.failed)[0].removeprefix("naught: ").partition("\n")[0])
        loaded: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
        return loaded


def _whole(bench: Bench, device: str) -> dict[str, Any]:
    counts = "bytes that the C allocator has handed out" if device == "cpu" else "bytes allocated by torch"
    return {
        "naught": naught.__version__,
        "torch": torch.__version__,
        "host": platform.node(),
        "device": device,
        "world": bench.nproc,
        "model": {"name": bench.model, "numel": parse_model(bench.model).numel},
        "batch": {"micro": bench.micro, "seq": bench.seq},
        "warmup": bench.warmup,
        "iterations": bench.iterations,
        "memory_steps": list(bench.memory_steps),
        "counts": counts,
    }
