"""A delayed update: gradients are taken at weights that are one step old, and nothing else is different."""

from __future__ import annotations

import threading

import pytest
import torch
from menagerie import MODELS
from test_offload import BF16, HOST, SMALL
from training import (
    DEVICE,
    batch_of,
    config_of,
    digest_in_32_bits,
    engine_of,
    my_rank,
    start,
    take_steps,
)

from naught import initialize
from naught.beside import Beside
from naught.errors import ConfigError, UsageError
from naught.fragments import safe_get_full_fp32_param
from naught.host_crew import HostCrew
from naught.rounding import nearest

STEPS = 7


def delayed(stage: int, after: int, more: dict | None = None, **options):
    more = more or {}
    ours = {"naught": more.get("naught", {}) | {"delay_update_after": after}}
    return start(stage, clip=0.5, more=more | ours, **({"offload_optimizer": HOST} | options))


def train_late(stage: int, after: int, more: dict | None = None, **options) -> tuple[list[float], str]:
    engine = delayed(stage, after, more, **options)
    return take_steps(engine, STEPS * options.get("accumulation", 1)), digest_in_32_bits(engine)


def train_late_by_hand(after: int, **options) -> tuple[list[float], str]:
    """An engine that delays nothing, and a script that puts old weights in place for each forward and backward."""
    engine = start(2, clip=0.5, **({"offload_optimizer": HOST} | options))
    params, each = list(engine.module.parameters()), options.get("accumulation", 1)

    def swap(values: list[torch.Tensor]) -> list[torch.Tensor]:
        with engine.gathered(), torch.no_grad():
            before = [param.clone() for param in params]
            for param, value in zip(params, values, strict=True):
                param.copy_(value)
        return before

    def read() -> list[torch.Tensor]:
        with engine.gathered():
            return [param.detach().clone() for param in params]

    history, losses = [read()], []
    for step in range(STEPS):
        newest = swap(history[step] if step <= after else history[step - 1])
        for micro in range(each):
            loss = engine(batch_of(step * each + micro, my_rank()))
            engine.backward(loss)
            losses.append(loss.item())
            if micro == each - 1:
                swap(newest)
            engine.step()
        history.append(read())
    return losses, digest_in_32_bits(engine)


@pytest.mark.parametrize(("stage", "after"), [(2, 0), (1, 3), (3, 2)])
def test_it_is_training_with_weights_of_the_step_before(two, stage, after):
    found = two.run(train_late, stage, after)
    assert found == two.reference(train_late_by_hand, after)
    assert found != two.run(train_late, stage, STEPS), "it makes a difference"


@pytest.mark.parametrize(
    ("stage", "options"),
    [
        (2, {"name": "experts_by_rank_and_batch"}),  # some are not used in every step, and catch up all the same
        (1, {"name": "unused_parameters"}),
        (3, {"accumulation": 3}),
        (2, {"more": {"naught": {"lazy_weights": False}}}),
    ],
)
def test_it_is_the_same_whatever_a_step_consists_of(two, stage, options):
    more = options.pop("more", None)
    assert two.run(train_late, stage, 1, more, **options) == two.reference(train_late_by_hand, 1, **options)


@pytest.mark.parametrize("more", [BF16, SMALL, BF16 | {"naught": {"wide_gradients": False}}])
def test_it_is_the_same_at_every_stage(worlds, more):
    ones = [worlds[1].run(train_late, stage, 1, more) for stage in (1, 2, 3)]
    twos = [worlds[2].run(train_late, stage, 1, more) for stage in (1, 2, 3)]
    assert ones[0] == ones[1] == ones[2]
    assert twos[0] == twos[1] == twos[2]


def test_until_it_begins_nothing_is_different(two):
    assert two.run(train_late, 2, STEPS, BF16) == two.run(train_in_time, BF16)


def train_in_time(more: dict) -> tuple[list[float], str]:
    engine = start(2, clip=0.5, more=more, offload_optimizer=HOST)
    return take_steps(engine, STEPS), digest_in_32_bits(engine)


def save_on_the_way(folder: str, asynchronous: bool) -> tuple[list[float], str]:
    engine = delayed(2, 1, BF16)
    take_steps(engine, 4)
    engine.save_checkpoint(folder, asynchronous=asynchronous)
    return take_steps(engine, 3, first=4), digest_in_32_bits(engine)


def resume(folder: str) -> tuple[list[float], str]:
    engine = delayed(2, 1, BF16)
    take_steps(engine, 3)  # and something is under way when the checkpoint comes
    engine.load_checkpoint(folder)
    return take_steps(engine, 3, first=4), digest_in_32_bits(engine)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_who_saves_and_goes_on_goes_on_like_one_who_loads(two, tmp_path, asynchronous):
    assert two.run(save_on_the_way, str(tmp_path), asynchronous) == two.run(resume, str(tmp_path))


def look_between_steps() -> tuple[bool, bool]:
    engine = delayed(2, 0, BF16)
    take_steps(engine, 3)
    masters = [safe_get_full_fp32_param(param).clone() for param in engine.module.parameters()]
    with engine.gathered():
        caught_up = all(
            torch.equal(param, master.to(param.dtype)) for param, master in zip(engine.module.parameters(), masters, strict=True)
        )
    kept = [safe_get_full_fp32_param(param) for param in engine.module.parameters()]
    return caught_up, all(map(torch.equal, kept, masters))


def test_whoever_looks_at_the_weights_finds_the_last_update_in_them(two):
    assert two.run(look_between_steps) == [(True, True)] * 2


def skip_one() -> tuple[list[float], int]:
    engine = delayed(2, 0, {"bf16": {"enabled": True, "check_grad_overflow": True}})
    losses = take_steps(engine, 3)
    engine.backward(engine(batch_of(3, my_rank())) * float("inf"))
    engine.step()
    engine.eval()
    with torch.no_grad():
        losses += [engine(batch_of(4, my_rank())).item()]
    engine.train()
    return [*losses, *take_steps(engine, 1, first=4)], engine.skipped_steps


def test_a_step_that_is_skipped_leaves_weights_as_they_are(two):
    for losses, skipped in two.run(skip_one):
        assert skipped == 1
        assert losses[-1] == losses[-2], "an evaluation sees what the next forward sees"


def look_inside_a_step(stage: int) -> list[str]:
    engine, stories = delayed(stage, 0), []
    take_steps(engine, 2)
    loss = engine(batch_of(2, my_rank()))
    for look in (engine.gathered, lambda: engine.save_checkpoint("never")):
        with pytest.raises(UsageError) as found, look():
            pass
        stories.append(str(found.value))
    engine.backward(loss)
    with pytest.raises(UsageError, match="a step is under way"), engine.gathered():
        pass
    engine.destroy()  # nobody takes the step any more
    return stories


@pytest.mark.parametrize("stage", [2, 3])
def test_weights_do_not_change_under_a_step_that_is_under_way(two, stage):
    for stories in two.run(look_inside_a_step, stage):
        assert all("a step is under way with weights that its update has still to reach" in story for story in stories)


def test_an_optimizer_that_works_in_step_cannot_be_delayed():
    model = MODELS["plain"]().to(DEVICE)
    config = config_of(2, more={"naught": {"delay_update_after": 1}}, offload_optimizer=HOST)
    del config["optimizer"]
    with pytest.raises(UsageError, match=r"delay_update_after is not for this optimizer \(NAdam\)"):
        initialize(model=model, optimizer=torch.optim.NAdam(model.parameters(), lr=1e-3), config=config)


def test_nothing_to_do_is_not_over_before_what_is_under_way():
    crew, may_go, done = HostCrew(None), threading.Event(), []
    beside = Beside(crew, None, nearest)
    beside.update(1, lambda _: (may_go.wait(), done.append(1)))
    beside.update(0, done.append)
    assert not beside.updating.done()
    may_go.set()
    beside.wait()
    assert done == [1]
    crew.stop()


def held(after: int | None) -> tuple[int, int]:
    engine = start(2, more=BF16 | {"naught": {"delay_update_after": after}}, offload_optimizer=HOST)
    take_steps(engine, 3)
    return engine.report()["peak"]["host gradients"], engine.planned()["host gradients"]


def test_the_host_has_room_for_a_second_sum(two):
    late, in_time = (two.run(held, after) for after in (1, None))
    for (had, planned), (once, planned_once) in zip(late, in_time, strict=True):
        assert had == planned == 2 * once == 2 * planned_once


@pytest.mark.parametrize(
    ("zero", "words"),
    [
        ({}, "only an update on the host is delayed"),
        ({"offload_optimizer": HOST, "offload_param": HOST}, "weights that rest on the host are made of what is updated there"),
    ],
)
def test_what_cannot_be_delayed_is_told(zero, words):
    with pytest.raises(ConfigError, match=words):
        engine_of(MODELS["plain"](), config_of(3, **zero) | {"naught": {"delay_update_after": 10}})
