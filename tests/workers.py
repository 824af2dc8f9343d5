"""Living workers: processes that stay between tests, meet in a file store, and report the first rank that failed.

A rank that says nothing for too long is asked for its stacks, and the whole world is replaced.
"""

from __future__ import annotations

import atexit
import faulthandler
import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from functools import cache
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

PATIENCE_S = 90.0


class WorkerError(AssertionError):
    """A rank failed; the text is its traceback."""


class World:
    """N ranks that run functions together. `run` returns what each rank returned."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.folder: tempfile.TemporaryDirectory[str] | None = None
        self.processes: list[Any] = []
        self.pipes: list[Connection] = []
        self.known: dict[str, list[Any]] = {}

    def reference(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """What `run` returns, of a function that depends on nothing but its arguments: many tests compare with the same run."""
        key = repr((function.__module__, function.__qualname__, args, sorted(kwargs.items())))
        if key not in self.known:
            self.known[key] = self.run(function, *args, **kwargs)
        return self.known[key]

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        if not self.processes:
            self._start()
        for pipe in self.pipes:
            pipe.send((function, args, kwargs))
        answers = self._answers()
        failed = {rank: text for rank, (fine, text) in answers.items() if not fine}
        if failed or len(answers) < self.size:
            silent = [rank for rank in range(self.size) if rank not in answers]
            stacks = self._stacks(silent)
            self.stop()
            first = next(iter(failed.items()), None)
            story = f"rank {first[0]} failed:\n{first[1]}" if first else "no rank failed, but some said nothing"
            raise WorkerError(story + "".join(f"\nrank {rank} said nothing; its stacks:\n{stacks[rank]}" for rank in silent))
        return [answers[rank][1] for rank in range(self.size)]

    def _start(self) -> None:
        self.folder = tempfile.TemporaryDirectory()
        context = _nest()
        for rank in range(self.size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_work, args=(rank, self.size, self.folder.name, theirs), daemon=True)
            process.start()
            theirs.close()
            self.processes.append(process)
            self.pipes.append(ours)

    def _answers(self) -> dict[int, tuple[bool, Any]]:
        """In the order in which ranks answer. Once one has failed, the others have a short while left."""
        answers: dict[int, tuple[bool, Any]] = {}
        deadline = time.monotonic() + PATIENCE_S
        while len(answers) < self.size:
            open_pipes = [pipe for rank, pipe in enumerate(self.pipes) if rank not in answers]
            for pipe in wait(open_pipes, max(0.0, deadline - time.monotonic())):
                rank = self.pipes.index(pipe)  # type: ignore[arg-type]
                try:
                    answers[rank] = pipe.recv()  # type: ignore[union-attr]
                except EOFError:
                    answers[rank] = (False, f"the process died with exit code {self.processes[rank].exitcode}")
                if not answers[rank][0]:
                    deadline = min(deadline, time.monotonic() + 5)
            if time.monotonic() >= deadline:
                break
        return answers

    def _stacks(self, ranks: list[int]) -> dict[int, str]:
        assert self.folder is not None
        for rank in ranks:
            os.kill(self.processes[rank].pid, signal.SIGUSR1)
        time.sleep(0.3 if ranks else 0)
        return {rank: Path(self.folder.name, f"stacks{rank}").read_text(encoding="utf-8") for rank in ranks}

    def stop(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()
        for pipe in self.pipes:
            pipe.close()
        if self.folder is not None:
            self.folder.cleanup()
        self.processes, self.pipes, self.folder = [], [], None


def _nest() -> Any:
    """A process that has imported what ranks need, and forks them. Python's own would look for it without our folders."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["nest"])
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)
    try:
        forkserver.ensure_running()
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before
    return context


def _work(rank: int, size: int, folder: str, pipe: Connection) -> None:
    stacks = Path(folder, f"stacks{rank}").open("w", encoding="utf-8")  # noqa: SIM115 - open as long as the process
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    os.sched_setaffinity(0, cores_of_rank(rank, size))
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    if os.environ.get("NAUGHT_DEVICE", "cpu") != "cpu":
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # else sums of a GPU depend on its mood
        torch.use_deterministic_algorithms(True)
    if size > 1:
        store = dist.FileStore(str(Path(folder, "store")), size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=60))
    while True:
        try:
            function, args, kwargs = pipe.recv()
        except EOFError:
            sys.exit(0)
        try:
            pipe.send((True, function(*args, **kwargs)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))


def cores_of_rank(rank: int, size: int) -> set[int]:
    """A share of the cores, or one of them where there are fewer than ranks: a rank's threads wake each other all the time,
    and to wake a thread on another core takes several times as long."""
    cores = sorted(os.sched_getaffinity(0))
    return set(cores[rank::size]) or {cores[rank % len(cores)]}


def run_script(script: str, *arguments: str, patience_s: float = 100, **variables: str) -> list[tuple[int, str, str]]:
    """Two processes that meet as a launcher would have them, each with its status, output and errors."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    env = _environment() | {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), **variables}
    with tempfile.TemporaryDirectory() as folder:
        told = [(Path(folder, f"said{rank}"), Path(folder, f"errors{rank}")) for rank in range(2)]
        asked = []
        for rank, (said, errors) in enumerate(told):
            said.touch()
            errors.touch()
            files = {"said": str(said), "errors": str(errors)}
            asked.append(
                {"script": script, "arguments": arguments, "env": env | {"RANK": str(rank), "LOCAL_RANK": str(rank)}, **files}
            )
        codes = _ask_nest(json.dumps(asked), patience_s)
        return [(code, *(path.read_text(encoding="utf-8") for path in paths)) for code, paths in zip(codes, told, strict=True)]


def _environment() -> dict[str, str]:
    here = Path(__file__).parent
    env = {name: value for name, value in os.environ.items() if not name.endswith("_SOCKET_IFNAME")}
    env |= {"PYTHONPATH": f"{here}:{here.parent}:{os.environ.get('PYTHONPATH', '')}", "OMP_NUM_THREADS": "1"}
    return env | {"DS_ACCELERATOR": "cpu"}


def _ask_nest(question: str, patience_s: float) -> list[int]:
    nest = _process()
    assert nest.stdin is not None
    assert nest.stdout is not None
    nest.stdin.write(f"{question}\n")
    nest.stdin.flush()
    answered = False
    try:
        answered = bool(wait([nest.stdout], patience_s))
    finally:
        if not answered:  # nor may its answer be taken for that to a later question
            _process.cache_clear()
            os.killpg(nest.pid, signal.SIGKILL)
            nest.wait()
    if not answered:
        raise WorkerError(f"a script was not over after {patience_s} s")
    codes: list[int] = json.loads(nest.stdout.readline())
    return codes


@cache
def _process() -> subprocess.Popen[str]:
    """One for a session."""
    command = [sys.executable, str(Path(__file__).parent / "nest.py")]
    env = _environment() | {"NAUGHT_DEVICE": "cpu"}
    nest = subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True)
    atexit.register(nest.communicate)
    return nest
