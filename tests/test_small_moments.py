"""Moments in 8 bits: how far off they are, what they take, and that they are the same in every placement and checkpoint."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from menagerie import MODELS
from test_offload import BF16, BOTH, HOST, near_of
from training import DEVICE, batch_of, config_of, digest_in_32_bits, engine_of, start, take_steps

from naught import initialize
from naught.errors import UsageError
from naught.fragments import safe_get_full_optimizer_state, safe_set_full_optimizer_state
from naught.moments import BLOCK_NUMEL, pack, unpack

SMALL = {"naught": {"small_moments": True}}


def there_and_back(values: torch.Tensor, *, signed: bool) -> torch.Tensor:
    codes = torch.zeros(values.shape, dtype=torch.uint8)
    scales = torch.zeros(values.numel() // BLOCK_NUMEL)
    pack(values, codes, scales, signed=signed)
    return unpack(codes, scales, signed=signed)


def made(seed: int, octaves: float, *, signed: bool) -> torch.Tensor:
    """Some blocks of numbers over so many powers of two, some of them zero."""
    dice = torch.Generator().manual_seed(seed)
    largest = 10.0 ** torch.randint(-12, 3, (1,), generator=dice)
    sizes = largest * torch.exp2(-octaves * torch.rand(8 * BLOCK_NUMEL, generator=dice))
    sizes[torch.rand(sizes.shape, generator=dice) < 0.1] = 0
    return sizes * (torch.randint(0, 2, sizes.shape, generator=dice) * 2 - 1) if signed else sizes


@given(st.integers(0, 10**6), st.floats(0, 30), st.booleans())
def test_a_value_is_off_by_half_a_step_and_what_is_packed_again_is_the_same(seed, octaves, signed):
    values = made(seed, octaves, signed=signed)
    found = there_and_back(values, signed=signed)
    tops = values.abs().view(-1, BLOCK_NUMEL).amax(1, keepdim=True).expand(-1, BLOCK_NUMEL).reshape(-1)
    reach, step = (2.0**-16, 0.0451) if signed else (2.0**-24, 0.0334)
    seen = values.abs() > tops * reach
    torch.testing.assert_close(found[seen], values[seen], rtol=step, atol=0)
    assert (found[~seen].abs() <= tops[~seen] * reach * (1 + 1e-5)).all()
    assert (found[values == 0] == 0).all()
    if not signed:
        assert (found[values > 0] > 0).all(), "what is divided by is never zero"
    assert torch.equal(there_and_back(found, signed=signed), found)


def test_a_number_that_is_none_stays_so():
    values = torch.ones(2 * BLOCK_NUMEL)
    values[3] = math.nan
    found = there_and_back(values, signed=True)
    assert found[:BLOCK_NUMEL].isnan().all()
    assert (found[BLOCK_NUMEL:] == 1).all()


def trained(stage: int, zero: dict, more: dict, optimizer: str = "AdamW") -> tuple[list[float], str]:
    engine = start(stage, clip=0.5, more=SMALL | more, optimizer=optimizer, **zero)
    return take_steps(engine, 4), digest_in_32_bits(engine)


@pytest.mark.parametrize("more", [{}, BF16, BF16 | {"naught": {"small_moments": True, "small_masters": True}}])
def test_training_is_the_same_in_every_placement_and_at_every_world_size(worlds, more):
    offload = {"offload_optimizer": HOST}
    for size in (1, 2):
        near = worlds[size].reference(trained, 0, {}, more)
        assert all(worlds[size].run(trained, stage, {}, more) == near for stage in (1, 2, 3))
        same = worlds[size].run(trained, 2, near_of("stage2-offload"), more)
        assert worlds[size].run(trained, 2, offload, more) == worlds[size].run(trained, 3, BOTH, more) == same


def held(zero: dict) -> tuple[float, dict[str, int], dict[str, int]]:
    engine = start(2, more=BF16 | SMALL, **zero)
    take_steps(engine, 2)
    numel = sum(segment.states.owned.numel for unit in engine.schedule.units.values() for segment in unit.trained)
    found, planned = engine.report()["peak"], engine.planned()
    of_states = {name: nbytes for name, nbytes in found.items() if name.endswith("states")}
    return sum(of_states.values()) / numel, of_states, {name: planned[name] for name in of_states}


@pytest.mark.parametrize("zero", [{}, {"offload_optimizer": HOST}])
def test_they_take_a_quarter_and_the_plan_knows(two, zero):
    for each, states, planned in two.run(held, zero):
        assert each == 2 * (1 + 4 / BLOCK_NUMEL)
        assert states == planned


def save(folder: str) -> str:
    engine = start(2, more=BF16 | SMALL)
    take_steps(engine, 3)
    engine.save_checkpoint(folder)
    return digest_in_32_bits(engine)


def resume(folder: str, stage: int, small: bool, zero: dict) -> tuple[str, list[float]]:
    engine = start(stage, more=BF16 | (SMALL if small else {}), **zero)
    take_steps(engine, 1)
    engine.load_checkpoint(folder)
    return digest_in_32_bits(engine), take_steps(engine, 2, first=3)


def test_a_checkpoint_is_the_same_with_and_without(worlds, tmp_path):
    (saved,) = set(worlds[2].run(save, str(tmp_path)))
    for size, stage, small, zero in ((1, 1, True, {}), (2, 3, True, BOTH), (2, 0, False, {})):
        assert {found for found, _ in worlds[size].run(resume, str(tmp_path), stage, small, zero)} == {saved}
    here, there = (worlds[2].run(resume, str(tmp_path), stage, True, {}) for stage in (2, 3))
    assert here == there


def look_and_write() -> tuple[float, float]:
    engine = start(3, more=BF16 | SMALL)
    take_steps(engine, 2)
    first = next(engine.module.parameters())
    seen = safe_get_full_optimizer_state(first, "exp_avg")
    safe_set_full_optimizer_state(first, torch.full_like(seen, 0.25), "exp_avg")
    engine.offload_states()
    engine.reload_states()
    return seen.abs().sum().item(), safe_get_full_optimizer_state(first, "exp_avg").mean().item()


def test_they_are_read_and_written_like_others(two):
    for seen, written in two.run(look_and_write):
        assert seen > 0
        assert written == 0.25


def test_training_goes_where_it_goes_with_32_bits():
    losses = {}
    for more in ({}, SMALL):
        torch.manual_seed(0)
        engine = engine_of(MODELS["plain"](), config_of(1) | more)
        found = []
        for step in range(60):
            loss = engine(batch_of(step % 4, 0))
            engine.backward(loss)
            engine.step()
            found.append(loss.item())
        losses[bool(more)] = found
    wide, small = losses[False], losses[True]
    assert small != wide
    assert small[-1] == pytest.approx(wide[-1], rel=0.02)
    assert wide[0] - wide[-1] > 0.1 * wide[0], "it learns"


def test_a_rule_that_cannot_do_with_8_bits_is_told():
    model = MODELS["plain"]()
    with pytest.raises(UsageError, match="small_moments is not for this optimizer"):
        engine_of(model, config_of(1) | SMALL | {"optimizer": {"type": "Adagrad", "params": {"lr": 0.1}}})
    own = {key: value for key, value in (config_of(1) | SMALL).items() if key != "optimizer"}
    with pytest.raises(UsageError, match="small_moments is not for this optimizer"):
        initialize(model=MODELS["plain"]().to(DEVICE), optimizer=torch.optim.NAdam(model.parameters()), config=own)
