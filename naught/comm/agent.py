"""Agent: starts the ranks of one machine by torchrun's elastic agent, which watches them, and starts them again if it may.

The agent and its ranks meet in a file of this user's alone, and listen on the loopback: nothing is open to the network.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from naught.surroundings import surroundings

__all__ = ["Ended", "RankExit", "run_ranks"]

_PATIENCE_S = "600"  # that ranks have to save when they are told to stop


class RankExit(NamedTuple):
    """A rank that failed: its status (below 0: the signal that killed it), and when the agent saw it."""

    rank: int
    status: int
    time_s: float


class Ended(NamedTuple):
    """How the ranks ended: those that failed, first those that did so by themselves; and the signal that told all of them
    to stop, if one did."""

    failed: tuple[RankExit, ...] = ()
    signal: int | None = None

    @property
    def first(self) -> tuple[RankExit, ...]:
        """Those that failed first: several, where nobody can tell. A rank that loses another may be heard of at the same time."""
        return tuple(found for found in self.failed if _how_late(found) == _how_late(self.failed[0]))


def run_ranks(
    arguments: Sequence[str], *, nproc: int, max_restarts: int = 0, environment: Mapping[str, str] | None = None
) -> Ended:
    """Run `python ARGUMENTS` as so many ranks, and wait for them. If one fails all are stopped, and started anew while they
    may be."""
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)  # they would tell of each rank, at length
    variables = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": _PATIENCE_S, **surroundings(os.environ, nproc)}
    variables |= {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", **(environment or {})}
    with tempfile.TemporaryDirectory(prefix="naught-") as folder, _environment(variables):
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=nproc,
            run_id=Path(folder).name,
            rdzv_backend="c10d",
            rdzv_endpoint=f"{folder}/meet",
            rdzv_configs={"store_type": "file"},
            local_addr="127.0.0.1",
            max_restarts=max_restarts,
            monitor_interval=0.1,
            logs_specs=DefaultLogsSpecs(log_dir=folder),
        )
        # Slurm can send it before a job's time is up, and the agent does not know it.
        before = signal.signal(signal.SIGUSR1, lambda *_: os.kill(os.getpid(), signal.SIGTERM))
        try:
            elastic_launch(config, sys.executable)(*arguments)
        except ChildFailedError as error:
            exits = [RankExit(rank, failure.exitcode, failure.timestamp) for rank, failure in error.failures.items()]
            return Ended(tuple(sorted(exits, key=lambda found: (_how_late(found), found.rank))))
        except SignalException as stop:
            return Ended(signal=int(stop.sigval))
        finally:
            signal.signal(signal.SIGUSR1, before)
    return Ended()


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """While open these are the variables, which ranks inherit."""
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _how_late(found: RankExit) -> tuple[object, ...]:
    """Those that the agent stopped come last; those that were killed first. A traceback, which has status 1, is often of a rank
    that lost another, and its time is that of the traceback, where a status of one's own has the time at which it was noticed."""
    return found.status == -signal.SIGTERM, found.status >= 0, found.status == 1, found.time_s
