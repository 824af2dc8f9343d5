"""What goes wrong: exceptions, poisoned gradients, ranks that differ. Nobody hangs and nothing is lost."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from menagerie import DEVICE, MODELS, WIDTH, Plain, batch_of, my_rank
from torch import Tensor, nn
from training import config_of, digest_of_weights, engine_of, start, take_steps
from workers import WorkerError, World

from naught.errors import RankMismatch, UsageError

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
    assert two.run(survives, stage, fault) == two.reference(survives, stage, "")


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
    clean = two.run(unpoisoned, stage)[0]
    for before, after, skipped, later in two.run(poisoned, stage):
        assert before == after
        assert skipped == 1
        assert later == clean


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


def test_a_rank_that_runs_another_order_is_told_which_unit_and_what_to_do_and_nobody_hangs():
    world = World(2)
    try:
        with pytest.raises(WorkerError, match=r'ScheduleError.*of unit "blocks\.1" does not fit into the plan.*ranks_may_differ'):
            world.run(goes_astray)
    finally:
        world.stop()


class Dropping(Plain):
    """Each rank computes with blocks that it draws, some of them twice, and draws none for the first passes."""

    def __init__(self, alike: int) -> None:
        super().__init__()
        self.alike, self.dice = alike, random.Random(my_rank())

    def body(self, x: Tensor) -> Tensor:
        self.alike -= 1
        for at in [0, 1, 2] if self.alike >= 0 else self.dice.choices(range(3), k=self.dice.randrange(4)):
            x = self.blocks[at](x)
        return x


def drop(stage: int, ours: dict[str, Any], alike: int, **zero: Any) -> tuple[list[float], str]:
    torch.manual_seed(0)
    engine = engine_of(Dropping(alike), config_of(stage, more={"naught": ours}, **zero))
    return take_steps(engine, 8), digest_of_weights(engine)


MAY: dict[str, Any] = {"ranks_may_differ": True}


@pytest.mark.parametrize(
    ("stage", "ours", "zero"),
    [
        (1, {}, {}),
        (3, {}, {"stage3_param_persistence_threshold": 0}),
        (2, {}, {"offload_optimizer": {"device": "cpu"}}),
        (3, {"update_in_backward": True}, {"stage3_param_persistence_threshold": 0}),
    ],
)
def test_ranks_that_may_differ_run_what_they_like_in_any_step(two, stage, ours, zero):
    assert two.run(drop, stage, ours | MAY, 3, **zero) == two.run(drop, 0, MAY, 3)


def differ_and_agree(stage: int) -> tuple[list[float], str]:
    """In the first step, and then by chance not."""
    torch.manual_seed(0)
    model = Dropping(0)
    engine = engine_of(model, config_of(stage))
    losses = take_steps(engine, 2)
    model.alike = 3
    return losses + take_steps(engine, 6, first=2), digest_of_weights(engine)


def test_ranks_that_have_differed_once_may_do_so_again(two):
    assert two.run(differ_and_agree, 3) == two.run(differ_and_agree, 0)


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


# --- backwards, steps and zero_grad in any order ----------------------------------------------------------------------


def odd_order(stage: int, how: str) -> tuple[str, float | None]:
    engine = start(stage)
    take_steps(engine, 2)  # by the plan from here on
    losses = [lambda at=at: engine(batch_of(at, my_rank())) for at in (5, 6)]
    if how in ("one by one", "together"):
        first, second = losses[0](), losses[1]()
        if how == "together":
            engine.backward(first + second)
        else:
            engine.backward(first)
            engine.backward(second)
    elif how in ("gathered between", "no_sync around the forward", "alone"):
        if how == "no_sync around the forward":
            with engine.no_sync():
                loss = losses[0]()
        else:
            loss = losses[0]()
        if how == "gathered between":
            with engine.gathered():
                sum(param.sum() for param in engine.module.parameters())
        engine.backward(loss)
    elif how == "no_sync around both":
        with engine.no_sync():
            engine.backward(losses[0]())
    elif how == "thrown away":
        engine.backward(losses[1]())
        engine.optimizer.zero_grad()
        engine.backward(losses[0]())
    engine.step()
    return digest_of_weights(engine), engine.get_global_grad_norm()


@pytest.mark.parametrize(
    ("how", "like"),
    [
        ("one by one", "together"),
        ("gathered between", "alone"),
        ("no_sync around the forward", "alone"),
        ("no_sync around both", "alone"),
        ("thrown away", "alone"),
    ],
)
def test_gradients_are_neither_lost_nor_kept_too_long(two, how, like):
    wanted = two.reference(odd_order, 0, like)
    for stage in range(4):
        found = two.run(odd_order, stage, how)
        if how == "one by one":  # two sums round differently from one
            assert found[0][1] == pytest.approx(wanted[0][1], rel=1e-5)
        else:
            assert found == wanted


def test_a_step_that_failed_leaves_no_gradients_behind():
    engine = start(3)
    take_steps(engine, 1)
    nn.init.constant_(engine.module.head.weight, 0.1)
    with pytest.raises(UsageError, match="was written to while it was released"):
        take_steps(engine, 1, first=1)
    assert take_steps(engine, 2, first=2) == take_steps_without_the_second()


def take_steps_without_the_second() -> list[float]:
    engine = start(3)
    take_steps(engine, 1)
    return take_steps(engine, 2, first=2)


class Aside(nn.Module):
    """A block that leaves an auxiliary loss in an attribute, made of its own output."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.gate = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        y = self.fc(x)
        self.loss = self.gate(y).square().mean()
        return y


class Asides(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Aside() for _ in range(3))


def with_asides(stage: int) -> tuple[list[float], str]:
    torch.manual_seed(0)
    engine = engine_of(Asides(), config_of(stage))
    losses = []
    for step in range(3):
        loss = engine(batch_of(step, my_rank())) + sum(block.loss for block in engine.module.blocks)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses, digest_of_weights(engine)


def test_auxiliary_losses_that_modules_leave_in_attributes(two):
    found = [two.run(with_asides, stage) for stage in range(4)]
    assert all(run == found[0] for run in found)


def around(stage: int, reentrant: bool) -> str:
    from torch.utils.checkpoint import checkpoint

    torch.manual_seed(0)
    engine = engine_of(nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3))), config_of(stage))
    for step in range(3):
        x = torch.full((2, WIDTH), step + 1.0, device=DEVICE, requires_grad=True)
        engine.backward(checkpoint(engine, x, use_reentrant=reentrant).square().mean())
        engine.step()
    return digest_of_weights(engine)


def test_a_checkpoint_around_the_engine():
    found = {around(stage, reentrant) for stage in range(4) for reentrant in (False, True)}
    assert len(found) == 1


def test_a_graph_of_gradients_can_be_made():
    engine = start(2)
    with pytest.warns(UserWarning, match="create_graph=True"):
        engine(batch_of(0, 0)).backward(create_graph=True)
    engine.step()
    assert engine.global_steps == 1


def test_one_model_has_one_engine_at_a_time_and_a_destroyed_one_says_so():
    engine = start(3)
    with pytest.raises(UsageError, match="belongs to another engine already"):
        engine_of(engine.module, config_of(1))
    engine.destroy()
    engine.destroy()
    for call in (lambda: engine(batch_of(0, 0)), engine.step):
        with pytest.raises(UsageError, match="the engine was destroyed"):
            call()
    assert not any(engine.report()["live"].values())
    take_steps(engine_of(engine.module, config_of(1)), 1)
