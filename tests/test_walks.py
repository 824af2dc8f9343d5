"""Random walks: training is saved and goes on in another world, at another stage, in another precision, again and again.

What must come along is the state itself: 32-bit weights, moments and counters, bit for bit.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test
from test_parity import SOAK
from test_resume import RECIPES, make
from training import digest_of_what_is_trained, take_steps
from workers import World

from naught.engine import Engine

pytestmark = pytest.mark.usefixtures("one_thread")

MODELS = ["tied", "frozen", "lora", "uneven_sizes_and_users_hooks", "unused_parameters", "buffers"]


class State(NamedTuple):
    """Training as it must be the same anywhere."""

    tensors: str
    updates: list[int]
    counts: tuple[int, int, int]


def state_of(engine: Engine) -> State:
    updates = {
        slot.name: count
        for unit in engine.schedule.units.values()
        for segment in unit.trained
        for slot, count in zip(segment.layout.slots, segment.states.steps, strict=True)
    }
    counts = (engine.global_steps, engine.skipped_steps, engine.global_samples)
    return State(digest_of_what_is_trained(engine), [updates[name] for name in sorted(updates)], counts)


def goes_on(folder: Path, where: dict[str, Any], tag: str | None, steps: int, *, beside: bool) -> tuple[State | None, State]:
    """What was loaded, and what was saved after some steps."""
    engine = make(where["stage"], where["name"], where["recipe"], seed=where["stage"])
    loaded = None
    if tag is not None:
        engine.load_checkpoint(folder, tag=tag)
        loaded = state_of(engine)
    take_steps(engine, steps, first=engine.global_steps)
    saved = state_of(engine)
    engine.save_checkpoint(folder, tag=f"after{0 if tag is None else int(tag[5:]) + 1}", asynchronous=beside)
    engine.destroy()
    return loaded, saved


class Walk(RuleBasedStateMachine):
    worlds: dict[int, World]
    moves = 0

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.saved: list[State] = []

    @initialize(
        name=st.sampled_from(MODELS), world=st.integers(1, 4), stage=st.integers(0, 3), recipe=st.sampled_from(sorted(RECIPES))
    )
    def begin(self, name: str, world: int, stage: int, recipe: str) -> None:
        self.name = name
        self._go(world, {"name": name, "stage": stage, "recipe": recipe}, None, 1, beside=False)

    @precondition(lambda self: self.saved)
    @rule(
        world=st.integers(1, 4),
        stage=st.integers(0, 3),
        recipe=st.sampled_from(sorted(RECIPES)),
        steps=st.integers(0, 2),
        back=st.integers(0, 2),
        beside=st.booleans(),
    )
    def move(self, world: int, stage: int, recipe: str, steps: int, back: int, beside: bool) -> None:
        """Go on from the last checkpoint, or from an earlier one as if the later ones were not there."""
        del self.saved[max(1, len(self.saved) - back) :]
        for later in range(len(self.saved), 20):
            shutil.rmtree(self.folder / f"after{later}", ignore_errors=True)
        where = {"name": self.name, "stage": stage, "recipe": recipe}
        self._go(world, where, f"after{len(self.saved) - 1}", steps, beside=beside)

    def _go(self, world: int, where: dict[str, Any], tag: str | None, steps: int, *, beside: bool) -> None:
        answers = self.worlds[world].run(goes_on, self.folder, where, tag, steps, beside=beside)
        if tag is not None:
            assert all(loaded == self.saved[-1] for loaded, _ in answers), f"{where} on {world} ranks"
        assert all(saved == answers[0][1] for _, saved in answers)
        self.saved.append(answers[0][1])
        Walk.moves += 1

    def teardown(self) -> None:
        shutil.rmtree(self.folder)


@pytest.mark.timeout(36_000 if SOAK else 300)
def test_training_walks_through_worlds_stages_and_precisions_unchanged(worlds):
    Walk.worlds, Walk.moves = worlds, 0
    walks = int(os.environ.get("NAUGHT_WALKS", "5000")) if SOAK else 50
    run_state_machine_as_test(
        Walk, settings=settings(max_examples=walks, stateful_step_count=3, deadline=None, derandomize=not SOAK)
    )
    print(f"{walks} walks, {Walk.moves} moves, every state the same bits")
    assert walks <= Walk.moves
