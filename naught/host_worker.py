"""Host worker: a thread that updates what rests on the host, with the cores that this rank has, beside everything else."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

__all__ = ["HostWorker", "cores_of"]

_SPARE_FROM = 4  # cores from which on one is left to the thread that asks the device


def cores_of(place: int, ranks: int) -> list[int]:
    """The cores of one of the ranks of this host: as many for each, and none for two."""
    cores = sorted(os.sched_getaffinity(0))
    share = max(1, len(cores) // ranks)
    first = place * share % len(cores)
    return cores[first : first + share]


class HostWorker:
    """Does one thing after the other, on its cores; None: on any, as where training itself needs them."""

    def __init__(self, cores: list[int] | None) -> None:
        self.cores = cores
        self.room = torch.empty(0)
        self.pool = ThreadPoolExecutor(1, "naught-update", initializer=self._begin)

    def _begin(self) -> None:
        """The threads that torch starts for this one are bound as it is."""
        if self.cores is None:
            return
        os.sched_setaffinity(0, self.cores)
        torch.set_num_threads(max(1, len(self.cores) - (len(self.cores) >= _SPARE_FROM)))

    def scratch(self, numel: int) -> Tensor:
        """Memory for what this thread does, until it wants it again."""
        if self.room.numel() < numel:
            self.room = torch.empty(numel)
        return self.room[:numel]

    def ask(self, work: Callable[[], None]) -> Future[None]:
        return self.pool.submit(work)

    def stop(self) -> None:
        """Once all is done that was asked."""
        self.pool.shutdown()
