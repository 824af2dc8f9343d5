"""Comparing: where two checkpoints differ, element by element, in memory of a few blocks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from naught.saves.contents import Contents

__all__ = ["Difference", "compare"]

_BLOCK_NUMEL = 1 << 22
_WIDE = torch.complex128
_WHOLE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Difference(NamedTuple):
    """Of one kind of one parameter: what differs, in words, and how much of it by how much at most."""

    name: str
    kind: str
    what: str
    differing: int = 0
    largest: float = 0.0


def compare(one: Contents, other: Contents) -> Iterator[Difference]:
    """What the first has and the second has not, or otherwise; and which elements are not the same bits."""
    kinds, theirs = one.kinds(), other.kinds()
    ours, others = one.params, other.params
    for name, kind in sorted(kinds.keys() | theirs.keys()):
        if (name, kind) not in theirs or (name, kind) not in kinds:
            yield Difference(name, kind, f"only in {(one if (name, kind) in kinds else other).saved.tag}")
        elif ours[name].shape != others[name].shape:
            yield Difference(name, kind, f"shape {list(ours[name].shape)} and {list(others[name].shape)}")
        else:
            found = _elements(one, other, name, kind)
            types = (kinds[name, kind], theirs[name, kind])
            if types[0] != types[1] or found.differing:
                what = f"{types[0]} and {types[1]}" if types[0] != types[1] else f"of {ours[name].numel} elements"
                yield found._replace(what=what)


def _elements(one: Contents, other: Contents, name: str, kind: str) -> Difference:
    numel, differing, largest = one.params[name].numel, 0, 0.0
    for first in range(0, numel, _BLOCK_NUMEL):
        stop = min(first + _BLOCK_NUMEL, numel)
        ours, theirs = (_block(contents, name, kind, first, stop) for contents in (one, other))
        unlike = _bits(ours) != _bits(theirs) if ours.dtype == theirs.dtype else ours.double() != theirs.double()
        if bool(unlike.any()):
            apart = (ours[unlike].to(_WIDE) - theirs[unlike].to(_WIDE)).abs()
            differing += int(unlike.sum())
            largest = max(largest, float(apart.nan_to_num(torch.inf).max()))
    return Difference(name, kind, "", differing, largest)


def _bits(values: Tensor) -> Tensor:
    """Whole numbers, of which two are the same if all their bits are."""
    return values.view(_WHOLE[values.element_size()])


def _block(contents: Contents, name: str, kind: str, first: int, stop: int) -> Tensor:
    return torch.cat([part.clone() for part in contents.read(name, kind, first, stop)])
