"""Files: writing what a user asked for, never over what is there."""

from __future__ import annotations

from pathlib import Path

from naught.errors import UsageError

__all__ = ["write_new"]


def write_new(path: str, text: str) -> None:
    try:
        with Path(path).open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise UsageError(f'"{path}" exists already', fix="name another file; nothing was overwritten") from None
    except OSError as error:
        raise UsageError(f'"{path}" cannot be written: {error.strerror}') from error
