"""Tokens: files of text become files of token numbers, once, which every rank maps into memory. Texts are
read in pieces that end with a line."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from naught.errors import UsageError
from naught.extras import package
from naught.trainer.texts import Text
from naught.whole_files import replacing

__all__ = ["BYTES", "Encoder", "Part", "Tokens", "describe", "encoder_of", "map_tokens", "write_tokens"]

BYTES = "bytes"
Tokens = NDArray[Any]  # 1-D, of some unsigned type
Ids = Sequence[int] | NDArray[np.uint8]
_PIECE_BYTES = 1 << 24


class Part(NamedTuple):
    """A file, or a range of one."""

    text: Text
    start: int
    stop: int


@dataclass(frozen=True)
class Encoder:
    """Text into token numbers below `vocab`. Encoders of one name give the same numbers."""

    name: str
    vocab: int
    encode: Callable[[bytes], Ids]
    end: Ids = ()  # what follows each file

    @property
    def dtype(self) -> np.dtype[Any]:
        return np.min_scalar_type(self.vocab - 1)


def encoder_of(tokenizer: str) -> Encoder:
    """Bytes as they are, or a Hugging Face tokenizer from a file or folder of this machine."""
    if tokenizer == BYTES:
        return Encoder(BYTES, 256, lambda raw: np.frombuffer(raw, dtype=np.uint8))
    path = Path(tokenizer).expanduser()
    path = path / "tokenizer.json" if path.is_dir() else path
    if not path.is_file():
        raise UsageError(
            f'there is no tokenizer "{tokenizer}"', where="data.tokenizer", fix='give "bytes", or a tokenizer.json or its folder'
        )
    tokenizers = package("tokenizers", where="data.tokenizer", fix="leave data.tokenizer out for bytes")
    try:
        loaded = tokenizers.Tokenizer.from_str(path.read_text(encoding="utf-8"))
    except Exception as error:  # the package raises plain Exception
        raise UsageError(f'"{path}" is no tokenizer: {error}', where="data.tokenizer") from error
    ends = [loaded.token_to_id(name) for name in _ENDS if loaded.token_to_id(name) is not None]

    def encode(raw: bytes) -> Ids:
        ids: list[int] = loaded.encode(raw.decode("utf-8", errors="replace"), add_special_tokens=False).ids
        return ids

    return Encoder(hashlib.sha256(path.read_bytes()).hexdigest(), loaded.get_vocab_size(), encode, ends[:1])


_ENDS = ("<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>", "[SEP]")


def write_tokens(parts: Sequence[Part], encoder: Encoder, folder: Path, name: str) -> None:
    """Encode files one after the other into `folder/name.npy`: there whole, or not at all."""
    numel = 0
    with replacing(folder / f"{name}.npy") as file:
        _write_header(file, encoder, 0)  # has room for any length
        for part in parts:
            for piece in _pieces(part):
                numel += _write(file, encoder, encoder.encode(piece))
            numel += _write(file, encoder, encoder.end)
        file.seek(0)
        _write_header(file, encoder, numel)


def _write_header(file: IO[bytes], encoder: Encoder, numel: int) -> None:
    header = {"descr": encoder.dtype.str, "fortran_order": False, "shape": (numel,)}
    np.lib.format.write_array_header_1_0(file, header)


def _write(file: IO[bytes], encoder: Encoder, ids: Ids) -> int:
    row = np.asarray(ids, dtype=encoder.dtype)
    file.write(row.tobytes())
    return row.size


def _pieces(part: Part) -> Iterator[bytes]:
    """A file in pieces that end at the end of a line, where there is one; files are parted by a line's end."""
    left = part.stop - part.start
    with part.text.path.open("rb") as file:
        file.seek(part.start)
        while left > 0:
            piece = file.read(min(_PIECE_BYTES, left))
            if not piece:
                return  # the file has become shorter since it was looked at
            if len(piece) < left:
                piece += file.readline(left - len(piece))
            left -= len(piece)
            yield piece if left > 0 or piece.endswith(b"\n") else piece + b"\n"


def map_tokens(path: Path, *, where: str = "data.path") -> Tokens:
    """A file of token numbers, mapped: only what is used is read. Pickled objects are refused."""
    try:
        mapped: Tokens = np.lib.format.open_memmap(path, mode="r")
    except (OSError, ValueError) as error:
        raise UsageError(f'"{path}" cannot be read as token numbers: {error}', where=where) from error
    if mapped.ndim != 1 or mapped.dtype.kind not in "ui":
        raise UsageError(f'"{path}" holds {mapped.dtype} of shape {list(mapped.shape)}, not a row of whole numbers', where=where)
    return mapped


def describe(folder: Path, facts: dict[str, Any]) -> None:
    """Say what a folder of tokens holds, once all of them are there."""
    with replacing(folder / "corpus.json") as file:
        file.write(json.dumps(facts, indent=2).encode())
