"""Standing: what this process is among others: what torch.distributed says, or the rank as which it goes on just now. Whoever
needs a group of ranks asks here for it."""

from __future__ import annotations

from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from naught.comm.group import Group
from naught.comm.ledger import Ledger
from naught.running import running

__all__ = ["Standing", "get_rank", "get_world_size", "is_initialized", "make_group", "standing", "store_of_ranks"]


class Standing(Protocol):
    """A rank as which this process goes on: where it trains, and what it talks by."""

    rank: int
    ranks: int
    device: torch.device

    def group(self, ledger: Ledger, device: torch.device, **options: Any) -> Group: ...

    def store(self) -> Store: ...


def standing() -> Standing | None:
    """None: this process is itself."""
    return cast("Standing | None", running())  # whoever lets it go on as another is of this package


def make_group(ledger: Ledger, device: torch.device, **options: Any) -> Group:
    """The ranks that share a model."""
    here = standing()
    return Group(ledger, device, **options) if here is None else here.group(ledger, device, **options)


def store_of_ranks() -> Store:
    """Where ranks leave texts for each other."""
    here = standing()
    return dist.distributed_c10d._get_default_store() if here is None else here.store()


def is_initialized() -> bool:
    """Whether this process knows which rank it is."""
    return standing() is not None or dist.is_initialized()


def get_rank(group: dist.ProcessGroup | None = None) -> int:
    here = standing()
    return dist.get_rank(group) if here is None else here.rank


def get_world_size(group: dist.ProcessGroup | None = None) -> int:
    here = standing()
    return dist.get_world_size(group) if here is None else here.ranks
