"""What goes wrong: exceptions, poisoned gradients, ranks that differ. Nobody hangs and nothing is lost."""

from __future__ import annotations

import pytest
import torch
from menagerie import MODELS, WIDTH, Plain, batch_of, my_rank
from torch import nn
from training import config_of, digest_of_weights, engine_of, start, take_steps
from workers import WorkerError, World

from naught.errors import RankMismatch

pytestmark = pytest.mark.usefixtures("one_thread")


class Faulty(Plain):
    fault = ""

    def body(self, x):
        x = self.blocks[0](x)
        if self.fault == "forward":
            raise ValueError("bad batch")
        if self.fault == "backward":
            x.register_hook(lambda _: (_ for _ in ()).throw(ValueError("bad gradient")))
        return self.blocks[2](self.blocks[1](x))


def survives(stage: int, fault: str) -> tuple[list[float], str, dict]:
    torch.manual_seed(0)
    model = Faulty()
    engine = engine_of(model, config_of(stage))
    losses = take_steps(engine, 2)
    model.fault = fault
    if fault:
        with pytest.raises(ValueError, match="bad"):
            engine.backward(engine(batch_of(50, my_rank())))
        model.fault = ""
    losses += take_steps(engine, 2, first=2)
    live = {name: nbytes for name, nbytes in engine.report()["live"].items() if nbytes}
    return losses, digest_of_weights(engine), live


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("fault", ["forward", "backward"])
def test_an_exception_in_the_middle_of_a_pass_leaves_the_engine_as_it_was(two, stage, fault):
    assert two.run(survives, stage, fault) == two.run(survives, stage, "")


def poisoned(stage: int) -> tuple[str, str, int, str]:
    engine = start(stage, clip=0.5)
    take_steps(engine, 2)
    before = digest_of_weights(engine)
    loss = engine(batch_of(2, my_rank()))
    engine.backward(loss * (float("nan") if my_rank() == 1 else 1.0))
    engine.step()
    after = digest_of_weights(engine)
    take_steps(engine, 1, first=3)
    return before, after, engine.skipped_steps, digest_of_weights(engine)


def unpoisoned(stage: int) -> str:
    engine = start(stage, clip=0.5)
    take_steps(engine, 2)
    take_steps(engine, 1, first=3)
    return digest_of_weights(engine)


@pytest.mark.parametrize("stage", range(4))
def test_a_gradient_that_is_not_finite_on_one_rank_changes_nothing_on_any(two, stage):
    for before, after, skipped, later in two.run(poisoned, stage):
        assert before == after
        assert skipped == 1
        assert later == two.run(unpoisoned, stage)[0]


def starts_otherwise(what: str) -> str:
    torch.manual_seed(0)
    model = MODELS["plain"]()
    config = config_of(3)
    if my_rank() == 1:
        if what == "configuration":
            config["zero_optimization"]["stage"] = 2
        elif what == "shape":
            model.blocks[1].up = nn.Linear(WIDTH, 96)
        elif what == "trainability":
            model.norm.requires_grad_(False)
        elif what == "tie":
            model.head.weight = model.tok.weight
        elif what == "name":
            model.other = model.__dict__["_modules"].pop("head")
        elif what == "extra":
            model.extra = nn.Linear(2, 2)
    with pytest.raises(RankMismatch) as raised:
        engine_of(model, config)
    return str(raised.value)


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("configuration", "configuration key zero_optimization.stage: 3 on rank 0, 2 on rank 1"),
        (
            "shape",
            '"blocks.1.up.weight" [128, 64] float32, trained on rank 0, "blocks.1.up.weight" [96, 64] float32, trained on rank 1',
        ),
        ("trainability", '"norm.weight" [64] float32, trained on rank 0, "norm.weight" [64] float32, frozen on rank 1'),
        ("tie", 'tied to "tok.weight" on rank 1'),
        ("name", '"other.weight" [64, 64] float32, trained on rank 1'),
        ("extra", 'none on rank 0, "extra.weight" [2, 2] float32, trained on rank 1'),
    ],
)
def test_ranks_that_differ_are_told_so_by_name_on_every_rank(two, what, words):
    messages = two.run(starts_otherwise, what)
    assert len(set(messages)) == 1
    assert words in messages[0]


class Wayward(Plain):
    """From the third pass on, one rank turns the order of two blocks around."""

    passes = 0

    def body(self, x):
        self.passes += 1
        order = [0, 2, 1] if self.passes > 2 and my_rank() == 1 else [0, 1, 2]
        for at in order:
            x = self.blocks[at](x)
        return x


def goes_astray() -> None:
    torch.manual_seed(0)
    engine = engine_of(Wayward(), config_of(3))
    engine.schedule.group.patience_s = 2.0
    take_steps(engine, 4)


def test_a_rank_that_runs_another_order_is_told_which_unit_and_nobody_hangs():
    world = World(2)
    try:
        with pytest.raises(WorkerError, match=r'ScheduleError.*of unit "blocks\.1" is not in the plan'):
            world.run(goes_astray)
    finally:
        world.stop()


def changes_together(stage: int) -> list[float]:
    """All ranks change their order at once: the plan is left and a new one is made."""

    class Changing(Plain):
        passes = 0

        def body(self, x):
            self.passes += 1
            for at in [2, 1, 0] if self.passes > 3 else [0, 1, 2]:
                x = self.blocks[at](x)
            return x

    torch.manual_seed(0)
    return take_steps(engine_of(Changing(), config_of(stage)), 7)


def test_ranks_that_change_their_order_together_go_on(two):
    assert two.run(changes_together, 3) == two.run(changes_together, 0)
