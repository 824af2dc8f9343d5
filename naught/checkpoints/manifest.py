"""Manifest: what a checkpoint says of itself, as JSON: which bytes of which file are which elements of which parameter.

Everything that is read is checked before it is believed: a text that nobody of us wrote can only be refused.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    ValidationError,
    model_serializer,
    model_validator,
)

from naught.checkpoints.shard import CHUNK_BYTES, SIZES
from naught.errors import CheckpointDamaged, CheckpointError

__all__ = ["FORMAT", "Line", "Manifest", "Param", "Piece", "Run", "Sealed", "Table", "parse", "seal", "text_of"]

FORMAT = 1

_Size = Annotated[int, Field(ge=0, lt=2**62)]
_Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
_SaveId = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
_Name = Annotated[str, Field(min_length=1, max_length=4096)]


def _known_type(name: str) -> str:
    if name not in SIZES:
        raise ValueError(f'there is no type "{name[:20]}"')
    return name


class _Record(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")


class Piece(_Record):
    """Elements of a parameter, from one of its elements on, at a place in a run. They follow one another in the parameter, too;
    or there they lie in rows of so many, each a stride behind the last: a part of a matrix is one piece, whatever its rows."""

    param: _Name
    first: _Size
    count: Annotated[int, Field(gt=0, lt=2**62)]
    at: _Size
    row: _Size = 0  # 0: all in one
    stride: _Size = 0

    @model_serializer(mode="wrap")
    def _without_defaults(self, as_usual: SerializerFunctionWrapHandler) -> dict[str, Any]:
        found: dict[str, Any] = as_usual(self)
        return found if self.row else {name: value for name, value in found.items() if name not in ("row", "stride")}

    @model_validator(mode="after")
    def _rows_lie_apart(self) -> Piece:
        if self.row and (self.count % self.row or self.stride < self.row):
            raise ValueError(
                f'{self.count} elements of "{self.param}" are not rows of {self.row}, each {self.stride} behind the last'
            )
        return self

    @property
    def stop(self) -> int:
        """Behind the last of them in the parameter."""
        return self.first + self.count if not self.row else self.first + (self.count // self.row - 1) * self.stride + self.row

    def lines(self) -> Iterator[Line]:
        """Neighbours in the parameter as well."""
        each = self.row or self.count
        for number in range(self.count // each):
            yield Line(self.first + number * self.stride, each, self.at + number * each)


class Line(NamedTuple):
    """From an element of a parameter on, so many, at a place in a run."""

    first: int
    numel: int
    at: int


class Run(_Record):
    """Neighbouring elements of one kind in a shard file, as they lay in memory: zeros may lie between the pieces."""

    kind: _Name
    dtype: Annotated[str, AfterValidator(_known_type)]
    start: _Size
    count: _Size
    pieces: tuple[Piece, ...]

    @property
    def stop(self) -> int:
        return self.start + self.count * SIZES[self.dtype]

    @model_validator(mode="after")
    def _pieces_lie_inside(self) -> Run:
        end = 0
        for piece in self.pieces:
            if piece.at < end or piece.at + piece.count > self.count:
                raise ValueError(f'a piece of "{piece.param}" reaches into another, or beyond its run')
            end = piece.at + piece.count
        return self


class Table(_Record):
    """What one rank has written."""

    format: Literal[1]
    save: _SaveId
    rank: _Size
    nbytes: _Size
    checksums: tuple[Annotated[int, Field(ge=0, lt=2**32)], ...]
    runs: tuple[Run, ...]
    numbers: dict[_Name, dict[_Name, tuple[_Name, float]]] = {}  # what an optimizer keeps of whole parameters

    @model_validator(mode="after")
    def _runs_lie_inside(self) -> Table:
        if len(self.checksums) != -(-self.nbytes // CHUNK_BYTES):
            raise ValueError(f"{self.nbytes} bytes have not {len(self.checksums)} chunks")
        end = 0
        for run in self.runs:
            if run.start < end or run.stop > self.nbytes:
                raise ValueError(f'the run of "{run.kind}" from byte {run.start} overlaps another or reaches beyond the file')
            end = run.stop
        return self


class Param(_Record):
    """A parameter as the model had it. The kinds of it that were saved each have a type of their own in the runs."""

    shape: Annotated[tuple[_Size, ...], Field(max_length=64)]
    trained: bool
    updates: _Size = 0
    also: tuple[_Name, ...] = ()  # other names of the same parameter

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


class Sealed(_Record):
    """A file that must be as it was."""

    nbytes: _Size
    sha256: _Digest


class Manifest(_Record):
    """A whole checkpoint: its tables, its parameters, and what the engine remembers beside them."""

    format: Literal[1]
    save: _SaveId
    step: _Size
    tables: tuple[Sealed, ...]
    params: dict[_Name, Param]
    engine: dict[str, Any]

    @property
    def world(self) -> int:
        return len(self.tables)


class _Version(BaseModel):
    model_config = ConfigDict(strict=True)
    format: int


Kind = TypeVar("Kind", Table, Manifest)


def text_of(record: Table | Manifest) -> bytes:
    """Always the same bytes for the same record, with their own digest in the last line."""
    body = json.dumps(record.model_dump(mode="json"), sort_keys=True, separators=(",", ":"), allow_nan=False).encode()
    return body + b"\n" + hashlib.sha256(body).hexdigest().encode() + b"\n"


def seal(text: bytes) -> Sealed:
    return Sealed(nbytes=len(text), sha256=hashlib.sha256(text).hexdigest())


def parse(kind: type[Kind], text: bytes, path: str) -> Kind:
    """A record from its text, or an error that names the file."""
    body, _, digest = text.removesuffix(b"\n").rpartition(b"\n")
    if hashlib.sha256(body).hexdigest().encode() != digest:
        raise CheckpointDamaged(f"{path} does not have the digest that it says", fix="load another checkpoint")
    try:
        version = _Version.model_validate_json(body).format
        if version > FORMAT:
            raise CheckpointError(f"{path} is of format {version}, and this release reads {FORMAT}", fix="use a newer release")
        return kind.model_validate_json(body)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise CheckpointDamaged(f"{path} cannot be meant: {place}: {first['msg']}", fix="load another checkpoint") from error
