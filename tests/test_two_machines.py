"""Two machines, as far as the network can tell: two network namespaces and a cable between them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_train import SMALL, environment, facts, losses, place, train  # noqa: F401 - place is a fixture

pytestmark = pytest.mark.timeout(180)

HEAD, OTHER = "10.77.31.1", "10.77.31.2"


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True, timeout=20)


@pytest.fixture
def machines() -> Iterator[tuple[str, str]]:
    """Two namespaces that reach each other, and nothing else."""
    if shutil.which("ip") is None or os.geteuid() != 0:
        pytest.skip("needs root and the command ip")
    names = tuple(f"naught-{os.getpid()}-{which}" for which in "ab")
    try:
        try:
            for name in names:
                ip("netns", "add", name)
            ip("link", "add", "cable", "netns", names[0], "type", "veth", "peer", "name", "cable", "netns", names[1])
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no network namespaces here: {error.stderr.strip()}")
        for name, address in zip(names, (HEAD, OTHER), strict=True):
            for words in (["link", "set", "lo", "up"], ["addr", "add", f"{address}/24", "dev", "cable"]):
                ip("-n", name, *words)
            ip("-n", name, "link", "set", "cable", "up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, timeout=20, check=False)


def start(machine: str, node: int, words: list[str]) -> subprocess.Popen[str]:
    """What a user types on one of two machines."""
    by_torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--node-rank", str(node)]
    by_torchrun += ["--nproc-per-node", "1", "--master-addr", HEAD, "--master-port", "29511", "-m", "naught", "train"]
    return subprocess.Popen(
        ["ip", "netns", "exec", machine, *by_torchrun, *words],
        env=environment(GLOO_SOCKET_IFNAME="cable", OMP_NUM_THREADS="1"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_torchrun_across_two_machines_trains_as_on_one(place: Path, machines):  # noqa: F811
    words = [*SMALL, "data=text.txt", "steps=6"]
    assert train("steps=6").returncode == 0
    ranks = [start(machine, node, words) for node, machine in enumerate(machines)]
    said = [rank.communicate(timeout=150) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], said[0][1] + said[1][1]
    one, two = sorted((place / "runs").iterdir())
    assert facts(two)["world"] == 2
    assert losses(one) == losses(two)
    assert len(losses(two)) == 6
    assert "step   6/6" in said[0][0]
    assert "step   6/6" not in said[1][0], "one machine speaks"
