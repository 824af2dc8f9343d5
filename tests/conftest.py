"""What tests share: hypothesis profiles with the same examples in every run, and worlds of ranks."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from collections.abc import Iterator

import pytest
from workers import World

if os.environ.get("NAUGHT_DEVICE", "cpu") == "cpu":
    os.environ["DS_ACCELERATOR"] = "cpu"  # also where there is another

# Plans must not depend on what somebody has measured on this machine.
os.environ["NAUGHT_CACHE"] = tempfile.mkdtemp(prefix="naught-tests-")
atexit.register(shutil.rmtree, os.environ["NAUGHT_CACHE"], ignore_errors=True)

try:
    from hypothesis import settings
except ImportError:  # a GPU machine may have no more than torch and pytest: most files of make test-gpu need no more
    pass
else:
    settings.register_profile("ci", derandomize=True, deadline=None, max_examples=200)
    settings.register_profile("soak", deadline=None, max_examples=20_000)
    settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


# A file is one process's from its first test to its last, so those that take longest come first: none is left alone at the end.
LONGEST = (
    "train",
    "simulation",
    "kills",
    "stages",
    "disk",
    "early",
    "estimate",
    "cli",
    "walks",
    "offload",
    "parity",
    "async_saves",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    order = {f"test_{name}.py": at for at, name in enumerate(LONGEST)}
    items.sort(key=lambda item: order.get(item.path.name, len(order)))


@pytest.fixture(scope="session")
def worlds() -> Iterator[dict[int, World]]:
    made = {size: World(size) for size in (1, 2, 3, 4)}
    yield made
    for world in made.values():
        world.stop()


@pytest.fixture
def two(worlds: dict[int, World]) -> World:
    return worlds[2]


@pytest.fixture
def one_thread() -> Iterator[None]:
    """As many as the workers have: a matrix product rounds by its number of threads."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
