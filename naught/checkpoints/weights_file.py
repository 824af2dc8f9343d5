"""Weights file: a safetensors file that somebody else may have written. It is believed only as far as it can be checked."""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import prod
from typing import Any

from naught.checkpoints.disk import Disk
from naught.checkpoints.shard import SIZES, Entry
from naught.errors import CheckpointDamaged, CheckpointError

__all__ = ["WeightsFile"]

_MOST_HEADER_BYTES = 100_000_000  # what the format allows
_FIX = "get the file anew"


class WeightsFile:
    """Tensors by name, and their bytes."""

    def __init__(self, disk: Disk, path: str) -> None:
        self.disk, self.path = disk, path
        self.nbytes = disk.size(path)
        self.entries = {entry.name: entry for entry in self._entries()}

    def read(self, start: int, stop: int, into: memoryview | None = None) -> memoryview:
        return self.disk.read(self.path, start, stop, into)

    def _entries(self) -> list[Entry]:
        """In the order of their bytes, which follow the header one behind the other to the end of the file."""
        if self.nbytes < 8:
            raise self._bad(f"has {self.nbytes} bytes, which is no safetensors file")
        length = int.from_bytes(self.read(0, 8), "little")
        if length > min(self.nbytes - 8, _MOST_HEADER_BYTES):
            raise self._bad(f"says that its header has {length} bytes, and the file has {self.nbytes}")
        try:
            header = json.loads(bytes(self.read(8, 8 + length)), object_pairs_hook=_without_doubles)
        except (ValueError, RecursionError) as error:
            raise self._bad(f"has a header that cannot be read: {error}") from error
        if not isinstance(header, Mapping):
            raise self._bad("has a header that is no JSON object")
        found = [self._entry(name, said, 8 + length) for name, said in header.items() if name != "__metadata__"]
        found.sort(key=lambda entry: (entry.start, entry.stop))
        end = 8 + length
        for entry in found:
            if entry.start != end:
                raise self._bad(f'has bytes before "{entry.name}" that belong to no tensor, or to two')
            end = entry.stop
        if end != self.nbytes:
            raise self._bad(f"has {self.nbytes} bytes, and its tensors end at {end}: it is cut off, or too long")
        return found

    def _entry(self, name: str, said: Any, begin: int) -> Entry:
        match said:
            case {"dtype": str(dtype), "shape": [*shape], "data_offsets": [start, stop]}:
                pass
            case _:
                raise self._bad(f'says of "{name[:80]}" not what it is')
        numbers = [*shape, start, stop]
        if not all(type(number) is int and 0 <= number < 2**62 for number in numbers):
            raise self._bad(f'says of "{name[:80]}" numbers that cannot be')
        if dtype not in SIZES:
            raise CheckpointError(
                f'"{name[:80]}" in {self.path} has the type {dtype[:20]}, which is not supported',
                fix=f"convert it to one of {', '.join(SIZES)}",
            )
        if stop - start != prod(shape) * SIZES[dtype]:
            raise self._bad(f'says that "{name[:80]}" of the shape {shape} has {stop - start} bytes')
        return Entry(name, dtype, tuple(shape), begin + start, begin + stop)

    def _bad(self, what: str) -> CheckpointDamaged:
        return CheckpointDamaged(f"{self.path} {what}", fix=_FIX)


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name stands twice")
    return found
