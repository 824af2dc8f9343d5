"""Read: a configuration's text into plain values, remembering the line of each key. Knows no keys.

Takes JSON as people write it in files: with comments and trailing commas. A mapping, a path, JSON text and base64
of JSON text are all accepted, as DeepSpeed's callers pass all of them.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from naught.errors import ConfigError, Problem

__all__ = ["Document", "Source", "Spot", "dotted", "is_remark", "read"]

Source = Mapping[str, Any] | str | Path | bytes
Spot = tuple[str | int, ...]

_MOST_BYTES = 2**20
_MOST_DEPTH = 32


@dataclass
class Document:
    """Plain values, where each key stood, and what was wrong already in the text."""

    source: str
    values: dict[str, Any] = field(default_factory=dict)
    lines: dict[Spot, int] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)


def read(source: Source) -> Document:
    """The document behind a source; raises ConfigError when there is no JSON object to be had."""
    if isinstance(source, Mapping):
        document = Document("the configuration")
        document.values = _copy(source, document, ())
        return document
    if isinstance(source, bytes):
        return _parse(_decode(source, "the configuration"), "the configuration")
    if isinstance(source, Path):
        return _read_file(source)
    if not isinstance(source, str):
        _refuse("the configuration", f"must be a mapping, a path, JSON text or base64, not {type(source).__name__}")
    return _read_text(source)


def _read_text(text: str) -> Document:
    start = text.lstrip("\ufeff \t\r\n")
    if not start:
        _refuse("the configuration", "is empty")
    if start[:1] in ("{", "[") or start[:2] in ("//", "/*") or start[:1] == "#":
        return _parse(text, "the configuration text")
    try:
        path = Path(text)
        if path.exists():
            return _read_file(path)
    except (OSError, ValueError):
        pass  # too long or with a NUL: not a path, but it may still be base64
    try:
        decoded = base64.b64decode(re.sub(r"\s", "", text).translate(str.maketrans("-_", "+/")), validate=True)
    except (binascii.Error, ValueError):
        decoded = b""
    if decoded.lstrip()[:1] == b"{":
        return _parse(_decode(decoded, "the base64 configuration"), "the base64 configuration")
    shown = text if len(text) <= 80 else text[:77] + "..."
    return _refuse(
        "the configuration", f'"{shown}" is no file, no JSON text and no base64 of JSON', "give the path of a JSON file"
    )


def _read_file(path: Path) -> Document:
    try:
        if not path.is_file():
            _refuse(str(path), "there is no such file" if not path.exists() else "is not a regular file")
        if path.stat().st_size > _MOST_BYTES:
            _refuse(str(path), "is larger than 1 MiB: not a configuration")
        return _parse(_decode(path.read_bytes(), str(path)), str(path))
    except (OSError, ValueError) as error:
        _refuse(str(path), f"cannot be read: {error}")


def _decode(raw: bytes, source: str) -> str:
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        _refuse(source, f"is not UTF-8 text: byte {error.start} is {raw[error.start]:#04x}")


def _refuse(source: str, what: str, fix: str = "") -> NoReturn:
    raise ConfigError(source, [Problem("", what, fix=fix)])


_REJECTED = object()


def _copy(value: Any, document: Document, place: Spot) -> Any:
    """A caller's value as JSON has it; what JSON does not have is a problem, and left out."""
    if len(place) > _MOST_DEPTH:
        _refuse(document.source, f"is nested more than {_MOST_DEPTH} deep at {dotted(place[:4])}...")
    if isinstance(value, Mapping):
        copied = {}
        for key, member in value.items():
            if isinstance(key, str) and _printable(key):
                copied[key] = _copy(member, document, (*place, key))
            else:
                document.problems.append(Problem(dotted(place), f"key {key!r:.80} must be a string"))
        return {key: member for key, member in copied.items() if member is not _REJECTED}
    if isinstance(value, list | tuple):
        members = [_copy(member, document, (*place, at)) for at, member in enumerate(value)]
        return _REJECTED if any(member is _REJECTED for member in members) else members
    if isinstance(value, Path):
        return str(value)
    if type(value).__module__ == "numpy" and getattr(value, "shape", None) == ():
        return value.item()  # a script's np.int64 is a number to its author
    if value is None or type(value) in (bool, int, float) or (type(value) is str and _printable(value)):
        return value
    document.problems.append(Problem(dotted(place), f"a {type(value).__name__} has no place in a configuration"))
    return _REJECTED


def _printable(text: str) -> bool:
    return not any("\ud800" <= letter <= "\udfff" for letter in text)


def dotted(spot: Spot) -> str:
    """A place in a document as people write it."""
    return ".".join(map(str, spot))[:300]


# --- JSON with comments -----------------------------------------------------------------------------------------------

_SPACE = re.compile(r"(?:[ \t\r\n]+|//[^\n]*|#[^\n]*|/\*.*?\*/)+", re.DOTALL)
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?")
_STRING = re.compile(r'"(?:[^"\\\x00-\x1f]|\\.)*"')
_WORDS = {
    "true": True,
    "false": False,
    "null": None,
    "NaN": float("nan"),
    "Infinity": float("inf"),
    "-Infinity": float("-inf"),
    "inf": float("inf"),
    "-inf": float("-inf"),
    "nan": float("nan"),
}
_WORD = re.compile(r"-?[A-Za-z_][A-Za-z_0-9]*")


def _parse(text: str, source: str) -> Document:
    if len(text) > _MOST_BYTES:
        _refuse(source, "is larger than 1 MiB: not a configuration")
    document = Document(source)
    parser = _Parser(text.removeprefix("\ufeff"), document)
    value = parser.value(())
    parser.skip()
    if parser.at < len(parser.text):
        parser.fail("text after the end of the object")
    if not isinstance(value, dict):
        _refuse(source, f"must be a JSON object, is {type(value).__name__}")
    document.values = value
    return document


def is_remark(key: str) -> bool:
    """Whether a key is there for people only."""
    return key.startswith(("_", "//", "#", "$")) or key in ("comment", "comments")


class _Parser:
    """A reader of JSON that keeps lines and notices keys that stand twice."""

    def __init__(self, text: str, document: Document) -> None:
        self.text, self.document, self.at = text, document, 0
        self.line_ends = [match.start() for match in re.finditer("\n", text)]

    def value(self, place: Spot) -> Any:
        self.skip()
        if len(place) > _MOST_DEPTH:
            self.fail(f"nested more than {_MOST_DEPTH} deep")
        start = self.text[self.at : self.at + 1]
        if start == "{":
            return self._object(place)
        if start == "[":
            return self._array(place)
        if start == '"':
            return self._string()
        return self._atom()

    def _object(self, place: Spot) -> dict[str, Any]:
        members: dict[str, Any] = {}
        self.at += 1
        while not self._closes("}"):
            if self.text[self.at : self.at + 1] != '"':
                self.fail('a key in double quotes or "}" is due')
            line, key = self.line(), self._string()
            spot = (*place, key)
            self.skip()
            if self.text[self.at : self.at + 1] != ":":
                self.fail(f'":" is due after "{key[:40]}"')
            self.at += 1
            member = self.value(spot)
            if key in members and not is_remark(key):
                first = self.document.lines[spot]
                what = f"appears twice (lines {first} and {line})" if first != line else "appears twice"
                self.document.problems.append(Problem(dotted(spot), what, line, "remove one"))
            members[key] = member
            self.document.lines[spot] = line
            self._comma("}")
        return members

    def _array(self, place: Spot) -> list[Any]:
        members: list[Any] = []
        self.at += 1
        while not self._closes("]"):
            self.document.lines[*place, len(members)] = self.line()
            members.append(self.value((*place, len(members))))
            self._comma("]")
        return members

    def _closes(self, bracket: str) -> bool:
        self.skip()
        if self.text[self.at : self.at + 1] == bracket:
            self.at += 1
            return True
        return False

    def _comma(self, bracket: str) -> None:
        self.skip()
        following = self.text[self.at : self.at + 1]
        if following == ",":
            self.at += 1
        elif following != bracket:
            self.fail(f'"," or "{bracket}" is due')

    def _string(self) -> str:
        match = _STRING.match(self.text, self.at)
        if match is None:
            self.fail("a string does not end on its line")
        try:
            text: str = json.loads(match[0])
            text.encode()  # half of a surrogate pair is text that nothing can print
        except ValueError as error:
            self.fail(f"a string cannot be read ({error})")
        self.at = match.end()
        return text

    def _atom(self) -> Any:
        word = _WORD.match(self.text, self.at)
        if word and word[0] in _WORDS:
            self.at = word.end()
            return _WORDS[word[0]]
        number = _NUMBER.match(self.text, self.at)
        if number is None:
            self.fail("a value is due" + (f', found "{word[0][:40]}"' if word else ""))
        if len(number[0]) > 400:
            self.fail("a number of more than 400 digits")
        self.at = number.end()
        return float(number[0]) if number[1] or number[2] else int(number[0])

    def skip(self) -> None:
        match = _SPACE.match(self.text, self.at)
        if match:
            self.at = match.end()

    def line(self) -> int:
        return bisect_left(self.line_ends, self.at) + 1

    def fail(self, what: str) -> NoReturn:
        column = self.at - (self.text.rfind("\n", 0, self.at) + 1) + 1
        if self.at >= len(self.text):
            what += ", but the text ends"
        raise ConfigError(self.document.source, [Problem("", f"not valid JSON at column {column}: {what}", self.line())])
