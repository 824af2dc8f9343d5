"""Ranks that are killed while they save: the newest checkpoint is always whole, and a state that was really reached."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from test_parity import SOAK
from training import digest_of_what_is_trained, start

from naught.checkpoints import RealDisk, Store

pytestmark = pytest.mark.usefixtures("one_thread")

KILLS, CUTS = (2000, 100) if SOAK else (100, 10)
RECIPES: list[dict[str, Any]] = [{}, {"bf16": {"enabled": True}}]
RESUMED = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}, "naught": {"async_save": True}},
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 2, "hysteresis": 1}},
}
UNTIL = 8 if SOAK else 6


@pytest.fixture(scope="module")
def nursery() -> Iterator[Any]:
    here = Path(__file__).parent
    env = os.environ | {"PYTHONPATH": f"{here}:{here.parent}:{os.environ.get('PYTHONPATH', '')}", "OMP_NUM_THREADS": "1"}
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


class Runs:
    """Two ranks that go on from the newest checkpoint in a folder, again and again, and never to the end."""

    def __init__(self, nursery: Any, folder: Path, notes: Path) -> None:
        self.nursery, self.folder, self.notes = nursery, folder, notes
        self.store, self.count = Store(RealDisk(), str(folder)), 0
        folder.mkdir()

    def stop(self, *, stage: int, more: dict[str, Any], **how: Any) -> dict[str, Any]:
        """Start them, and have them stopped in a way. Nobody may hang."""
        self.count += 1
        question = {"at": None, "victim": 0, "cut": None, "longest_s": 0.03, "seed": self.count, "until": 10_000, "noisy": False}
        question |= how
        told = self.nursery(
            folder=str(self.folder),
            notes=str(self.notes),
            store=str(self.notes / f"store{self.count}"),
            stage=stage,
            more=more,
            **question,
        )
        assert (told["started"], told["hung"]) == (2, 0), f"trial {self.count}: {told}"
        return told

    def check(self, stage: int, more: dict[str, Any]) -> list[int]:
        """Everything that is listed is whole, and the newest is a state that was reached. Returns the steps."""
        found = self.store.all()
        for saved in found:
            self.store.verify(saved)
        if found:
            assert reached_by(self.folder, stage, more) in self.lines("reached"), f"trial {self.count}"
        return [saved.manifest.step for saved in found]

    def lines(self, name: str) -> list[str]:
        path = self.notes / name
        return path.read_text().splitlines() if path.exists() else []


def reached_by(folder: Path, stage: int, more: dict[str, Any]) -> str:
    """What the newest checkpoint is, loaded alone, at another stage."""
    engine = start(3 - stage, "tied", more=more)
    engine.load_checkpoint(folder)
    reached = f"{engine.global_steps} {digest_of_what_is_trained(engine)}"
    engine.destroy()
    return reached


def variant(seed: int) -> dict[str, Any]:
    """A stage, a precision, and how it saves."""
    more = RECIPES[seed // 4 % 2] | {"naught": {"keep_last": 2, "async_save": seed // 8 % 2 == 1}}
    return {"stage": seed % 4, "more": more}


@pytest.mark.timeout(36_000 if SOAK else 300)
def test_no_kill_costs_a_checkpoint(nursery, tmp_path):
    runs = Runs(nursery, tmp_path / "run", tmp_path)
    saving, before = 0, 0
    for seed in range(KILLS):
        longest_s = 0.03 if seed % 4 else 0.15  # most in the midst of a save, and some behind it, or a slow disk gets nowhere
        saving += runs.stop(**variant(seed), seed=seed, longest_s=longest_s)["saving"]
        steps = runs.check(**variant(seed))
        assert max(steps, default=0) >= before, f"seed {seed}: an older one is lost"
        before = max(steps, default=0)
    print(f"{KILLS} kills, {saving} of them in a save, seeds 0 to {KILLS - 1}, step {before} reached, 0 checkpoints lost")
    assert before
    assert saving > KILLS // 3, "many were killed in the middle of a save"


@pytest.mark.parametrize("beside", [False, True], ids=["at once", "beside"])
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.timeout(300)
def test_a_rank_that_dies_at_any_call_of_a_save_costs_nothing(nursery, tmp_path, victim, beside):
    """Also while an older one is removed."""
    runs = Runs(nursery, tmp_path / "run", tmp_path)
    how: dict[str, Any] = {"stage": 2, "more": {"naught": {"keep_last": 2, "async_save": beside}}}
    for _ in range(3):
        assert runs.stop(**how, at=-1)["codes"] == [0, 0]
    calls = int(runs.lines(f"calls{victim}")[-1])
    died = 0
    for at in range(calls):
        before = runs.store.all()[-1].manifest.step
        died += runs.stop(**how, at=at, victim=victim)["codes"][victim] == -9
        assert before in runs.check(**how), f"call {at}"
    print(f"rank {victim}, {'beside' if beside else 'at once'}: died at {died} of {calls} calls of a save, 0 checkpoints lost")
    assert died > calls * 0.9


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("recipe", RESUMED)
def test_losses_after_kills_are_those_of_training_that_nobody_killed(nursery, tmp_path, stage, recipe):
    """Dropout, running statistics and the scale of the loss included."""
    how: dict[str, Any] = {"stage": stage, "more": RESUMED[recipe], "noisy": recipe == "fp32", "until": UNTIL}
    for name in ("quiet", "killed"):
        (tmp_path / name).mkdir()
    quiet = Runs(nursery, tmp_path / "quiet" / "run", tmp_path / "quiet")
    assert quiet.stop(**how, at=None, victim=None)["codes"] == [0, 0]
    runs, kills = Runs(nursery, tmp_path / "killed" / "run", tmp_path / "killed"), 0
    while max((saved.manifest.step for saved in runs.store.all()), default=0) < UNTIL:
        kills += -9 in runs.stop(**how, longest_s=0.1)["codes"]
        assert runs.count < 40, "it gets nowhere"
    assert set(runs.lines("losses")) == set(quiet.lines("losses"))
    assert set(runs.lines("reached")) == set(quiet.lines("reached"))
    print(f"stage {stage}, {recipe}: {kills} kills on the way to step {UNTIL}, every loss and every state the same bits")


@contextmanager
def loop_mounted(image: Path, at: Path) -> Iterator[None]:
    subprocess.run(["mount", "-o", "loop", image, at], check=True, capture_output=True)
    try:
        yield
    finally:
        subprocess.run(["umount", at], check=True, capture_output=True)


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("mkfs.ext4") is None, reason="needs root and mkfs.ext4")
@pytest.mark.timeout(3_600 if SOAK else 300)
def test_power_that_fails_costs_no_checkpoint_whose_save_has_returned(nursery, tmp_path):
    image, mount = tmp_path / "disk", tmp_path / "mount"
    mount.mkdir()
    image.write_bytes(b"")
    os.truncate(image, 64 << 20)
    subprocess.run(["mkfs.ext4", "-q", image], check=True)
    try:
        with loop_mounted(image, mount):
            runs = Runs(nursery, mount / "run", tmp_path)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no loop device can be mounted here: {error.stderr}")
    saving, steps = 0, []
    for seed in range(CUTS):
        with loop_mounted(image, mount):
            saving += runs.stop(**variant(seed), seed=seed, cut=str(mount), longest_s=0.15)["saving"]
        with loop_mounted(image, mount):
            steps = runs.check(**variant(seed))
            returned = [int(line) for line in runs.lines("saved")]
            assert max(steps, default=0) >= max(returned, default=0), f"seed {seed}: a save had returned and is lost"
            odd = [path.name for path in runs.folder.iterdir() if path.is_dir() and path.name[0] != "."]
            assert len(odd) == len(steps), f"seed {seed}: a folder looks like a checkpoint and is none"
    print(f"{CUTS} power cuts, {saving} of them in a save, seeds 0 to {CUTS - 1}, step {max(steps)} reached, 0 saves lost")
    assert steps
