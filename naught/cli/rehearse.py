"""`naught simulate --real`: all ranks of a small run in this process, with contents."""

from __future__ import annotations

import argparse
import json
from statistics import fmean
from typing import TYPE_CHECKING, Any

from naught.errors import UsageError
from naught.quantity import show_bytes, show_count
from naught.shapes import Transformer
from naught.text import print_table

if TYPE_CHECKING:
    from naught.trainer.rehearsing import Rehearsal

__all__ = ["run_rehearsal"]

_RANKS, _MOST_RANKS, _STEPS, _SEQ = 2, 64, 3, 128
# Of a machine that is not there, or of one rank alone.
_SIMULATED = ("rank", "backend", "per_node", "gpu", "host", "disk", "tflops", "link", "network", "disk_speed", "timeline")


def run_rehearsal(options: argparse.Namespace, shape: Transformer, config: dict[str, Any]) -> int:
    ranks, steps = _numbers(options)
    from naught.trainer.rehearsing import rehearse_gpt
    from naught.trainer.simulating import Batch

    batch = Batch(int(config["train_micro_batch_size_per_gpu"]), options.seq or _SEQ, not options.keep_activations)
    found = rehearse_gpt(shape, config, ranks, batch, steps)
    if options.json:
        print(json.dumps([one._asdict() for one in found], indent=2))
        return 0
    _show(found, steps)
    return 0


def _numbers(options: argparse.Namespace) -> tuple[int, int]:
    given = [f"--{name.replace('_', '-')}" for name in _SIMULATED if getattr(options, name) is not None]
    if given:
        raise UsageError(f"{', '.join(given)} and --real cannot be meant together", fix="leave one of them out")
    ranks = _RANKS if options.ranks is None else options.ranks
    steps = _STEPS if options.steps is None else options.steps
    if not 1 <= ranks <= _MOST_RANKS or steps < 1:
        raise UsageError(
            f"{ranks} ranks in this process for {steps} steps cannot be",
            fix=f"give 1 to {_MOST_RANKS} ranks and at least one step; without --real there can be many more ranks",
        )
    return ranks, steps


def _show(found: list[Rehearsal], steps: int) -> None:
    first = found[0]
    print(f"{show_count(first.numel)} parameters; {len(found)} ranks in this process\n")
    each = len(first.losses) // steps
    rows = []
    for step in range(steps):
        losses = [fmean(one.losses[step * each : (step + 1) * each]) for one in found]
        rows.append((str(step + 1), f"{first.norms[step]:.6g}", f"{fmean(losses):.6f}", *(f"{loss:.6f}" for loss in losses[:8])))
    names = [f"rank {rank}" for rank in range(min(len(found), 8))]
    print_table("loss of each step", ("step", "norm", "mean", *names), rows)
    for title, name, sizes in (("sent by rank 0", "collective", first.sent), ("moved by rank 0", "where", first.moved)):
        shown = [(key, show_bytes(nbytes)) for key, nbytes in sizes.items() if nbytes]
        if shown:
            print_table(title, (name, "bytes"), shown)
    print(f"weights {first.weights}")
