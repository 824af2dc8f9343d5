"""File errors: what the operating system says of a file, as an error that names it and says what to do."""

from __future__ import annotations

import errno
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from naught.errors import StorageError

__all__ = ["telling"]

_ANYWHERE = "look at the file system"


@contextmanager
def telling(what: str, path: str, fixes: Mapping[int, str]) -> Iterator[None]:
    """`fixes` says what to do about each number of an error."""
    try:
        yield
    except OSError as error:
        name = errno.errorcode.get(error.errno or 0, "error")
        fix = fixes.get(error.errno or 0, _ANYWHERE)
        raise StorageError(f"cannot {what} {path}: {error.strerror or error} ({name})", fix=fix) from error
