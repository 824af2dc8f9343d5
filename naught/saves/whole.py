"""Whole: an engine's weights, whole, in host memory, gathered a unit at a time. For other programs, not for resuming."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from naught.answers import Answers
from naught.checkpoints import Disk, header_of, write_shard
from naught.saves.inventory import NAMES_BY_DTYPE, wholes_in
from naught.saves.own_states import kept_buffers
from naught.saves.snapshot import Kept, bytes_of
from naught.within import Within

__all__ = ["save_weights", "whole_state"]

_LOG = logging.getLogger("naught")


def whole_state(engine: Answers, *, frozen: bool = True, tied: bool = True, here: bool = True) -> dict[str, Tensor]:
    """The state dict of the module, as copies, in the order of the module. All ranks must call; those that do not want it
    here take part and get nothing."""
    engine.refuse_away()
    engine.schedule.group.look_for_faults(midway=engine.schedule.is_midway)
    engine.schedule.gather_anew()
    copies: dict[nn.Parameter, Tensor] = {}
    withins, lineup = wholes_in(engine), engine.schedule.group.lineup
    cut = {param: withins[name] for name, param in engine.module.named_parameters() if lineup and name in withins}
    for unit in engine.schedule.units.values():
        params = [param for segment in unit.segments for param in segment.weights.params if segment.trained or frozen]
        if params:
            with engine.passes.lending(params, keeps=False):
                for param in params:  # one at a time: a whole one is there beside what is lent
                    whole = lineup.join(param.detach(), cut[param].shape) if lineup and param in cut else param.detach()
                    if here:
                        copies[param] = whole.to("cpu", copy=True)
    state = {name: copies[param] for name, param in engine.module.named_parameters(remove_duplicate=not tied) if param in copies}
    state = _joined(state, withins)
    buffers = kept_buffers(engine) if here else {}
    return state | {name: buffer.detach().to("cpu", copy=True) for name, buffer in buffers.items()}


def _joined(state: dict[str, Tensor], withins: Mapping[str, Within]) -> dict[str, Tensor]:
    """Pieces of layers, as the layers that they were."""
    parts: dict[str, list[Tensor]] = {}
    for name, tensor in state.items():
        parts.setdefault(withins[name].name if name in withins else name, []).append(tensor)
    return {name: pieces[0] if len(pieces) == 1 else torch.cat(pieces) for name, pieces in parts.items()}


def save_weights(engine: Answers, disk: Disk, folder: str, filename: str, *, frozen: bool) -> str:
    """Write whole weights, in the precision that modules compute with, to one safetensors file. Rank 0 writes."""
    name = Path(filename).name
    if not name.endswith(".safetensors"):
        name = f"{Path(name).stem}.safetensors"
        _LOG.info("weights are written as %s: %s would be a pickle", name, filename)
    group = engine.schedule.group
    state = whole_state(engine, frozen=frozen, tied=False, here=group.rank == 0)
    with group.together():
        if group.rank == 0:
            _write(disk, folder, name, {name: tensor.contiguous() for name, tensor in state.items()})
    return f"{folder}/{name}"


def _write(disk: Disk, folder: str, name: str, state: dict[str, Tensor]) -> None:
    """A file of this name is replaced at once, when the new one is on the disk."""
    named = [(key, NAMES_BY_DTYPE[tensor.dtype], tuple(tensor.shape)) for key, tensor in state.items()]
    header, entries = header_of(named, {"format": "pt"})
    passing = f".tmp-{name}-{secrets.token_hex(8)}"
    disk.ensure_folder(folder)
    try:
        data = bytes_of([Kept(tensor.reshape(-1), private=False) for tensor in state.values()])
        write_shard(disk, f"{folder}/{passing}", header, data, entries[-1].stop if entries else len(header))
        disk.rename(f"{folder}/{passing}", f"{folder}/{name}")
    except BaseException:
        if passing in disk.names(folder):
            disk.remove(f"{folder}/{passing}")
        raise
    disk.sync_folder(folder)
