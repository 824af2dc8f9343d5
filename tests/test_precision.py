"""16-bit training with 32-bit masters: every stage alike, like plain PyTorch, and unharmed by overflows on one rank."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from menagerie import DEVICE, MODELS, batch_of, my_rank
from test_parity import OWN_WAY, SOAK, assert_ranks_agree, outcomes
from torch import nn
from training import HYPER, config_of, digest, digest_of_moments, digest_of_weights, engine_of, start, take_steps

from naught.errors import UsageError
from naught.loss_scale import FixedScale

pytestmark = pytest.mark.usefixtures("one_thread")

BF16 = {"bf16": {"enabled": True}}
FP16 = {"fp16": {"enabled": True, "loss_scale": 1024.0}}
DYNAMIC = {"fp16": {"enabled": True, "initial_scale_power": 10, "hysteresis": 1, "loss_scale_window": 2}}
RECIPES: dict[str, dict[str, Any]] = {"bf16": BF16, "fixed": FP16, "dynamic": DYNAMIC}


# --- parity -----------------------------------------------------------------------------------------------------------


# Of the menagerie, only this makes 32-bit inputs for itself.
@pytest.mark.parametrize("name", [name for name in MODELS if name != "convolution"])
def test_all_stages_are_alike_in_bf16(worlds, name):
    runs = outcomes(worlds[2], name, clip=0.5, more=BF16)
    assert_ranks_agree(runs)
    assert all(run == runs[0] for run in runs)


# A pairwise selection; NAUGHT_SOAK=1 runs the product.
SELECTION = [
    ("plain", 3, 1, "bf16"),
    ("tied", 2, 3, "bf16"),
    ("frozen", 4, 3, "bf16"),
    ("checkpoint_reentrant", 1, 1, "bf16"),
    ("plain", 2, 1, "fixed"),
    ("tied", 3, 3, "dynamic"),
    ("lora", 2, 1, "dynamic"),
    ("unused_parameters", 2, 3, "fixed"),
]
IN_16_BITS = [name for name in MODELS if name != "convolution"]
EVERYTHING = list(product(IN_16_BITS, (1, 2, 3, 4), (1, 3), RECIPES))


@pytest.mark.parametrize(("name", "size", "accumulation", "recipe"), EVERYTHING if SOAK else SELECTION)
def test_more_ranks_micro_batches_and_scales(worlds, name, size, accumulation, recipe):
    runs = outcomes(worlds[size], name, clip=0.5, accumulation=accumulation, steps=3, more=RECIPES[recipe])
    assert_ranks_agree(runs)
    assert runs[0] == runs[1]
    assert runs[2] == runs[3]
    if accumulation == 1:
        assert runs[0] == runs[2]
    else:
        every = RECIPES[recipe] | {"naught": {"reduce_every_micro_batch": True}}
        alike = outcomes(worlds[size], name, clip=0.5, accumulation=accumulation, steps=3, more=every)
        assert all(run == alike[0] for run in alike)


def plainly(name: str, dtype: torch.dtype, world: int) -> tuple[list[float], str]:
    """One process: 16-bit weights, 32-bit masters, gradients of all ranks summed in 32 bits and rounded once."""
    torch.manual_seed(0)
    model = MODELS[name]().to(DEVICE)
    trained = [param for param in model.parameters() if param.requires_grad]
    masters = [param.detach().clone() for param in trained]
    for param in model.parameters():
        param.data = param.data.to(dtype)
    optimizer = torch.optim.AdamW(masters, **{**HYPER, "betas": tuple(HYPER["betas"])}, fused=True)
    losses = []
    for step in range(4):
        sums = [torch.zeros_like(master) for master in masters]
        for rank in range(world):
            loss = model(batch_of(step, rank))
            loss.backward()
            losses += [loss.item()] if rank == 0 else []
            for total, param in zip(sums, trained, strict=True):
                total += param.grad
                param.grad = None
        for master, total in zip(masters, sums, strict=True):
            master.grad = (total / world).to(dtype).float()
        optimizer.step()
        for param, master in zip(trained, masters, strict=True):
            param.data.copy_(master)
    return losses, digest(list(model.parameters()))


@pytest.mark.parametrize("name", ["plain", "tied", "frozen", "checkpoint_non_reentrant", "skip_connections"])
@pytest.mark.parametrize("world", [1, 3])  # the sum of two is rounded once in any case
def test_bf16_is_plain_pytorch_with_masters(worlds, name, world):
    assert name not in OWN_WAY
    losses, weights = worlds[1].run(plainly, name, torch.bfloat16, world)[0]
    for run in outcomes(worlds[world], name, more=BF16):
        assert (losses, weights) == (run[0].losses, run[0].weights)


def test_the_scale_of_the_loss_is_undone():
    descent = {"optimizer": {"type": "SGD", "params": {"lr": 1.0}}}
    weights, norms = [], []
    for recipe in ({}, FP16, {"fp16": {"enabled": True, "loss_scale": 1.0}}):
        engine = start(1, more=descent | recipe)
        before = engine.module.head.weight.detach().float().clone()
        take_steps(engine, 1)
        weights.append((engine.module.head.weight.detach().float() - before).norm().item())
        norms.append(engine.get_global_grad_norm())
    assert weights == pytest.approx([weights[0]] * 3, rel=0.02)
    assert norms == pytest.approx([norms[0]] * 3, rel=0.02)


# --- overflows --------------------------------------------------------------------------------------------------------


def overflows(name: str, stage: int, recipe: dict[str, Any], poison: bool) -> tuple[str, str, list[float], int]:
    engine = start(stage, name, clip=0.5, more=recipe)
    take_steps(engine, 2)
    before = digest_of_weights(engine), digest_of_moments(engine)
    scales = [engine.loss_scale()]
    if poison:
        loss = engine(batch_of(2, my_rank()))
        engine.backward(loss * (float("inf") if my_rank() == 1 else 1.0))
        engine.step()
        assert (digest_of_weights(engine), digest_of_moments(engine)) == before
        scales.append(engine.loss_scale())
    engine.stepping.scale = FixedScale(64.0)  # the next clean step at the same scale, with and without
    take_steps(engine, 1, first=3)
    return digest_of_weights(engine), digest_of_moments(engine), scales, engine.skipped_steps


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize(("name", "size"), list(product(IN_16_BITS, (2, 3, 4))) if SOAK else [("plain", 2)])
def test_an_overflow_on_one_rank_changes_nothing_on_any(worlds, name, size, stage, recipe):
    poisoned, clean = (worlds[size].run(overflows, name, stage, RECIPES[recipe], poison) for poison in (True, False))
    for bad, good in zip(poisoned, clean, strict=True):
        assert bad[:2] == good[:2], "as if the bad step had not been"
        assert bad[3] == good[3] + 1
        assert bad[2][1] == bad[2][0] / (2 if recipe == "dynamic" else 1)
    assert all(rank == poisoned[0] for rank in poisoned)


def test_an_overflow_is_logged_with_its_parameter_and_at_the_minimum_with_advice(caplog):
    smallest = {"fp16": {"enabled": True, "initial_scale_power": 1, "min_loss_scale": 1.0, "hysteresis": 1}}
    engine = start(2, more=smallest)
    for _ in range(2):
        engine.backward(engine(batch_of(0, 0)) * float("inf"))
        engine.step()
    first, second = (record.getMessage() for record in caplog.records)
    assert 'rank 0 has such a gradient of "norm.weight"; the scale of the loss falls from 2 to 1' in first
    assert "cannot fall below 1. Lower the learning rate" in second
    assert "bf16, which needs no scale" in second


def test_bf16_goes_on_over_what_is_not_finite_if_it_is_told_to():
    engine = start(1, more={"bf16": {"enabled": True, "check_grad_overflow": False}})
    engine.backward(engine(batch_of(0, 0)) * float("nan"))
    engine.step()
    assert (engine.global_steps, engine.skipped_steps) == (1, 0)


# --- who scales -------------------------------------------------------------------------------------------------------


def by_hand(stage: int, scaled: bool) -> str:
    engine = start(stage, more=FP16)
    for step in range(2):
        loss = engine(batch_of(step, 0))
        engine.scale(loss).backward() if scaled else engine.backward(loss)
        engine.step()
    return digest_of_weights(engine)


def test_a_plain_backward_under_a_scale_must_be_scaled():
    assert by_hand(2, scaled=True) == by_hand(2, scaled=False)
    engine = start(2, more=FP16)
    engine(batch_of(0, 0)).backward()
    with pytest.raises(UsageError, match=r"engine\.scale\(loss\)\.backward\(\)"):
        engine.step()


# --- bytes ------------------------------------------------------------------------------------------------------------


def model_states(stage: int) -> tuple[int, int]:
    """Bytes of weights, gradients, masters and moments when gradients are complete, and the number of parameters."""
    engine = start(stage, more=BF16)
    take_steps(engine, 2)
    engine.backward(engine(batch_of(2, my_rank())))
    engine.passes.close()  # as the step that follows would begin
    live = engine.report()["live"]
    names = ("weights", "whole gradients", "owned gradients", "masters", "states")
    segments = (segment for unit in engine.schedule.units.values() for segment in unit.segments)
    return sum(live.get(name, 0) for name in names), sum(segment.layout.numel for segment in segments)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_model_states_take_what_the_paper_says(worlds, size):
    for stage, bytes_of in enumerate(
        (
            lambda psi: 16 * psi,
            lambda psi: 4 * psi + 12 * psi // size,
            lambda psi: 2 * psi + 14 * psi // size,
            lambda psi: 16 * psi // size,
        )
    ):
        for held, psi in worlds[size].run(model_states, stage):
            assert held == bytes_of(psi)


# --- other types ------------------------------------------------------------------------------------------------------


def test_masters_start_from_weights_that_were_not_rounded():
    torch.manual_seed(0)
    model = MODELS["plain"]()
    wanted = model.head.weight.detach().clone()
    engine = engine_of(model, config_of(1, more=BF16))
    segment = engine.schedule.units["head"].segments[0]
    assert segment.states.masters is not None
    assert bool((segment.states.masters.cpu()[: wanted.numel()].view_as(wanted) == wanted).all())
    assert model.head.weight.dtype == torch.bfloat16


def test_modules_can_be_kept_in_fp32():
    more = BF16 | {"data_types": {"keep_in_fp32_modules": ["LayerNorm", "tok"]}}
    engine = start(3, more=more)
    dtypes = {name: param.dtype for name, param in engine.module.named_parameters()}
    assert dtypes["norm.weight"] == dtypes["blocks.0.norm.bias"] == dtypes["tok.weight"] == torch.float32
    assert dtypes["blocks.0.up.weight"] == torch.bfloat16
    with pytest.raises(UsageError, match="names nothing, and the model has no such module"):
        start(3, more=BF16 | {"data_types": {"keep_in_fp32_modules": ["nothing"]}})


def autocast(stage: int) -> tuple[list[float], str, str]:
    engine = start(stage, more={"torch_autocast": {"enabled": True, "dtype": "bfloat16"}})
    return take_steps(engine, 3), digest_of_weights(engine), str(engine.module.head.weight.dtype)


def test_autocast_computes_in_16_bits_and_keeps_weights_in_32(two):
    found = [two.run(autocast, stage) for stage in range(4)]
    assert all(run == found[0] for run in found)
    assert found[0][0][2] == "torch.float32"
    assert found[0][0][0] != two.run(autocast_off)[0]


def autocast_off() -> list[float]:
    return take_steps(start(0), 3)


def test_fp16_casts_floating_inputs_if_it_is_told_to():
    model = nn.Linear(4, 4)
    more = {"fp16": {"enabled": True, "auto_cast": True}}
    assert engine_of(model, config_of(0, more=more))(torch.ones(2, 4, device=DEVICE)).dtype == torch.float16


def wired(stage: int, more: dict[str, Any]) -> tuple[str, int]:
    engine = start(stage, more=more)
    take_steps(engine, 2)
    before = engine.watch.ledger.total("reduce-scatter")
    take_steps(engine, 1, first=2)
    return digest_of_weights(engine), engine.watch.ledger.total("reduce-scatter") - before


def test_gradients_travel_in_the_type_that_is_asked_for(two):
    narrow = two.run(wired, 2, BF16)[0]
    wide = two.run(wired, 2, BF16 | {"communication_data_type": "fp32"})[0]
    assert wide[1] == 2 * narrow[1]
    assert wide[0] == narrow[0], "sums are taken in 32 bits and rounded once, however gradients travel"


def test_gradients_can_be_summed_instead_of_averaged(two):
    recipe = {"gradient_allreduce_op": "sum"}
    params = {"lr": 1e-2}
    doubled = [two.run(summed, stage, recipe | {"optimizer": {"type": "SGD", "params": params}})[0] for stage in range(4)]
    assert len(set(doubled)) == 1
    halved = {"optimizer": {"type": "SGD", "params": {"lr": 2e-2}}}
    assert doubled[0] == two.run(summed, 0, halved)[0], "the sum over two ranks is twice their mean"


def summed(stage: int, more: dict[str, Any]) -> str:
    engine = start(stage, more=more)
    take_steps(engine, 2)
    return digest_of_weights(engine)


@pytest.mark.parametrize("worst", [math.inf, math.nan])
def test_a_norm_that_is_not_finite_clips_as_torch_does_where_nobody_looks_for_it(worst):
    """With gradients that are not checked: all of them are no numbers, or zero beside what is infinite."""

    def moved_by(model: nn.Module, backward: Callable[[torch.Tensor], None], step: Callable[[], None]) -> torch.Tensor:
        before = model.weight.detach().float().clone()
        backward((model(torch.ones(2, 64, dtype=model.weight.dtype, device=DEVICE)).float() * gains).sum())
        step()
        return model.weight.detach().float() - before

    gains = torch.tensor([1.0, 2.0, worst], device=DEVICE)
    config = config_of(0, clip=1.0, optimizer="SGD", params={"lr": 1.0})
    config |= {"bf16": {"enabled": True, "check_grad_overflow": False}}
    torch.manual_seed(0)
    engine = engine_of(nn.Linear(64, 3, bias=False), config)
    ours = moved_by(engine.module, engine.backward, engine.step)
    torch.manual_seed(0)
    plain = nn.Linear(64, 3, bias=False).to(DEVICE)
    optimizer = torch.optim.SGD(plain.parameters(), lr=1.0)

    def clip_and_step() -> None:
        nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        optimizer.step()

    theirs = moved_by(plain, torch.Tensor.backward, clip_and_step)
    torch.testing.assert_close(ours, theirs, equal_nan=True, rtol=0, atol=0)
