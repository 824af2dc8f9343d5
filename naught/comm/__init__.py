"""Comm: the only user of torch.distributed. A group of ranks, the wires between them, and a ledger of what was sent.

As scripts know it from DeepSpeed it is torch.distributed as well: a name that is not ours is looked for there.
"""

from __future__ import annotations

from typing import Any

from torch import distributed as _torchs

from naught.comm.among import Among
from naught.comm.dtensors import Whole, is_dtensor, local_of
from naught.comm.group import SAME_ORDER, Group, Mean, Waits
from naught.comm.imagined import World, imagine
from naught.comm.ledger import Ledger
from naught.comm.lineup import Lineup, Seat, lineup_of
from naught.comm.mail import Mail
from naught.comm.rehearsed import rehearse
from naught.comm.standing import get_rank, get_world_size, is_initialized, make_group, standing
from naught.comm.starting import get_local_rank, init_distributed, shares_device, shut_down
from naught.comm.summary import log_summary
from naught.comm.together import Together
from naught.comm.wires import Pending

__all__ = [
    "SAME_ORDER",
    "Among",
    "Group",
    "Ledger",
    "Lineup",
    "Mail",
    "Mean",
    "Pending",
    "Seat",
    "Together",
    "Waits",
    "Whole",
    "World",
    "get_local_rank",
    "get_rank",
    "get_world_size",
    "imagine",
    "init_distributed",
    "is_dtensor",
    "is_initialized",
    "lineup_of",
    "local_of",
    "log_summary",
    "make_group",
    "rehearse",
    "shares_device",
    "shut_down",
    "standing",
]


def __getattr__(name: str) -> Any:
    if name.startswith("_") or name not in dir(_torchs):
        raise AttributeError(f"module 'naught.comm' has no attribute {name!r}")
    return getattr(_torchs, name)
