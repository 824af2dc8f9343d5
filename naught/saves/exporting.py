"""Exporting: the weights of a checkpoint as Hugging Face writes them. Needs memory for a few blocks, and no ranks."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator, Sequence
from math import prod
from typing import NamedTuple

import torch

from naught.checkpoints import SIZES, Disk, header_of, write_shard
from naught.errors import CheckpointError, StorageError
from naught.saves.contents import Contents
from naught.saves.inventory import DTYPES_BY_NAME, WEIGHTS

__all__ = ["export"]

_INDEX = "model.safetensors.index.json"


class _Out(NamedTuple):
    """A tensor that is to be written, under one of its names."""

    name: str
    param: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * SIZES[self.dtype]


def export(contents: Contents, disk: Disk, folder: str, *, dtype: str | None, most_bytes: int) -> list[str]:
    """Write `model.safetensors`, or numbered files of at most so many bytes and their index, into a folder. Parameters are
    written in a type, or as they were saved; tied ones under each of their names. Returns the names of the files."""
    groups = _groups(_wanted(contents, dtype), most_bytes)
    names = [_name(at, len(groups)) for at in range(len(groups))]
    disk.ensure_folder(folder)
    there = set(disk.names(folder)) & {*names, _INDEX}
    if there:
        raise CheckpointError(f"{folder} has {sorted(there)[0]} already, and nothing is overwritten", fix="export elsewhere")
    texts = [_index(groups, names)] if len(groups) > 1 else []
    needed = sum(out.nbytes for group in groups for out in group)
    free = disk.free_bytes(folder)
    if free < needed:
        raise StorageError(f"{needed} bytes are to be written to {folder}, and {free} are free", fix="make room")
    everything = [*names, *(_INDEX for _ in texts)]  # the index is last: without it there is nothing
    passing = {name: f".tmp-{name}-{secrets.token_hex(8)}" for name in everything}
    try:
        for name, group in zip(names, groups, strict=True):
            _write(contents, disk, f"{folder}/{passing[name]}", group)
        for text in texts:
            write_shard(disk, f"{folder}/{passing[_INDEX]}", text, (), len(text))
        for name in everything:
            disk.rename(f"{folder}/{passing[name]}", f"{folder}/{name}")
        disk.sync_folder(folder)
    except BaseException:
        for left in set(passing.values()) & set(disk.names(folder)):
            disk.remove(f"{folder}/{left}")
        raise
    return everything


def _wanted(contents: Contents, dtype: str | None) -> list[_Out]:
    found: list[_Out] = []
    kinds = contents.kinds()
    buffers = contents.buffers()
    for name, param in contents.params.items():
        saved = kinds.get((name, WEIGHTS), "F32")  # of no element at all there is no type
        casts = dtype is not None and name not in buffers and DTYPES_BY_NAME[saved].is_floating_point
        found += [_Out(other, name, param.shape, str(dtype) if casts else saved) for other in (name, *param.also)]
    return found


def _groups(wanted: Sequence[_Out], most_bytes: int) -> list[list[_Out]]:
    groups: list[list[_Out]] = [[]]
    room = most_bytes
    for out in wanted:
        if out.nbytes > room and groups[-1]:
            groups.append([])
            room = most_bytes
        groups[-1].append(out)
        room -= out.nbytes
    return groups


def _name(at: int, count: int) -> str:
    return "model.safetensors" if count == 1 else f"model-{at + 1:05d}-of-{count:05d}.safetensors"


def _index(groups: Sequence[Sequence[_Out]], names: Sequence[str]) -> bytes:
    total = sum(out.nbytes for group in groups for out in group)
    places = {out.name: name for group, name in zip(groups, names, strict=True) for out in group}
    return json.dumps({"metadata": {"total_size": total}, "weight_map": places}, indent=2).encode()


def _write(contents: Contents, disk: Disk, path: str, group: Sequence[_Out]) -> None:
    header, entries = header_of([(out.name, out.dtype, out.shape) for out in group], {"format": "pt"})
    nbytes = entries[-1].stop if entries else len(header)
    write_shard(disk, path, header, (part for out in group for part in _bytes(contents, out)), nbytes)


def _bytes(contents: Contents, out: _Out) -> Iterator[memoryview]:
    for block in contents.read(out.param):
        cast = block.to(DTYPES_BY_NAME[out.dtype])
        yield memoryview(cast.view(torch.uint8).numpy())  # type: ignore[arg-type]
