"""Importing: whole weights of a safetensors file, or of a folder of them, go straight into a rank's shards.

A rank reads no more than the bytes that it keeps.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from naught.answers import Answers
from naught.checkpoints import Disk, Located, WeightsFile
from naught.errors import CheckpointError
from naught.saves.inventory import DTYPES_BY_NAME, WEIGHTS, names_of, refuse_differences, shapes_of, stretches
from naught.saves.own_states import BUFFER, kept_buffers, put_own
from naught.saves.places import Places, unusable_on_error, weights_written
from naught.stored_part import StoredPart

__all__ = ["import_weights"]

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}\.safetensors")
_ONE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_MOST_INDEX_BYTES = 100_000_000


def import_weights(engine: Answers, disk: Disk, path: Path, *, strict: bool) -> None:
    """Take over the weights that are there. If anything is wrong on any rank, nothing has changed on any."""
    group = engine.schedule.group
    engine.refuse_away()
    engine.before_a_change()
    engine.passes.close()
    with group.together():
        reading = _Reading(engine, [WeightsFile(disk, str(file)) for file in _files(disk, path)], strict=strict)
    with unusable_on_error(engine):
        with group.together():
            reading.copy()
        weights_written(engine)


def _files(disk: Disk, path: Path) -> list[Path]:
    """A file, or those of a folder as Hugging Face writes them. Links are followed: its cache is made of them."""
    if not path.is_dir():
        if path.suffix in (".pt", ".pth", ".bin", ".ckpt"):
            raise CheckpointError(
                f"{path} is a pickle, which can run any code: it is never loaded", fix="convert it to safetensors"
            )
        return [Path(os.path.realpath(path))]
    index = path / _INDEX
    if not index.exists() and not (path / _ONE).exists():
        raise CheckpointError(
            f"{path} has neither {_ONE} nor {_INDEX}",
            fix="give a folder as Hugging Face or naught ckpt export writes it, or a safetensors file",
        )
    if not index.exists():
        return [(path / _ONE).resolve()]
    place = str(index.resolve())
    nbytes = disk.size(place)
    if nbytes > _MOST_INDEX_BYTES:
        raise CheckpointError(f"{index} has {nbytes} bytes: no index has", fix="get it anew")
    try:
        document = json.loads(bytes(disk.read(place, 0, nbytes)))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{index} is not JSON: {error}", fix="get it anew") from error
    names = document.get("weight_map") if isinstance(document, Mapping) else None
    if not isinstance(names, Mapping) or not all(isinstance(name, str) and _NAME.fullmatch(name) for name in names.values()):
        raise CheckpointError(f"{index} does not name plain safetensors files beside it", fix="get it anew")
    return [(path / name).resolve() for name in sorted(set(names.values()))]


class _Reading:
    """One rank's way through files of whole weights."""

    def __init__(self, engine: Answers, files: list[WeightsFile], *, strict: bool) -> None:
        self.engine, self.files = engine, files
        self.entries = {name: (at, entry) for at, file in enumerate(files) for name, entry in file.entries.items()}
        names = {name: self._name_in_files(also) for name, also in names_of(engine).items()}
        shapes = {names[name]: shape for name, shape in shapes_of(engine).items() if name in names}
        buffers = kept_buffers(engine)
        shapes |= {name: tuple(buffer.shape) for name, buffer in buffers.items()}
        other_names = {name for also in names_of(engine).values() for name in also}
        theirs = {name: entry.shape for name, (_, entry) in self.entries.items() if name in shapes or name not in other_names}
        refuse_differences(shapes, theirs, strict=strict)
        self.places = Places()
        for kind, _, tensor, pieces in stretches(engine, share=False):
            for piece in pieces if kind == WEIGHTS else ():
                for first, count, at in piece.lines():
                    self._add(names[piece.param], tensor[at : at + count], first)
        # Filled by themselves: a buffer may be a view that cannot be, piece by piece.
        self.buffers = {
            name: torch.empty(buffer.numel(), dtype=buffer.dtype) for name, buffer in buffers.items() if name in self.entries
        }
        for name, values in self.buffers.items():
            self._add(name, values, 0)

    def _name_in_files(self, names: Sequence[str]) -> str:
        """A tied parameter has several names, and the files may have it under any."""
        return next((name for name in names if name in self.entries), names[0])

    def _add(self, name: str, target: Tensor | StoredPart, first: int) -> None:
        if name not in self.entries:
            return
        at, entry = self.entries[name]
        if DTYPES_BY_NAME[entry.dtype].is_floating_point != target.is_floating_point():
            raise CheckpointError(f'"{name}" is {entry.dtype} there and {target.dtype} here', fix="load weights of this model")
        self.places.add(target, first, [Located(0, prod(entry.shape), at, entry.start, entry.dtype)])

    def copy(self) -> None:
        self.places.fill(self.files)
        put_own(self.engine, {f"{BUFFER}{name}": buffer for name, buffer in self.buffers.items()}, random_too=False)
