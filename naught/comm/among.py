"""Among: a group of ranks of its own, beside the one over which states are split; a ledger counts what they send each other."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from naught.comm.ledger import Call, Ledger
from naught.comm.wires import all_gather_single

__all__ = ["Among"]


class Among:
    """Ranks of a process group; all of them, if none is given."""

    def __init__(self, ledger: Ledger, group: dist.ProcessGroup | None = None) -> None:
        self.ledger, self.group = ledger, group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)

    def gather(self, part: Tensor, unit: str) -> Tensor:
        """The parts of all ranks, one behind the other. Each must have as many elements."""
        return self._gather(part, self.ledger.add("all-gather", unit, (self.size - 1) * part.nbytes))

    def exchange(self, values: Tensor) -> Tensor:
        """Every rank's row of a few numbers."""
        return self._gather(values, self.ledger.begin("exchange")).view(self.size, *values.shape)

    def _gather(self, part: Tensor, call: Call) -> Tensor:
        whole = part.new_empty(part.numel() * self.size)
        with self.ledger.waiting(call, blocks=True):
            all_gather_single(whole, part, group=self.group)
        return whole
