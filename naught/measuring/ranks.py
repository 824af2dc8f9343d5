"""Ranks: processes of this machine that run one module together. They end together too: one that fails ends the others."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import IO, NamedTuple

from naught.errors import UsageError
from naught.surroundings import surroundings

__all__ = ["ask_ranks"]

_NAP_S = 0.01
_ADDRESS = "127.0.0.1"


def ask_ranks(
    module: str, arguments: Sequence[str] = (), *, nproc: int, env: Mapping[str, str], patience_s: float = 120.0
) -> list[str]:
    """What each rank has printed. A rank that fails, or all of them if they take too long, is an error with its last words."""
    command = [sys.executable, "-P", "-m", module, *arguments]
    shared = _environment(nproc) | dict(env)
    with ExitStack() as stack:
        ranks: list[_Rank] = []
        stack.callback(_end, ranks)
        for number in range(nproc):
            out, errors = (stack.enter_context(tempfile.TemporaryFile()) for _ in range(2))
            seat = {"RANK": str(number), "LOCAL_RANK": str(number)}
            process = subprocess.Popen(command, env=shared | seat, stdin=subprocess.DEVNULL, stdout=out, stderr=errors)
            ranks.append(_Rank(number, process, out, errors))
        _wait(ranks, patience_s)
        return [_read(rank.out) for rank in ranks]


def _environment(nproc: int) -> dict[str, str]:
    """This process's, without the seat that a launcher may have given to it, and with one share of the cores for each."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("TORCHELASTIC_")}
    return surroundings(env, nproc) | {"WORLD_SIZE": str(nproc), "MASTER_ADDR": _ADDRESS, "MASTER_PORT": str(_free_port())}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((_ADDRESS, 0))
        return int(probe.getsockname()[1])


class _Rank(NamedTuple):
    number: int
    process: subprocess.Popen[bytes]
    out: IO[bytes]
    errors: IO[bytes]


def _end(ranks: Sequence[_Rank]) -> None:
    for rank in ranks:
        rank.process.kill()  # nothing, if it has ended
        rank.process.wait()


def _wait(ranks: Sequence[_Rank], patience_s: float) -> None:
    deadline = time.monotonic() + patience_s
    while True:
        states = [rank.process.poll() for rank in ranks]
        for rank, state in zip(ranks, states, strict=True):
            if state:
                raise UsageError(f"rank {rank.number} of {len(ranks)} ended with status {state}: {_last_words(rank)}")
        if all(state == 0 for state in states):
            return
        if time.monotonic() > deadline:
            late = next(rank for rank, state in zip(ranks, states, strict=True) if state is None)
            raise UsageError(
                f"rank {late.number} of {len(ranks)} has not ended within {patience_s:g} s: {_last_words(late)}",
                fix="look whether other programs keep the cores or the GPU busy",
            )
        time.sleep(_NAP_S)


def _last_words(rank: _Rank) -> str:
    lines = [line.strip() for line in _read(rank.errors).splitlines() if line.strip()]
    return lines[-1][:500] if lines else "it said nothing"


def _read(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")
