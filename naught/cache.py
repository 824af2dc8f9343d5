"""Cache: the folder of what can be made again: token files, and what was measured of this machine."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["cache_folder"]


def cache_folder() -> Path:
    """`$NAUGHT_CACHE`, or where this user's caches are."""
    given = os.environ.get("NAUGHT_CACHE")
    if given:
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "naught")
