"""Ranks that are killed while they save: the newest checkpoint is always whole, and a state that was really reached."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from test_parity import SOAK
from training import digest_in_32_bits, start

from naught.checkpoints import RealDisk, Store

pytestmark = pytest.mark.usefixtures("one_thread")

KILLS = 2000 if SOAK else 100
RECIPES: list[dict[str, Any]] = [{}, {"bf16": {"enabled": True}}]


@pytest.fixture
def nursery() -> Iterator[Any]:
    here = Path(__file__).parent
    env = os.environ | {"PYTHONPATH": f"{here}:{here.parent}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(here / "killing.py")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert json.loads(process.stdout.readline()) == {"fine": True}

        def ask(**question: Any) -> dict[str, Any]:
            process.stdin.write(json.dumps(question) + "\n")
            process.stdin.flush()
            return json.loads(process.stdout.readline())

        yield ask
        process.stdin.close()
        process.wait(timeout=60)


@pytest.mark.timeout(36_000 if SOAK else 300)
def test_no_kill_costs_a_checkpoint(nursery, tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    store = Store(RealDisk(), str(folder))
    saved_before, interrupted = 0, 0
    for seed in range(KILLS):
        stage, more = seed % 4, RECIPES[seed // 4 % 2]
        told = nursery(
            folder=str(folder), store=str(tmp_path / f"store{seed}"), stage=stage, more=more, seed=seed, longest_s=0.25
        )
        assert told["started"] == 2, f"seed {seed}: the ranks could not go on: {told}"
        assert told["hung"] == 0, f"seed {seed}: {told}"
        found = store.all()
        assert len(found) >= min(saved_before, 1), f"seed {seed}: an older one is lost"
        interrupted += any(path.name.startswith(".tmp-") for path in folder.iterdir())
        for saved in found[-3:]:
            store.verify(saved)
        if found:
            assert reached_by(folder, stage, more) in (tmp_path / "reached").read_text().splitlines(), f"seed {seed}"
        store.sweep()
        for saved in found[:-2]:
            store.remove(saved.tag)
        saved_before = len(found)
    print(f"{KILLS} kills, {interrupted} of them in a save, seeds 0 to {KILLS - 1}, step {store.all()[-1].manifest.step} reached")
    assert saved_before
    assert interrupted > KILLS // 50, "some were killed in the middle of a save"


def reached_by(folder: Path, stage: int, more: dict[str, Any]) -> str:
    """What the newest checkpoint is, loaded alone, at another stage."""
    engine = start(3 - stage, "tied", more=more)
    engine.load_checkpoint(folder)
    reached = f"{engine.global_steps} {digest_in_32_bits(engine)}"
    engine.destroy()
    return reached
