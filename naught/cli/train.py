"""`naught train`: from a command line to a run: of this process, if a launcher has started it as a rank, or of ranks that it
starts itself."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from naught.cli.launch import default_ranks
from naught.config.recipe import DEMO_MODEL
from naught.config.resolving import Override, Resolved, parse_override, resolve
from naught.errors import ConfigError, Problem, UsageError
from naught.run_folders import find_run
from naught.seats import find_seat

__all__ = ["run_train"]

_RESUMED = "NAUGHT_RESUMED"


def run_train(options: argparse.Namespace) -> int:
    if options.resume is not None and "=" in options.resume:  # --resume steps=50: the last run, and a change of it
        options.words, options.resume = [*options.words, options.resume], "last"
    resumed = _resumed(options)
    resolved = _resolved(options, resumed)
    if options.print_config:
        print(json.dumps(resolved.recipe.model_dump(mode="json", exclude={"auto"}), indent=2))
        return 0
    from naught.trainer.checking import check_before_start

    check_before_start(resolved.recipe)
    seat = find_seat(os.environ)
    if seat is not None:
        if options.nproc is not None and seat.world != options.nproc:
            raise UsageError(f"a launcher has started {seat.world} ranks, and --nproc says {options.nproc}", fix="leave it out")
        return _as_rank(options, resolved, resumed)
    before = None if resumed is None else _ranks_of(resumed)
    nproc = default_ranks(before) if options.nproc is None else options.nproc
    if nproc < 1:
        raise UsageError(f"--nproc is at least 1, not {nproc}")
    if before not in (None, nproc):
        print(f"naught: the run had {before} rank{'s' * (before != 1)}, and goes on with {nproc}", file=sys.stderr)
    if nproc == 1:
        return _as_rank(options, resolved, resumed)
    return _by_agent(options, nproc, resumed)


def _resumed(options: argparse.Namespace) -> Path | None:
    """The run to go on with, as whoever has started the ranks found it."""
    if options.resume is None:
        return None
    if _RESUMED in os.environ:
        return Path(os.environ[_RESUMED])
    return find_run(options.resume, Path(options.runs), marks=["run.json"])


def _ranks_of(run: Path) -> int | None:
    """How many a run had when it was started last; None: it did not come so far."""
    world = json.loads((run / "run.json").read_text(encoding="utf-8")).get("world")
    return world if isinstance(world, int) else None


def _resolved(options: argparse.Namespace, resumed: Path | None) -> Resolved:
    """The recipe: a file's, or that of the run to go on with, changed by the command line."""
    words = list(options.words)
    file = Path(words.pop(0)) if words and "=" not in words[0] else None
    if file is not None and resumed is not None:
        raise UsageError("a run that goes on has its configuration already", fix=f"leave {file} out, or start a run of its own")
    source: Path | dict[str, Any] | None = file
    if resumed is not None:
        source = json.loads((resumed / "config.json").read_text(encoding="utf-8"))["given"]
    elif file is not None and not file.exists():
        what = Problem("", "there is no such file", fix="give a JSON or YAML file, or key=value to change the demo")
        raise ConfigError(str(file), [what])
    return resolve(source, [*map(parse_override, words), *_short_forms(options)])


def _short_forms(options: argparse.Namespace) -> Iterator[Override]:
    if options.stage is not None:
        yield Override("zero_optimization.stage", options.stage, "--stage")
    if options.dtype is not None:
        for name in ("fp16", "bf16"):
            yield Override(f"{name}.enabled", name == options.dtype, "--dtype")
    if options.offload:
        yield Override("zero_optimization.offload_optimizer.device", "cpu", "--offload")
        if options.stage == 3 or (options.stage is None and not any("=" not in word for word in options.words)):
            yield Override("zero_optimization.offload_param.device", "cpu", "--offload")
    for name, key in (("placement", "placement"), ("gpu", "gpu_memory"), ("host", "host_memory")):
        if getattr(options, name) is not None:
            yield Override(f"naught.{key}", getattr(options, name), f"--{name}")
    if options.keep is not None:
        yield Override("naught.keep_last", options.keep, "--keep")
    if options.name is not None:
        yield Override("train.name", options.name, "--name")


def _as_rank(options: argparse.Namespace, resolved: Resolved, resumed: Path | None) -> int:
    from naught.trainer.rank import STOPPED, Asked, run_rank

    train, model = resolved.recipe.train, resolved.recipe.model
    asked = Asked(
        resolved=resolved,
        runs=Path(options.runs),
        name=train.name or _run_name(model.name),
        resumed=resumed,
        command=shlex.join(["naught", *options.arguments]),
        quiet=options.quiet,
        as_json=options.log_json,
        traceback=options.traceback,
    )
    status = run_rank(asked)
    if find_seat(os.environ) is not None and status not in (0, STOPPED):
        # Others may have died: what this process would still do at its end might wait for them.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    return status


def _run_name(model: str) -> str:
    """What a run is called if nobody has said: by its model, or by the folder or file that it comes from."""
    if model == DEMO_MODEL:
        return "demo"
    path = Path(model)
    return path.resolve().name.removesuffix(".json") if path.exists() else model.partition(":")[0]


def _by_agent(options: argparse.Namespace, nproc: int, resumed: Path | None) -> int:
    from naught.comm.agent import run_ranks
    from naught.trainer.failing import ERRORS, cause, left, mark_failed, was_saved
    from naught.trainer.rank import STOPPED

    with tempfile.TemporaryDirectory(prefix="naught-") as folder:
        # Not from the present folder, which may hold a queue.py; and the run to go on with is the one that was meant here.
        arguments = ["-P", "-m", "naught", *options.arguments]
        environment = {ERRORS: folder} | ({} if resumed is None else {_RESUMED: str(resumed.resolve())})
        ended = run_ranks(arguments, nproc=nproc, max_restarts=options.max_restarts, environment=environment)
        if not ended.failed and ended.signal is None:
            return 0
        failures = left(Path(folder))
        if not failures and was_saved(Path(folder)):
            return STOPPED
        if ended.signal is not None and not failures:
            name = signal.Signals(ended.signal).name
            text, status = f"naught: stopped by {name} before anything could be saved", 128 + ended.signal
        else:
            text, status = cause(failures, ended.failed)
        print(text, file=sys.stderr)
        mark_failed(Path(folder), text)
        return status
