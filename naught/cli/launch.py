"""`naught launch`: a user's script as several ranks of this machine."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from naught.errors import UsageError
from naught.seats import find_seat

if TYPE_CHECKING:
    from naught.comm.agent import RankExit

__all__ = ["default_ranks", "run_launch"]

_CPU_RANKS = 2
_BY_SIGNAL = 128  # what shells add to the number of a signal


def run_launch(options: argparse.Namespace) -> int:
    if find_seat(os.environ) is not None:
        raise UsageError("a launcher has started this process as a rank already", fix="start the script itself")
    if not options.module and not Path(options.script).is_file():
        raise UsageError(f'there is no script "{options.script}"', fix="give a Python file, or -m and the name of a module")
    nproc = default_ranks() if options.nproc is None else options.nproc
    if nproc < 1:
        raise UsageError(f"--nproc is at least 1, not {nproc}")
    from naught.comm.agent import run_ranks

    ended = run_ranks(
        [*(["-m"] if options.module else []), options.script, *options.script_arguments],
        nproc=nproc,
        max_restarts=options.max_restarts,
    )
    if ended.signal is not None:
        return _BY_SIGNAL + ended.signal
    if not ended.failed:
        return 0
    print(f"naught: {_blame(ended.first)}", file=sys.stderr)
    status = ended.first[0].status
    return _BY_SIGNAL - status if status < 0 else status


def _blame(first: Sequence[RankExit]) -> str:
    """Who has ended all, and how."""
    status = first[0].status
    if len(first) > 1:
        *most, last = (str(found.rank) for found in first)
        return f"ranks {', '.join(most)} and {last} failed, and which of them did first is told by their tracebacks"
    how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
    return f"rank {first[0].rank} {how}, and the others were stopped"


def default_ranks(before: int | None = None) -> int:
    """One for each GPU; without any, enough to have something to split. As many as there were before, if there can be."""
    from naught.accelerator import get_accelerator

    accelerator = get_accelerator()
    if accelerator.device_name() == "cpu":
        return before or _CPU_RANKS
    found = int(accelerator.device_count())
    return min(before or found, found)
