"""Comm: bytes a second that one rank sends when ranks of this machine gather and reduce flats, as training does.

`comm_rates` starts the ranks; run as a module this file is one of them, under any launcher.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch

from naught import comm
from naught.accelerator import get_accelerator
from naught.comm import Group, Ledger, Pending
from naught.devices import mark
from naught.errors import UsageError
from naught.layout import ALIGN_NUMEL, pad
from naught.measuring.ranks import ask_ranks
from naught.measuring.rounds import present_device, usual_dtype

__all__ = ["CommRate", "Comms", "comm_rates"]

_FLAT_BYTES = (2**20, 2**23, 2**26)
_FEWEST, _MOST = 3, 200
_BUDGET_S = 2.5


class CommRate(NamedTuple):
    """One kind of collective on flats of one size: what one rank sends in a call, and how long the slowest takes."""

    collective: str
    flat_bytes: int
    sent_bytes: int
    seconds: float

    @property
    def bytes_s(self) -> float:
        return self.sent_bytes / self.seconds


class Comms(NamedTuple):
    """What was measured, between how many ranks and on which kind of device."""

    device: str
    ranks: int
    rates: tuple[CommRate, ...]

    @property
    def bytes_s(self) -> float:
        """For as much of either collective, in the largest flats."""
        largest = [rate for rate in self.rates if rate.flat_bytes == max(rate.flat_bytes for rate in self.rates)]
        return sum(rate.sent_bytes for rate in largest) / sum(rate.seconds for rate in largest)


def comm_rates(nproc: int = 2, *, budget_s: float = _BUDGET_S) -> Comms:
    """Between as many GPUs as there are ranks, or else between processes on the CPU."""
    if nproc < 2:
        raise UsageError("one rank has nobody to send to", fix="give --nproc 2 or more")
    accelerator = get_accelerator()
    enough = accelerator.device_name() != "cpu" and accelerator.device_count() >= nproc
    device = accelerator.device_name() if enough else "cpu"
    said = ask_ranks("naught.measuring.comm", [str(budget_s)], nproc=nproc, env={"DS_ACCELERATOR": device})[0]
    rows = json.loads(said.splitlines()[-1])
    return Comms(device, nproc, tuple(CommRate(*row) for row in rows))


def _as_rank(budget_s: float) -> None:
    """Measure together with the other ranks; the first one prints."""
    comm.init_distributed(verbose=False)
    device = present_device()
    dtype = usual_dtype(device)
    group = Group(Ledger(), device, reduce_numel=max(_FLAT_BYTES) // dtype.itemsize)
    rows: list[CommRate] = []
    for nbytes in _FLAT_BYTES:
        flat = torch.ones(pad(nbytes // dtype.itemsize, group.size, ALIGN_NUMEL), device=device, dtype=dtype)
        slices = flat.chunk(group.size)
        for name, collective in (("all-gather", group.gather), ("reduce-scatter", group.reduce)):
            seconds = _round_s(group, partial(collective, flat, slices, "measured"), device, budget_s / (2 * len(_FLAT_BYTES)))
            rows.append(CommRate(name, flat.nbytes, (group.size - 1) * slices[0].nbytes, seconds))
    if group.rank == 0:
        print(json.dumps(rows))
    comm.shut_down()


def _round_s(group: Group, call: Callable[[], Pending], device: torch.device, budget_s: float) -> float:
    """The mean of as many rounds as the slowest rank could do in time; ranks keep each other in step."""
    call().wait()
    group.meet()
    tried = time.perf_counter()
    once = mark(device)
    call().wait()
    once.until(mark(device))
    slowest = _slowest(group, time.perf_counter() - tried)
    rounds = min(max(_FEWEST, int(budget_s / slowest)), _MOST)
    start = mark(device)
    for _ in range(rounds):
        call().wait()
    return _slowest(group, start.until(mark(device))) / rounds


def _slowest(group: Group, seconds: float) -> float:
    return float(group.exchange(torch.tensor([seconds], dtype=torch.float64)).max())


if __name__ == "__main__":
    _as_rank(float(sys.argv[1]) if sys.argv[1:] else _BUDGET_S)
