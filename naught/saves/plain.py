"""Plain: what a schedule or a caller wants to remember, as JSON and back, without a loss. Anything else is refused by name."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor

from naught.errors import CheckpointDamaged, CheckpointError

__all__ = ["decode", "encode"]

_MARK, _OF = "$", "of"  # a JSON object with the mark stands for what JSON does not have
_DEEPEST = 100


def encode(value: Any, place: str, depth: int = 0) -> Any:
    """Numbers (also infinite ones), texts, lists, tuples and mappings; numbers of numpy and torch become Python's."""
    if depth > _DEEPEST:
        raise CheckpointError(f"{place[:80]} is nested too deeply to be saved", fix=f"nest at most {_DEEPEST} levels")
    match value:
        case None | bool() | int():
            return value
        case float():
            return value if math.isfinite(value) else {_MARK: "float", _OF: str(value)}
        case str():
            return _text(value, place)
        case list():
            return [encode(member, f"{place}[{at}]", depth + 1) for at, member in enumerate(value)]
        case tuple():
            return {_MARK: "tuple", _OF: encode(list(value), place, depth)}
        case Mapping() if all(isinstance(key, str) and key != _MARK for key in value):
            return {_text(key, place): encode(member, f"{place}.{key}", depth + 1) for key, member in value.items()}
        case Mapping():
            return {_MARK: "dict", _OF: [encode([key, member], f"{place}.{key}", depth + 1) for key, member in value.items()]}
        case np.generic():
            return encode(value.item(), place, depth)
        case Tensor() if value.numel() == 1:
            return encode(value.item(), place, depth)
    raise CheckpointError(
        f"{place} is a {type(value).__name__}, which cannot be written as JSON",
        fix="use numbers, texts, lists and dicts; save tensors by themselves",
    )


def _text(value: str, place: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise CheckpointError(f"a text in {place[:80]} cannot be written as UTF-8", fix="write it otherwise") from error
    return value


def decode(value: Any) -> Any:
    match value:
        case list():
            return [decode(member) for member in value]
        case {"$": "float", "of": "inf" | "-inf" | "nan" as text}:
            return float(text)
        case {"$": "tuple", "of": [*members]}:
            return tuple(decode(member) for member in members)
        case {"$": "dict", "of": [*members]} if all(isinstance(member, list) and len(member) == 2 for member in members):
            return {decode(key): decode(member) for key, member in members}
        case dict() if _MARK in value:
            raise CheckpointDamaged(f"a value of the kind {str(value[_MARK])[:40]} is none that this release writes")
        case dict():
            return {key: decode(member) for key, member in value.items()}
    return value
