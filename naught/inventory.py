"""Inventory: what one rank has of a model's state, as runs of neighbouring elements, by parameter and kind."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from naught.answers import Answers
from naught.checkpoints import Piece
from naught.unit import Segment

__all__ = ["DTYPES_BY_NAME", "NAMES_BY_DTYPE", "WEIGHTS", "Stretch", "stretches"]

WEIGHTS = "weights"

DTYPES_BY_NAME = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
NAMES_BY_DTYPE = {dtype: name for name, dtype in DTYPES_BY_NAME.items()}


class Stretch(NamedTuple):
    """Neighbouring elements of one kind on this rank, and which parameters they are."""

    kind: str
    segment: Segment
    tensor: Tensor  # itself, not a copy
    pieces: tuple[Piece, ...]


def stretches(engine: Answers, *, share: bool, frozen: bool = True) -> Iterator[Stretch]:
    """What this rank has. Of what every rank has it is this rank's share, or all. Weights are the 32-bit masters where
    there are some: what modules compute with is those, rounded."""
    rank = engine.schedule.group.rank
    for unit in engine.schedule.units.values():
        for segment in unit.segments:
            if not (segment.trained or frozen):
                continue
            owned = segment.layout.shard(rank) if share else segment.states.owned
            begin = owned.start - segment.states.owned.start
            pieces = []
            for slot in segment.layout.slots:
                start, stop = max(slot.span.start, owned.start), min(slot.span.stop, owned.stop)
                if start < stop:
                    first = start - slot.span.start
                    pieces.append(Piece(param=slot.name, first=first, count=stop - start, at=start - owned.start))
            masters = segment.target if segment.states.masters is None else segment.states.masters
            for kind, tensor in {WEIGHTS: masters, **segment.states.moments}.items():
                yield Stretch(kind, segment, tensor[begin : begin + owned.numel], tuple(pieces))
