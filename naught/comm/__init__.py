"""Comm: the only user of torch.distributed. A group of ranks, the wires between them, and a ledger of what was sent."""

from naught.comm.group import SAME_ORDER, Group
from naught.comm.ledger import Ledger
from naught.comm.wires import Pending

__all__ = ["SAME_ORDER", "Group", "Ledger", "Pending"]
