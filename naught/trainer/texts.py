"""Texts: which files a run is trained on, and which of them are set aside for validation. Reads names, and no contents."""

from __future__ import annotations

import glob
import hashlib
import platform
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from naught.errors import UsageError

__all__ = ["Text", "Texts", "find_texts", "share_out", "stdlib_texts"]

# Parts of the standard library that are not what a program reads like: tests, tables, and what is not its own.
_NOT_PROSE = frozenset({"test", "tests", "idle_test", "lib2to3", "pydoc_data", "encodings", "site-packages", "__pycache__"})


@dataclass(frozen=True)
class Text:
    """A file, and what it is called among its likes wherever they lie."""

    name: str
    path: Path


@dataclass(frozen=True)
class Texts:
    """The files of a run, and what they are called together."""

    title: str
    files: tuple[Text, ...]


def stdlib_texts() -> Texts:
    """The sources of the Python that runs this: real text that every machine has."""
    root = Path(sysconfig.get_path("stdlib"))
    files = [path for path in sorted(root.rglob("*.py")) if not _NOT_PROSE & set(path.relative_to(root).parts)]
    return Texts(f"Python {platform.python_version()}'s standard library", _named(root, files))


def find_texts(pattern: str) -> Texts:
    """A file, all files of a folder, or those that a glob finds."""
    path = Path(pattern).expanduser()
    if path.is_file():
        return Texts(path.name, (Text(path.name, path),))
    if path.is_dir():
        files = sorted(inner for inner in path.rglob("*") if inner.is_file() and not _is_hidden(inner.relative_to(path)))
        if not files:
            raise UsageError(f'the folder "{pattern}" holds no files', where="data.path")
        return Texts(path.resolve().name, _named(path, files))
    names = glob.glob(str(path), recursive=True)  # noqa: PTH207 - Path.glob takes no absolute patterns
    found = sorted(Path(name) for name in names if Path(name).is_file())
    if not found:
        raise UsageError(
            f'there is no file "{pattern}"', where="data.path", fix="give a text file, a folder, or a glob in quotes"
        )
    return Texts(pattern, tuple(Text(str(name), name) for name in found))


def _is_hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def _named(root: Path, files: Sequence[Path]) -> tuple[Text, ...]:
    return tuple(Text(path.relative_to(root).as_posix(), path) for path in files)


def share_out(texts: Texts, share: float) -> tuple[list[Text], list[Text]]:
    """Files to train on, and files set aside that hold this share of the bytes, as near as whole files come. Which ones
    depends on their names alone, so they are the same on every machine and rank."""
    sizes = {text: text.path.stat().st_size for text in texts.files}
    left, aside = share * sum(sizes.values()), set()
    for text in sorted(texts.files, key=lambda text: hashlib.sha256(text.name.encode()).digest()):
        if sizes[text] <= 2 * left:  # nearer with it than without
            aside.add(text)
            left -= sizes[text]
    return [text for text in texts.files if text not in aside], [text for text in texts.files if text in aside]
