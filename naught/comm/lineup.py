"""Lineup: which ranks have the same part of a model, and which have a model together, each a part of it.

It comes from torch's own DeviceMesh of two dimensions, or from an object with the functions of Megatron's `mpu`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from naught.errors import UsageError

__all__ = ["Lineup", "Seat", "lineup_of"]

# What the dimensions of a mesh are called over which data is split, and over which a model is. Of a mesh without names the first
# is for data. Others are for something else: taking them for one of these would train wrongly and say nothing.
_DATA_NAMES = ("dp", "data", "data_parallel", "dp_shard", "fsdp")
_MODEL_NAMES = ("tp", "mp", "model", "tensor", "model_parallel", "tensor_parallel")


class Seat(NamedTuple):
    """A rank, by the part of states that it has, and by its place among those that have a model together."""

    part: int = 0
    model_rank: int = 0


class Lineup(NamedTuple):
    """This rank among those with the same part of a model, over whom states are split, and among those that have a model with
    it."""

    data: dist.ProcessGroup
    model: dist.ProcessGroup
    parts: int  # of states
    part: int  # this rank's
    model_rank: int
    model_size: int

    def join(self, part: Tensor, shape: Sequence[int]) -> Tensor:
        """A whole of this shape, of which each rank that has the model with this one has an equal part. All must call."""
        dim = next(at for at, extent in enumerate(shape) if part.shape[at] != extent)
        parts = [torch.empty_like(part, memory_format=torch.contiguous_format) for _ in range(self.model_size)]
        dist.all_gather(parts, part.contiguous(), group=self.model)
        return torch.cat(parts, dim)


def lineup_of(mesh: Any, mpu: Any) -> Lineup | None:
    """None: every rank has the whole model."""
    if mesh is not None and mpu is not None:
        raise UsageError("both mesh and mpu say which ranks have a model together", fix="give one of them")
    if mpu is not None:
        return _of_mpu(mpu)
    return None if mesh is None else _of_mesh(mesh)


def _of_mesh(mesh: Any) -> Lineup | None:
    if not isinstance(mesh, DeviceMesh):
        raise UsageError(
            f"the mesh is a {type(mesh).__name__}",
            fix='give init_device_mesh("cuda", (data, model), mesh_dim_names=("dp", "tp"))',
        )
    if mesh.size() != dist.get_world_size():
        raise UsageError(
            f"the mesh has {mesh.size()} ranks, and there are {dist.get_world_size()}", fix="give the mesh of all ranks"
        )
    if mesh.ndim == 1 and (mesh.mesh_dim_names or _DATA_NAMES)[0] in _DATA_NAMES:
        return None
    names = mesh.mesh_dim_names or ()
    data = next((at for at, name in enumerate(names) if name in _DATA_NAMES), None) if names else 0
    if mesh.ndim != 2 or data is None or (names and names[1 - data] not in _MODEL_NAMES):
        raise UsageError(
            f"the mesh has the dimensions {_shown(names, mesh.ndim)}, and must have one for data and one for tensor parallelism",
            fix='name them ("dp", "tp")',
        )
    groups: Sequence[dist.ProcessGroup] = mesh.get_all_groups()
    return _lineup(groups[data], groups[1 - data])


def _shown(names: Sequence[str], count: int) -> str:
    return ", ".join(f'"{name}"' for name in names) if names else f"({count} without names)"


def _of_mpu(mpu: Any) -> Lineup | None:
    """Megatron's functions have had two names for the ranks that have a model together."""
    alone = getattr(mpu, "get_model_parallel_world_size", None)
    if alone is not None and alone() == 1:
        return None
    model = getattr(mpu, "get_model_parallel_group", None) or getattr(mpu, "get_tensor_model_parallel_group", None)
    data = getattr(mpu, "get_data_parallel_group", None)
    if model is None or data is None:
        raise UsageError(
            f"mpu ({type(mpu).__name__}) does not say which ranks have a model together",
            fix="give an object with get_model_parallel_group() and get_data_parallel_group()",
        )
    return _lineup(data(), model())


def _lineup(data: dist.ProcessGroup, model: dist.ProcessGroup) -> Lineup:
    ours, theirs = dist.get_process_group_ranks(data), dist.get_process_group_ranks(model)
    if set(ours) & set(theirs) != {dist.get_rank()}:
        raise UsageError(
            f"ranks {ours} share data and {theirs} a model: they must have this rank in common, and no other",
            fix="give the groups of a mesh of two dimensions",
        )
    parts, size = dist.get_world_size(data), dist.get_world_size(model)
    if parts * size != dist.get_world_size():
        raise UsageError(
            f"{parts} data-parallel times {size} model-parallel ranks are not the {dist.get_world_size()} that there are",
            fix="use no pipeline, context or expert parallelism beside",
        )
    return Lineup(data, model, parts, dist.get_rank(data), dist.get_rank(model), size)
