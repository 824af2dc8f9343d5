"""States on the host that visit the device to be updated: the same training as without offloading, on a GPU as well, where the
host's kernel rounds otherwise."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from unittest.mock import patch

import pytest
import torch
from menagerie import MODELS
from test_offload import BF16, FP16, HOST, NARROW, ON_GPU, PLACES, SMALL
from training import DEVICE, Outcome, batch_of, config_of, digest_in_32_bits, engine_of, my_rank, start, take_steps, train

from naught import initialize
from naught.errors import ConfigError, UsageError
from naught.present import _Here
from naught.sites import DeviceSite, HostSite
from naught.steps import visitors


def memory_of_its_own() -> AbstractContextManager[object]:
    """A GPU has it. Of a CPU it is only said: then its staging is there, and what visits it goes through."""
    return nullcontext() if ON_GPU else patch.object(_Here, "is_apart", return_value=True)


def share(of_it: float, more: dict) -> dict:
    return more | {"naught": more.get("naught", {}) | {"device_share": of_it}}


def visit(name: str, stage: int, of_it: float, *, more: dict, **options) -> Outcome:
    with memory_of_its_own():
        return train(name, stage, more=share(of_it, more), **options)


@pytest.mark.parametrize(
    ("name", "size", "accumulation", "clip", "place", "more", "of_it"),
    [
        ("plain", 1, 1, 0.5, "stage2-offload", BF16, 1.0),
        ("tied", 2, 1, 0.5, "stage1-offload", {}, 1.0),
        ("plain", 2, 3, 0.5, "stage3-offload", NARROW, 1.0),
        ("unused_parameters", 2, 1, 0.5, "infinity-host", BF16, 1.0),
        ("block_skipped_on_one_rank", 3, 1, 0.5, "infinity-host", SMALL, 1.0),
        ("lora", 2, 3, 0.5, "stage2-offload", FP16, 1.0),
        ("plain", 2, 1, 0.5, "stage2-offload", BF16, 0.4),
        ("uneven_sizes_and_users_hooks", 4, 1, 0.5, "infinity-host", BF16, 0.5),
        ("frozen", 1, 1, 0.0, "half", SMALL, 0.5),
    ],
)
def test_training_is_that_without_offloading(worlds, name, size, accumulation, clip, place, more, of_it):
    stage, zero = PLACES[place]
    options = {"accumulation": accumulation, "clip": clip, "more": more}
    near = worlds[size].reference(train, name, stage, **options)
    far = worlds[size].run(visit, name, stage, of_it, **options, **zero)
    if ON_GPU and of_it < 1.0:  # the host's kernel has updated the others
        for ours, theirs in zip(far, near, strict=True):
            assert ours.losses == pytest.approx(theirs.losses, rel=1e-4)
    else:
        assert far == near


def looked_at(of_it: float) -> tuple[list[float], str, int, int]:
    """Losses and weights; and the elements of what visits, and of all."""
    with memory_of_its_own():
        engine = start(2, more=share(of_it, BF16), offload_optimizer=HOST)
        losses, seen = [], []
        for step in range(3):
            losses += take_steps(engine, 1, first=step)
            seen.append(digest_in_32_bits(engine))
        segments = [segment for unit in engine.schedule.units.values() for segment in unit.trained]
        kinds = {HostSite, DeviceSite} if 0 < of_it < 1 else {DeviceSite if of_it else HostSite}
        assert {type(segment.home.site) for segment in segments} == kinds
        numels = [(segment.kept.owned.numel, isinstance(segment.home.site, DeviceSite)) for segment in segments]
        engine.destroy()
    return losses, str(seen), sum(numel for numel, visits in numels if visits), sum(numel for numel, _ in numels)


def test_what_visits_is_the_share_that_was_asked_for(two):
    """And whoever looks in between finds every update done."""
    none, some, every = (two.run(looked_at, of_it) for of_it in (0.0, 0.6, 1.0))
    for ours in (some, every):
        for mine, theirs in zip(ours, none, strict=True):
            assert mine[0] == pytest.approx(theirs[0], rel=1e-4)
        assert ON_GPU or [rank[:2] for rank in ours] == [rank[:2] for rank in none]
    assert all(visited == 0 for _, _, visited, _ in none)
    assert all(0.3 * numel < visited <= 0.6 * numel for _, _, visited, numel in some)
    assert all(visited == numel for _, _, visited, numel in every)


def test_bytes_go_up_and_come_back_and_weights_come_of_it():
    with memory_of_its_own():
        engine = start(2, more=share(1.0, BF16), offload_optimizer=HOST)
        take_steps(engine, 2)
        segments = [segment for unit in engine.schedule.units.values() for segment in unit.trained]
        for segment in segments:
            segment.settle()
        numel = sum(segment.kept.owned.numel for segment in segments)
        moved = engine.report()["moved"]
        engine.destroy()
    # Gradients come down in 32 bits; they, masters and two moments go up, and all but the gradients come back.
    assert moved == {"to the host": 2 * numel * (4 + 12), "to the device": 2 * numel * 16}


def test_an_update_that_fails_on_the_device_is_told_by_the_next_forward():
    with memory_of_its_own():
        engine = start(2, more=share(1.0, {}), offload_optimizer=HOST)
        take_steps(engine, 1)
        engine.optimizer.param_groups[0]["eps"] = "small"
        with pytest.raises(TypeError, match="eps"):
            take_steps(engine, 2)


@pytest.mark.parametrize(
    ("of_it", "expected"),
    [(0.0, ""), (1.0, "abcdefgh"), (0.5, "bdfh"), (0.3, "dg"), (0.25, "dh"), (0.75, "bcdfgh"), (0.1, "")],
)
def test_visitors_are_spread_over_the_order_of_updates(of_it, expected):
    assert visitors(dict.fromkeys("abcdefgh", 5), of_it) == set(expected)


def test_visitors_are_chosen_by_elements():
    assert visitors({"head": 80, "a": 10, "b": 10}, 0.15) == {"a"}
    assert visitors({"a": 10, "head": 80, "b": 10}, 0.15) == {"b"}


@pytest.mark.parametrize(
    ("changes", "zero", "words"),
    [
        ({"device_share": 1.5}, {"offload_optimizer": HOST}, "device_share"),
        ({"device_share": 0.3}, {}, "only states on the host visit the device"),
        ({"device_share": 0.3, "small_moments": True}, {"offload_optimizer": HOST}, "moments of 8 bits are updated where"),
        ({"device_share": 0.3, "delay_update_after": 2}, {"offload_optimizer": HOST}, "bring their weights at once"),
    ],
)
def test_what_cannot_visit_is_told(changes, zero, words):
    with pytest.raises(ConfigError, match=words):
        engine_of(MODELS["plain"](), config_of(2, **zero) | {"naught": changes})


def test_an_optimizer_that_a_user_brings_updates_where_states_rest():
    model = MODELS["plain"]().to(DEVICE)
    optimizer = torch.optim.NAdam(model.parameters(), lr=1e-3)
    config = {key: value for key, value in config_of(2, offload_optimizer=HOST).items() if key != "optimizer"}
    with pytest.raises(UsageError, match="device_share is not for this optimizer"):
        initialize(model=model, optimizer=optimizer, config=config | {"naught": {"device_share": 0.3}})


def test_a_step_that_is_skipped_visits_nobody():
    with memory_of_its_own():
        engine = start(2, more=share(1.0, {"bf16": {"enabled": True, "check_grad_overflow": True}}), offload_optimizer=HOST)
        take_steps(engine, 2)
        before = digest_in_32_bits(engine)
        engine.backward(engine(batch_of(2, my_rank())) * float("inf"))
        engine.step()
        assert engine.skipped_steps == 1
        assert digest_in_32_bits(engine) == before
        engine.destroy()
