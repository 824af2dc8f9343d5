"""Inputs: ranks that have a model together are to be given the same. A sampler that goes by all ranks gives each its own batch,
and nothing else would tell."""

from __future__ import annotations

import hashlib
import logging
import math
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from naught.comm import Group, is_dtensor

__all__ = ["Inputs"]

_LOG = logging.getLogger("naught")


class Inputs:
    """Looks at those of the first step that trains, and of every step that is twice as far as the last that it has looked at."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self.next_step: float = math.inf if group.lineup is None else 0

    def look(self, given: Any, step: int) -> None:
        """Say so, once, if they differ where they should not. All ranks must call."""
        if step < self.next_step or not torch.is_grad_enabled():
            return
        rows = self.group.exchange(torch.tensor([self.group.part, _digest(given)]))
        differ = len({tuple(row) for row in rows.tolist()}) > self.group.parts
        self.next_step = math.inf if differ else 2 * step
        if differ and self.group.rank == 0:
            _LOG.warning(
                "ranks that have a model together were given different inputs in step %d. Unless the model expects that, give "
                'them the same batches: a sampler by the mesh\'s other dimension has num_replicas=mesh["dp"].size() and '
                'rank=mesh["dp"].get_local_rank()',
                step,
            )


def _digest(given: Any) -> int:
    """Of the plain tensors among them. Of a DTensor each rank may well have another part."""
    sha = hashlib.sha256()
    for leaf in tree_leaves(given):
        if isinstance(leaf, Tensor) and not is_dtensor(leaf) and _is_plain(leaf):
            held = leaf.detach().cpu().resolve_conj().resolve_neg().contiguous()
            sha.update(held.view(-1).view(torch.uint8).numpy().tobytes())
    return int.from_bytes(sha.digest()[:8], "little", signed=True)


def _is_plain(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_nested and not tensor.is_meta and tensor.numel() > 0
