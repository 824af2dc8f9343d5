"""Writing: a page becomes a file, whole or not at all, and over nothing but an earlier page."""

from __future__ import annotations

import os
from pathlib import Path

from naught.errors import UsageError
from naught.report.html import Html
from naught.report.page import GENERATOR
from naught.whole_files import replacing

__all__ = ["write_page"]

_HEAD_BYTES = 1024  # in which a page of ours says so


def write_page(html: Html, out: Path) -> None:
    if os.path.lexists(out) and not _is_ours(out):
        raise UsageError(f'"{out}" exists already, and is no report', fix="name another file; nothing was overwritten")
    try:
        with replacing(out) as file:
            file.write(html.encode())
    except OSError as error:
        raise UsageError(f'"{out}" cannot be written: {error.strerror}') from error


def _is_ours(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return GENERATOR.encode() in file.read(_HEAD_BYTES)
    except OSError:  # a folder, or a file that may not be read
        return False
