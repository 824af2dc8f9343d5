"""Among: a group of ranks of its own, beside the one over which states are split; a ledger counts what they send each other."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from naught.comm.ledger import Ledger

__all__ = ["Among"]


class Among:
    """Ranks of a process group; all of them, if none is given."""

    def __init__(self, ledger: Ledger, group: dist.ProcessGroup | None = None) -> None:
        self.ledger, self.group = ledger, group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)

    def gather(self, part: Tensor, unit: str) -> Tensor:
        """The parts of all ranks, one behind the other. Each must have as many elements."""
        whole = part.new_empty(part.numel() * self.size)
        with self.ledger.waiting(self.ledger.add("all-gather", unit, (self.size - 1) * part.nbytes), blocks=True):
            dist.all_gather_into_tensor(whole, part, group=self.group)
        return whole
