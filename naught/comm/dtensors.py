"""DTensors: torch's tensors of which every rank of a mesh has a part."""

from __future__ import annotations

import sys
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor

from naught.comm.lineup import Lineup

__all__ = ["Whole", "is_dtensor", "local_of"]


def is_dtensor(value: object) -> bool:
    module = sys.modules.get("torch.distributed.tensor")  # else nobody can have made one, and it takes a second to load
    return module is not None and isinstance(value, module.DTensor)


def local_of(tensor: Tensor) -> Tensor:
    """What this rank has of it."""
    return cast(Any, tensor).to_local().detach() if is_dtensor(tensor) else tensor


class Whole(NamedTuple):
    """A DTensor without its part."""

    mesh: Any
    placements: tuple[Any, ...]
    shape: torch.Size
    stride: tuple[int, ...]

    @classmethod
    def around(cls, tensor: Any) -> Whole:
        return cls(tensor.device_mesh, tuple(tensor.placements), tensor.shape, tuple(tensor.stride()))

    def of(self, part: Tensor) -> Tensor:
        """With a part. Its backward brings the gradient to where the part is, also where every rank has a summand of it."""
        from torch.distributed.tensor import DTensor

        return DTensor.from_local(part, self.mesh, self.placements, run_check=False, shape=self.shape, stride=self.stride)

    @property
    def dim(self) -> int | None:
        """Along which it is cut; None: every rank has all of it."""
        return next((place.dim for place in self.placements if place.is_shard()), None)

    @property
    def plain(self) -> bool:
        """Whether it is cut in order, or not at all."""
        # is_shard() is also true of a strided one, whose parts are no neighbours.
        return all(place.is_replicate() or type(place).__name__ == "Shard" for place in self.placements)

    def lies_on(self, lineup: Lineup) -> bool:
        """Whether its parts are those of the ranks that have a model together."""
        ours = dist.get_process_group_ranks(lineup.model)
        return self.mesh.ndim == 1 and dist.get_process_group_ranks(self.mesh.get_group()) == ours
