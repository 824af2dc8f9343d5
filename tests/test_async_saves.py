"""Saves that are written while training goes on: what they hold, what they cost, and how their errors are heard."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from faults import faults
from menagerie import MODELS, my_rank
from test_resume import RECIPES, Reached, loads, make, reached
from training import config_of, engine_of, take_steps
from workers import run_script

from naught import utils
from naught.checkpoints import RealDisk, Store
from naught.errors import NaughtError, StorageError
from naught.saves import background, snapshot
from naught.saves.snapshot import Snapshot
from naught.streams import HostCopies

pytestmark = pytest.mark.usefixtures("one_thread")


@contextmanager
def copies_that_wait_for_the_change() -> Iterator[list[str]]:
    """Private states are copied at the last moment: when somebody who wants to change them asks, or is late by 2 s."""
    asked, story = threading.Event(), []

    class Settled(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            asked.set()
            return super().wait(timeout)

    real = HostCopies.copy

    def copy(host: HostCopies, tensor: torch.Tensor) -> torch.Tensor:
        if threading.current_thread() is not threading.main_thread():
            story.append("asked" if asked.wait(2) else "nobody asked")
        return real(host, tensor)

    class Watched(Snapshot):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            self.settled = Settled()

    HostCopies.copy, background.Snapshot = copy, Watched  # type: ignore[method-assign,misc]
    try:
        yield story
    finally:
        HostCopies.copy, background.Snapshot = real, Snapshot  # type: ignore[method-assign,misc]


def change_by(engine: Any, how: str) -> None:
    param = next(iter(engine.module.parameters()))
    if how == "step":
        take_steps(engine, 1, first=3)
    elif how == "gathered":
        with engine.gathered(writer=0):
            param.data.add_(1)
    elif how == "setter":
        utils.safe_set_full_fp32_param(param, utils.safe_get_full_fp32_param(param) + 1)
    elif how == "away":
        engine.offload_states()
        engine.reload_states()
        take_steps(engine, 1, first=3)


def saves_beside(folder: Path, stage: int, name: str, recipe: str, how: str) -> tuple[Reached, set[str]]:
    engine = make(stage, name, recipe)
    take_steps(engine, 3)
    before = reached(engine)
    with copies_that_wait_for_the_change() as story:
        engine.save_checkpoint(folder, client_state={"epoch": 2, "names": ["a"]}, asynchronous=True)
        change_by(engine, how)
        engine.wait_for_checkpoint()
    assert engine.report()["live"]["snapshots"] == 0
    assert engine.report()["peak"]["snapshots"] > 0
    return before, set(story)


@pytest.mark.parametrize("how", ["step", "gathered", "setter", "away"])
@pytest.mark.parametrize(("stage", "recipe"), [(0, "fp32"), (1, "bf16"), (2, "fp16"), (3, "fp32"), (3, "bf16")])
def test_what_is_saved_is_what_was_there_whatever_changes_it_next(two, tmp_path, stage, recipe, how):
    saved, stories = zip(*two.run(saves_beside, tmp_path, stage, "tied", recipe, how), strict=True)
    assert stories == ({"asked"}, {"asked"}), "a change waits until its states have been copied"
    assert [there for there, _ in two.run(loads, tmp_path, 3 - stage, "tied", recipe)] == list(saved)


def saves_beside_a_backward(folder: Path, stage: int, zero: dict[str, Any]) -> tuple[Reached, Reached]:
    def make_early() -> Any:
        more = RECIPES["bf16"] | {"naught": {"update_in_backward": True}}
        return engine_of(MODELS["tied"](), config_of(stage, more=more, **zero))

    engine = make_early()
    take_steps(engine, 3)
    before = reached(engine)
    with copies_that_wait_for_the_change():
        engine.save_checkpoint(folder, asynchronous=True)
        take_steps(engine, 1, first=3)
        engine.wait_for_checkpoint()
    engine = make_early()
    engine.load_checkpoint(folder)
    return before, reached(engine)


@pytest.mark.parametrize(("stage", "zero"), [(1, {}), (3, {}), (2, {"offload_optimizer": {"device": "cpu"}})])
def test_what_is_saved_is_what_was_there_also_where_the_backward_updates(two, tmp_path, stage, zero):
    for before, loaded in two.run(saves_beside_a_backward, tmp_path, stage, zero):
        assert loaded == before


def trains_with_saves(folder: Path, stage: int, recipe: str, *, saving: bool) -> tuple[list[float], Reached]:
    engine = make(stage, "noisy" if recipe == "fp32" else "tied", recipe)
    losses: list[float] = []
    for step in range(5):
        losses += take_steps(engine, 1, first=step)
        if saving:
            engine.save_checkpoint(folder, asynchronous=True)
    engine.wait_for_checkpoint()
    return losses, reached(engine)


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("recipe", RECIPES)
def test_saves_beside_training_change_nothing_of_it(two, tmp_path, stage, recipe):
    with_saves = two.run(trains_with_saves, tmp_path, stage, recipe, saving=True)
    assert with_saves == two.run(trains_with_saves, tmp_path, stage, recipe, saving=False)
    store = Store(RealDisk(), str(tmp_path))
    assert [saved.tag for saved in store.all()] == [f"global_step{step}" for step in range(1, 6)]
    for saved in store.all():
        store.verify(saved)


def test_what_a_user_writes_without_asking_does_not_reach_a_save_that_has_begun(tmp_path):
    engine = make(1, "plain", "fp32")
    take_steps(engine, 3)
    before = reached(engine)
    param = next(iter(engine.module.parameters()))
    with copies_that_wait_for_the_change():
        engine.save_checkpoint(tmp_path, asynchronous=True, client_state={"epoch": 2, "names": ["a"]})
        param.data.add_(1)
        engine.background.settle()
        engine.wait_for_checkpoint()
    assert loads(tmp_path, 1, "plain", "fp32")[0] == before


# --- errors -----------------------------------------------------------------------------------------------------------


def hears_of_it(folder: Path, victim: int, through: str) -> tuple[str, list[str], int]:
    """A disk that fails in the thread of one rank, and who says so."""
    engine = make(2, "plain", "fp32")
    take_steps(engine, 1)
    heard = ""
    with faults(str(folder), at=None) as rehearsal:
        engine.save_checkpoint(folder, asynchronous=True)
        engine.wait_for_checkpoint()
    at = rehearsal.calls.index("fsync") if my_rank() == victim else None
    take_steps(engine, 1, first=1)
    with faults(str(folder), at):
        engine.save_checkpoint(folder, asynchronous=True)
        engine.background.running.join()
    try:
        if through == "step":
            take_steps(engine, 1, first=2)
        elif through == "save":
            engine.save_checkpoint(folder, tag="other")
        elif through == "load":
            engine.load_checkpoint(folder)
        elif through == "wait":
            engine.wait_for_checkpoint()
        else:
            engine.destroy()
    except NaughtError as error:
        heard = f"{type(error).__name__}: {error}"
    names = sorted(path.name for path in folder.iterdir())
    engine.schedule.group.meet()
    if not engine.destroyed:
        steps = engine.global_steps
        take_steps(engine, 1, first=steps)  # once is enough, and training goes on
        engine.save_checkpoint(folder, asynchronous=True)
        engine.destroy()
        return heard, names, steps
    return heard, names, 0


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("through", ["step", "save", "load", "wait", "destroy"])
def test_an_error_of_a_save_is_heard_on_every_rank_by_whatever_comes_next(two, tmp_path, victim, through):
    for heard, names, steps in two.run(hears_of_it, tmp_path, victim, through):
        assert heard.startswith("StorageError: cannot sync ")
        assert "EIO" in heard
        assert names == ["global_step1", "latest"]
        assert steps == {"step": 3, "destroy": 0}.get(through, 2), "the step itself was taken"


def test_too_little_memory_is_said_before_anything_is_copied(tmp_path, monkeypatch):
    engine = make(1, "plain", "fp32")
    take_steps(engine, 1)
    monkeypatch.setattr(snapshot, "free_host_bytes", lambda: 1000)
    with pytest.raises(
        StorageError, match=r"needs .* of this host.s memory, and 1.00 kB are free\. Save with asynchronous=False"
    ):
        engine.save_checkpoint(tmp_path, asynchronous=True)
    assert list(tmp_path.iterdir()) == []
    engine.save_checkpoint(tmp_path)


SCRIPT = """
import logging, sys, torch, naught
from faults import Faults, faults
logging.basicConfig()
naught.comm.init_distributed("gloo", verbose=False)
torch.manual_seed(0)
engine, *_ = naught.initialize(model=torch.nn.Linear(300, 300), config={"train_micro_batch_size_per_gpu": 1,
    "optimizer": {"type": "AdamW"}, "zero_optimization": {"stage": 1}, "naught": {"async_save": True}})
engine.backward(engine(torch.ones(1, 300)).mean())
engine.step()
struck = faults(sys.argv[1])
told = struck.__enter__()
engine.save_checkpoint(sys.argv[1], asynchronous=True)
if sys.argv[2] == "broken":
    told.strike_next("fsync")
if sys.argv[2] == "gone":
    torch.distributed.destroy_process_group()
"""


@pytest.mark.parametrize("how", ["fine", "gone"])
def test_a_script_that_ends_while_it_saves_has_saved(tmp_path, how):
    ended = run_script(SCRIPT, str(tmp_path), how)
    assert [code for code, *_ in ended] == [0, 0], ended
    store = Store(RealDisk(), str(tmp_path))
    store.verify(store.find("global_step1"))


def test_a_script_that_ends_while_its_save_fails_says_so_and_ends_with_1(tmp_path):
    ended = run_script(SCRIPT, str(tmp_path), "broken")
    assert [code for code, *_ in ended] == [1, 1], ended
    for *_, said in ended:
        assert "a checkpoint that was being saved when the script ended is not there: cannot" in said
    assert [path.name for path in tmp_path.iterdir()] == []


def begins_a_thread_that_cannot_start(folder: Path) -> tuple[str, list[str]]:
    engine = make(2, "plain", "fp32")
    take_steps(engine, 1)
    real = threading.Thread.start

    def start(thread: threading.Thread) -> None:
        if thread.name.startswith("naught-save") and my_rank() == 1:
            raise RuntimeError("can't start new thread")
        real(thread)

    threading.Thread.start = start  # type: ignore[method-assign]
    try:
        engine.save_checkpoint(folder, asynchronous=True)
    except Exception as error:
        said = str(error)
    else:
        said = "nothing"
    finally:
        threading.Thread.start = real  # type: ignore[method-assign]
    engine.schedule.group.meet()
    names = sorted(path.name for path in folder.iterdir())
    take_steps(engine, 1, first=1)
    return said, names


def test_a_thread_that_cannot_start_is_an_error_and_training_goes_on(two, tmp_path):
    for said, names in two.run(begins_a_thread_that_cannot_start, tmp_path):
        assert "can't start new thread" in said
        assert names == []
