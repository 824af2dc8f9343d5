"""Corpus: the data of a run: token numbers to train on and to validate with, and what simple compressors make of the latter.

Encoded once and kept in a cache, by what the files and the tokenizer are; every node of a cluster may make its own.
"""

from __future__ import annotations

import hashlib
import json
import lzma
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from naught.cache import cache_folder
from naught.config.recipe import Recipe
from naught.errors import UsageError
from naught.trainer.texts import Text, Texts, find_texts, share_out, stdlib_texts
from naught.trainer.tokens import Encoder, Part, Tokens, describe, encoder_of, map_tokens, write_tokens

__all__ = ["Corpus", "open_corpus", "prepare_corpus", "refuse_strange", "yardsticks"]

_VERSION = 1
_PIECE_NUMEL = 1 << 24
_MOST_MEASURED_BYTES = 1 << 24  # that compressors are given: they are slow


@dataclass(frozen=True)
class Corpus:
    """Token numbers below `vocab` (0: nobody knows), how many bytes of text a token stands for (0.0: nobody knows), and
    yardsticks in bits per byte of the validation text."""

    title: str
    train: Tokens
    validation: Tokens
    vocab: int
    bytes_per_token: float
    yardsticks: dict[str, float]


def prepare_corpus(recipe: Recipe) -> Path | None:
    """Encode what has not been encoded yet. Returns the folder that holds it; None: the data are token numbers already."""
    data = recipe.data
    if data.validation_path is not None and _is_tokens(data.path) != _is_tokens(data.validation_path):
        raise UsageError(
            "one of data.path and data.validation_path is of token numbers, and the other is text", fix="give both alike"
        )
    if _is_tokens(data.path):
        return None
    encoder = encoder_of(recipe.data.tokenizer)
    title, train, aside = _parts(recipe)
    folder = cache_folder() / "tokens" / _digest(title, train, aside, encoder)
    if not (folder / "corpus.json").exists():
        folder.mkdir(parents=True, exist_ok=True)
        write_tokens(train, encoder, folder, "train")
        write_tokens(aside, encoder, folder, "validation")
        nbytes = sum(part.stop - part.start for part in aside)
        numel = map_tokens(folder / "validation.npy").size
        facts = {"title": title, "vocab": encoder.vocab, "bytes_per_token": nbytes / max(1, numel)}
        describe(folder, facts | {"yardsticks": yardsticks(_sample(aside))})
    return folder


def open_corpus(recipe: Recipe, folder: Path | None) -> Corpus:
    """Map what was prepared."""
    if folder is None:
        return _from_tokens(recipe)
    facts = json.loads((folder / "corpus.json").read_text(encoding="utf-8"))
    return Corpus(train=map_tokens(folder / "train.npy"), validation=map_tokens(folder / "validation.npy"), **facts)


def _is_tokens(path: str | None) -> bool:
    return path is not None and path.endswith(".npy")


def _from_tokens(recipe: Recipe) -> Corpus:
    data = recipe.data
    assert data.path is not None
    train = map_tokens(Path(data.path).expanduser())
    if data.validation_path is not None:
        aside = map_tokens(Path(data.validation_path).expanduser(), where="data.validation_path")
    else:
        cut = train.size - int(train.size * data.validation)
        train, aside = train[:cut], train[cut:]
    return Corpus(Path(data.path).name, train, aside, vocab=0, bytes_per_token=0.0, yardsticks={})


def refuse_strange(corpus: Corpus, vocab: int) -> None:
    """Token numbers that a model does not know fail deep inside of it, and on a GPU without a word: look at all of them."""
    for tokens in (corpus.train, corpus.validation):
        for start in range(0, tokens.size, _PIECE_NUMEL):
            piece = tokens[start : start + _PIECE_NUMEL]
            least, most = int(piece.min()), int(piece.max())
            if least < 0 or most >= vocab:
                strange = least if least < 0 else most
                raise UsageError(
                    f"{corpus.title} holds the token {strange}, and the model knows those from 0 to {vocab - 1}",
                    where="data.path",
                    fix=f"give the model a larger vocabulary, such as vocab={most + 1}, or other tokens",
                )


def _parts(recipe: Recipe) -> tuple[str, list[Part], list[Part]]:
    """What is trained on and what is set aside: by file, or the end of a file that is alone."""
    data = recipe.data
    texts = stdlib_texts() if data.path is None else find_texts(data.path)
    if data.validation_path is not None:
        return texts.title, _whole(texts.files), _whole(find_texts(data.validation_path).files)
    train, aside = share_out(texts, data.validation)
    if train and aside:
        return texts.title, _whole(train), _whole(aside)
    return (texts.title, *_cut(texts, data.validation))


def _whole(texts: Sequence[Text]) -> list[Part]:
    return [Part(text, 0, text.path.stat().st_size) for text in texts]


def _cut(texts: Texts, share: float) -> tuple[list[Part], list[Part]]:
    """Too few files to share out: the end of each is set aside."""
    parts = _whole(texts.files)
    cuts = [part.stop - int(part.stop * share) for part in parts]
    train = [part._replace(stop=cut) for part, cut in zip(parts, cuts, strict=True)]
    return train, [part._replace(start=cut) for part, cut in zip(parts, cuts, strict=True)]


def _digest(title: str, train: Sequence[Part], aside: Sequence[Part], encoder: Encoder) -> str:
    """The same for the same files and tokenizer, and for no others."""

    def told(part: Part) -> list[Any]:
        path = part.text.path.resolve()
        return [part.text.name, str(path), part.start, part.stop, path.stat().st_mtime_ns]

    text = json.dumps([_VERSION, title, encoder.name, [told(part) for part in train], [told(part) for part in aside]])
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def _sample(parts: Sequence[Part]) -> bytes:
    """The validation text, or its beginning where it is long."""
    found = b""
    for part in parts:
        with part.text.path.open("rb") as file:
            file.seek(part.start)
            found += file.read(min(part.stop - part.start, _MOST_MEASURED_BYTES - len(found)))
        if len(found) >= _MOST_MEASURED_BYTES:
            break
    return found


def yardsticks(text: bytes) -> dict[str, float]:
    """Bits per byte of a text by what knows nothing of it: the frequency of each byte, and two compressors."""
    if not text:
        return {}
    counts = np.bincount(np.frombuffer(text, dtype=np.uint8))
    shares = counts[counts > 0] / len(text)
    return {
        "order-0 entropy": float(-(shares * np.log2(shares)).sum()),
        "zlib -9": 8 * len(zlib.compress(text, 9)) / len(text),
        "lzma": 8 * len(lzma.compress(text)) / len(text),
    }
