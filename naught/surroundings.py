"""Surroundings: the variables that ranks which are started here find. Pure, so that a doctor can ask without torch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

__all__ = ["surroundings", "threads_of_each"]


def surroundings(env: Mapping[str, str], nproc: int) -> dict[str, str]:
    """As many threads for each as it has cores to itself, for more would only get in each other's way; and the package where
    this process has found it, installed or not."""
    path = [str(Path(__file__).parents[1]), *filter(None, [env.get("PYTHONPATH")])]
    return {"OMP_NUM_THREADS": str(threads_of_each(nproc)), **env, "PYTHONPATH": os.pathsep.join(path)}


def threads_of_each(nproc: int) -> int:
    return max(1, len(os.sched_getaffinity(0)) // nproc)
