"""Wholes: what a checkpoint calls the parameters of a model some of whose layers are in pieces, or of which a rank has parts."""

from __future__ import annotations

from torch import nn

from naught.comm import Lineup
from naught.dividing import pieces_within
from naught.local_parts import parts_within
from naught.within import Within

__all__ = ["wholes_of"]


def wholes_of(model: nn.Module, lineup: Lineup | None) -> dict[str, Within]:
    """Where parameters lie in those that a checkpoint has, by their names; the others are there as they are."""
    return pieces_within(model) | parts_within(model, lineup)
