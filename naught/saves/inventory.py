"""Inventory: what one rank has of a model's state, as runs of neighbouring elements, by parameter and kind."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from naught.answers import Answers
from naught.checkpoints import Piece
from naught.errors import CheckpointError
from naught.layout import Slot
from naught.segment import WEIGHTS, Segment
from naught.stored_part import StoredPart
from naught.wholes import wholes_of
from naught.within import Within

__all__ = [
    "DTYPES_BY_NAME",
    "NAMES_BY_DTYPE",
    "WEIGHTS",
    "Stretch",
    "names_of",
    "refuse_differences",
    "shapes_of",
    "stretches",
    "whole_of",
    "wholes_in",
]

_SHOWN = 4

DTYPES_BY_NAME = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
    "BOOL": torch.bool,
}
NAMES_BY_DTYPE = {dtype: name for name, dtype in DTYPES_BY_NAME.items()}


class Stretch(NamedTuple):
    """Neighbouring elements of one kind on this rank, and which parameters they are."""

    kind: str
    segment: Segment
    tensor: Tensor | StoredPart  # itself, not a copy
    pieces: tuple[Piece, ...]

    @property
    def private(self) -> bool:
        """Whether no user can reach it: it is neither what modules compute with, nor a part of that."""
        return self.kind != WEIGHTS or self.segment.states.master is not None or self.segment.weights.split


def stretches(engine: Answers, *, share: bool, frozen: bool = True) -> Iterator[Stretch]:
    """What this rank has. Of what every rank has it is this rank's share, or all. Weights are the 32-bit masters where
    there are some: what modules compute with is those, rounded."""
    part, withins = engine.schedule.group.part, wholes_in(engine)
    for unit in engine.schedule.units.values():
        for segment in unit.segments:
            if not (segment.trained or frozen) or (share and not segment.counts):
                continue
            owned = segment.layout.shard(part) if share else segment.states.owned
            begin = owned.start - segment.states.owned.start
            pieces = []
            for slot in segment.layout.slots:
                start, stop = max(slot.span.start, owned.start), min(slot.span.stop, owned.stop)
                within, at = whole_of(slot, withins), start - owned.start
                for strip in within.strips(start - slot.span.start, stop - slot.span.start):
                    first, numel, row, stride = strip
                    pieces.append(Piece(param=within.name, first=first, count=numel, at=at, row=row, stride=stride))
                    at += numel
            for kind, tensor in segment.sources().items():
                yield Stretch(kind, segment, tensor[begin : begin + owned.numel], tuple(pieces))


def wholes_in(engine: Answers) -> dict[str, Within]:
    """What parameters of an engine are in a checkpoint, where that is not what they are in the model."""
    return wholes_of(engine.module, engine.schedule.group.lineup)


def names_of(engine: Answers) -> dict[str, list[str]]:
    """All names of each parameter, by the first: a tied one has several."""
    found: dict[nn.Parameter, list[str]] = {}
    for name, param in engine.module.named_parameters(remove_duplicate=False):
        found.setdefault(param, []).append(name)
    withins = wholes_in(engine)
    lists = [[withins[name].name if name in withins else name for name in names] for names in found.values()]
    return {names[0]: names for names in lists}


def whole_of(slot: Slot, withins: Mapping[str, Within]) -> Within:
    """What a checkpoint calls it: a piece of a layer is a part of what the layer's parameter was."""
    return withins.get(slot.name) or Within(slot.name, 0, slot.shape)


def shapes_of(engine: Answers) -> dict[str, tuple[int, ...]]:
    """Of the parameters, whole."""
    segments = (segment for unit in engine.schedule.units.values() for segment in unit.segments)
    withins = wholes_in(engine)
    wholes = (whole_of(slot, withins) for segment in segments for slot in segment.layout.slots)
    return {whole.name: whole.shape for whole in wholes}


def refuse_differences(ours: Mapping[str, tuple[int, ...]], theirs: Mapping[str, tuple[int, ...]], *, strict: bool) -> None:
    """Weights of another model are not loaded. Unless strict, only what both have must be alike."""
    differing = [
        f'"{name}": {list(theirs[name])} there, {list(ours[name])} here'
        for name in ours
        if name in theirs and theirs[name] != ours[name]
    ]
    missing = [f'"{name}"' for name in ours if name not in theirs] if strict else []
    more = [f'"{name}"' for name in theirs if name not in ours] if strict else []
    parts = [
        f"{len(found)} {'tensors' if len(found) > 1 else 'tensor'} {what} "
        f"({', '.join(found[:_SHOWN])}{' ...' if len(found) > _SHOWN else ''})"
        for found, what in ((missing, "missing in it"), (more, "not in the model"), (differing, "of another shape"))
        if found
    ]
    if parts:
        raise CheckpointError(
            f"what is to be loaded is of another model: {'; '.join(parts)}. Nothing was loaded",
            fix="build the model as it was; load_module_strict=False (strict=False) takes what both have",
        )
