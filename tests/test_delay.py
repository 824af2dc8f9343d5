"""A delayed update: gradients are taken at weights that are one step old, and nothing else is different."""

from __future__ import annotations

import pytest
import torch
from menagerie import MODELS
from test_offload import BF16, HOST, SMALL
from training import batch_of, config_of, digest_in_32_bits, engine_of, my_rank, start, take_steps

from naught.errors import ConfigError
from naught.fragments import safe_get_full_fp32_param

STEPS = 7


def delayed(stage: int, after: int, more: dict | None = None, **options) -> object:
    more = more or {}
    ours = {"naught": more.get("naught", {}) | {"delay_update_after": after}}
    return start(stage, clip=0.5, more=more | ours, offload_optimizer=HOST, **options)


def train_late(stage: int, after: int, more: dict | None = None) -> tuple[list[float], str]:
    engine = delayed(stage, after, more)
    return take_steps(engine, STEPS), digest_in_32_bits(engine)


def train_late_by_hand(after: int) -> tuple[list[float], str]:
    """An engine that delays nothing, and a script that puts old weights in place for each forward and backward."""
    engine = start(2, clip=0.5, offload_optimizer=HOST)
    params = list(engine.module.parameters())

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
        loss = engine(batch_of(step, my_rank()))
        engine.backward(loss)
        swap(newest)
        engine.step()
        losses.append(loss.item())
        history.append(read())
    return losses, digest_in_32_bits(engine)


@pytest.mark.parametrize(("stage", "after"), [(2, 0), (1, 3), (3, 2)])
def test_it_is_training_with_weights_of_the_step_before(two, stage, after):
    found = two.run(train_late, stage, after)
    assert found == two.run(train_late_by_hand, after)
    assert found != two.run(train_late, stage, STEPS), "it makes a difference"


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


def test_a_step_that_is_skipped_is_not_followed():
    engine = delayed(2, 0, {"bf16": {"enabled": True, "check_grad_overflow": True}})
    take_steps(engine, 3)
    before = digest_in_32_bits(engine)
    engine.backward(engine(batch_of(3, 0)) * float("inf"))
    engine.step()
    assert engine.skipped_steps == 1
    assert digest_in_32_bits(engine) == before
    take_steps(engine, 2, first=4)
    assert digest_in_32_bits(engine) != before


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
