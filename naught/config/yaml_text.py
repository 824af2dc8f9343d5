"""YAML text: a recipe that is written in YAML, as the same document that JSON would give. Needs the package pyyaml."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from naught.config.read import Document, Spot, dotted
from naught.errors import ConfigError, Problem
from naught.extras import package

__all__ = ["is_yaml", "read_yaml"]

_MOST_BYTES = 2**20
# YAML 1.1 takes 1e-4 and 5e8 for texts; nobody who writes a learning rate means one.
_FLOAT = re.compile(r"[-+]?[0-9][0-9_]*(\.[0-9]*)?[eE][-+]?[0-9]+")


def is_yaml(path: Path) -> bool:
    return path.suffix.lower() in (".yaml", ".yml")


def read_yaml(path: Path) -> Document:
    """The document of a YAML file; raises ConfigError where there is none."""
    yaml = package("yaml", where=str(path), fix="write the file as JSON, which may have comments here")
    document = Document(str(path))
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise _refusal(path, "is larger than 1 MiB: not a configuration")
        node = yaml.compose(path.read_text(encoding="utf-8-sig"), Loader=yaml.SafeLoader)
        values = None if node is None else _Reader(document, yaml.SafeLoader("")).value(node, ())
    except (OSError, UnicodeDecodeError) as error:
        raise _refusal(path, f"cannot be read: {error}") from error
    except (yaml.YAMLError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        said = getattr(error, "problem", None) or type(error).__name__
        raise _refusal(path, f"not valid YAML: {said}", None if mark is None else mark.line + 1) from error
    if not isinstance(values, dict):
        raise _refusal(path, "must be a mapping of keys to values")
    document.values = values
    return document


def _refusal(path: Path, what: str, line: int | None = None) -> ConfigError:
    return ConfigError(str(path), [Problem("", what, line)])


class _Reader:
    """Turns nodes into values, keeping the line of each key."""

    def __init__(self, document: Document, loader: Any) -> None:
        self.document, self.loader = document, loader

    def value(self, node: Any, place: Spot) -> Any:
        if node.id == "mapping":
            return self._mapping(node, place)
        if node.id == "sequence":
            return [self.value(member, (*place, at)) for at, member in enumerate(node.value)]
        if node.tag.endswith(":str") and node.style is None and _FLOAT.fullmatch(node.value):
            return float(node.value)
        if node.tag.endswith((":timestamp", ":binary")):
            return node.value
        return self.loader.construct_object(node)

    def _mapping(self, node: Any, place: Spot) -> dict[str, Any]:
        members: dict[str, Any] = {}
        for key, member in node.value:
            line = key.start_mark.line + 1
            if key.id != "scalar" or key.value == "<<":
                self.document.problems.append(
                    Problem(dotted(place), "a key must be a plain text", line, "merges have no place here")
                )
                continue
            spot = (*place, str(key.value))
            if key.value in members:
                what = f"appears twice (lines {self.document.lines[spot]} and {line})"
                self.document.problems.append(Problem(dotted(spot), what, line, "remove one"))
            self.document.lines[spot] = line
            members[str(key.value)] = self.value(member, spot)
        return members
