"""Documents: a JSON file whose keys may be missing or strange. Every question has a typed answer, or None."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from naught.errors import UsageError

__all__ = ["Document", "number_of", "read_document"]


@dataclass(frozen=True)
class Document:
    """A JSON object. None and an empty one are what a missing or a strange value reads as."""

    values: Mapping[str, object]

    def text(self, key: str) -> str | None:
        value = self.values.get(key)
        return value if isinstance(value, str) and value else None

    def number(self, key: str) -> float | None:
        value = number_of(self.values.get(key))
        return value if value is not None and math.isfinite(value) else None

    def count(self, key: str) -> int | None:
        value = self.number(key)
        return int(value) if value is not None and abs(value) < 2**63 else None

    def flag(self, key: str) -> bool:
        return self.values.get(key) is True

    def inner(self, key: str) -> Document:
        value = self.values.get(key)
        return Document(value if isinstance(value, dict) else {})

    def rows(self, key: str) -> list[Document]:
        value = self.values.get(key)
        return [Document(row) for row in value if isinstance(row, dict)] if isinstance(value, list) else []

    def numbers(self) -> dict[str, float]:
        """Those of its values that are finite numbers."""
        found = ((key, self.number(key)) for key in self.values)
        return {key: value for key, value in found if value is not None}

    def flattened(self, prefix: str = "") -> Iterator[tuple[str, object]]:
        """Every value by its dotted path. An empty object is a value."""
        for key, value in self.values.items():
            if isinstance(value, dict) and value:
                yield from Document(value).flattened(f"{prefix}{key}.")
            else:
                yield f"{prefix}{key}", value


def number_of(value: object) -> float | None:
    """A float of any number, also of one that is not finite; a truth value is no number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value)
    except OverflowError:  # a whole number of more than 308 digits
        return None


def read_document(path: Path) -> Document | None:
    """A file's object, or None where there is no such file."""
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UsageError(f'"{path}" cannot be read: {error.strerror}') from error
    except ValueError as error:
        raise UsageError(f'"{path}" is not JSON: {error}', fix="the run may still be writing it; try again") from error
    if not isinstance(value, dict):
        raise UsageError(f'"{path}" is not a JSON object')
    return Document(value)
