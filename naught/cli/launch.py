"""`naught launch`: a user's script as several ranks of this machine."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from pathlib import Path

from naught.errors import UsageError
from naught.seats import find_seat

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
    first = ended.failed[0]
    how = f"was killed by {signal.Signals(-first.status).name}" if first.status < 0 else f"ended with status {first.status}"
    print(f"naught: rank {first.rank} {how}, and the others were stopped", file=sys.stderr)
    return _BY_SIGNAL - first.status if first.status < 0 else first.status


def default_ranks() -> int:
    """One for each GPU; without any, enough to have something to split."""
    from naught.accelerator import get_accelerator

    accelerator = get_accelerator()
    return _CPU_RANKS if accelerator.device_name() == "cpu" else int(accelerator.device_count())
