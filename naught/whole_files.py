"""Whole files: a file that appears under its name only once all of it is written. What fails leaves nothing behind."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

__all__ = ["replacing"]


@contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """While open, a file beside the one that it takes the place of at the end."""
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}-", delete=False) as file:
        made = Path(file.name)
        try:
            yield file
            file.flush()
            made.chmod(0o644)
            made.replace(path)
        except BaseException:
            made.unlink(missing_ok=True)
            raise
