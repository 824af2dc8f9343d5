"""Exporting: an engine's weights, whole, in host memory, gathered a unit at a time. For other programs, not for resuming."""

from __future__ import annotations

import logging
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor, nn

from naught.answers import Answers
from naught.errors import StorageError
from naught.saves.own_states import kept_buffers

__all__ = ["save_weights", "whole_state"]

_LOG = logging.getLogger("naught")


def whole_state(engine: Answers, *, frozen: bool = True, tied: bool = True) -> dict[str, Tensor]:
    """The state dict of the module on every rank, as copies, in the order of the module. All ranks must call."""
    engine.refuse_away()
    copies: dict[nn.Parameter, Tensor] = {}
    for unit in engine.schedule.units.values():
        params = [param for segment in unit.segments for param in segment.weights.params if segment.trained or frozen]
        if params:
            with engine.passes.lending(params):
                copies |= {param: param.detach().to("cpu", copy=True) for param in params}
    state = {name: copies[param] for name, param in engine.module.named_parameters(remove_duplicate=not tied) if param in copies}
    return state | {name: buffer.detach().to("cpu", copy=True) for name, buffer in kept_buffers(engine).items()}


def save_weights(engine: Answers, folder: str, filename: str, *, frozen: bool) -> str:
    """Write whole weights, in the precision that modules compute with, to one safetensors file. Rank 0 writes."""
    path = Path(folder) / filename
    if path.suffix != ".safetensors":
        path = path.with_suffix(".safetensors")
        _LOG.info("weights are written as %s: %s would be a pickle", path.name, filename)
    state = whole_state(engine, frozen=frozen, tied=False)
    with engine.schedule.group.together():
        if engine.schedule.group.rank == 0:
            passing = path.with_name(f".tmp-{path.name}")
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                save_file({name: tensor.contiguous() for name, tensor in state.items()}, passing, {"format": "pt"})
                passing.rename(path)
            except OSError as error:
                raise StorageError(f"cannot write {path}: {error.strerror or error}", fix="look at the folder") from error
    return str(path)
