"""One parameter's weights, gradient and states, read and written as DeepSpeed's users do, at every stage alike."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from menagerie import DEVICE, MODELS, batch_of, my_rank
from torch import nn
from training import config_of, digest, digest_of_weights, start, take_steps

from naught import utils, zero
from naught.engine import Engine
from naught.errors import UsageError

pytestmark = pytest.mark.usefixtures("one_thread")

RECIPES: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "fp16": {"fp16": {"enabled": True, "loss_scale": 256.0}},
}


def reads(stage: int, recipe: str) -> list[str]:
    engine = start(stage, more=RECIPES[recipe])
    found = []
    for step in range(2):
        engine.backward(engine(batch_of(step, my_rank())))
        for param in engine.module.parameters():
            grad = utils.safe_get_full_grad(param)
            assert grad.shape == param.shape
            assert grad.dtype == torch.float32
            found.append(digest([grad]))
        engine.step()
        assert utils.safe_get_full_grad(engine.module.head.weight) is None
        for param in engine.module.parameters():
            full = utils.safe_get_full_fp32_param(param)
            assert (full.shape, full.dtype) == (param.shape, torch.float32)
            found.append(digest([full, *(utils.safe_get_full_optimizer_state(param, key) for key in ("exp_avg", "exp_avg_sq"))]))
    assert utils.safe_get_full_optimizer_state(engine.module.head.weight, "nothing") is None
    with engine.gathered():
        for param in engine.module.parameters():
            assert torch.equal(param, utils.safe_get_full_fp32_param(param).to(param.dtype))
    return found


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("size", [1, 3])
def test_what_is_read_is_the_same_at_every_stage(worlds, size, recipe):
    runs = [worlds[size].run(reads, stage, recipe) for stage in range(4)]
    assert all(run == runs[0] for run in runs)
    assert all(rank == runs[0][0] for rank in runs[0])


def test_a_gradient_is_the_mean_without_the_scale_of_the_loss(worlds):
    torch.manual_seed(0)
    model = MODELS["plain"]().to(DEVICE)
    for rank in range(3):
        (model(batch_of(0, rank)) / 3).backward()
    for stage in (1, 3):
        for grad in worlds[3].run(one_gradient, stage):
            assert torch.allclose(grad, model.head.weight.grad.cpu(), rtol=0.02, atol=1e-3)


def one_gradient(stage: int) -> torch.Tensor:
    engine = start(stage, more=RECIPES["fp16"])
    engine.backward(engine(batch_of(0, my_rank())))
    return utils.safe_get_full_grad(engine.module.head.weight).cpu()


def writes(stage: int, recipe: str, how: str) -> str:
    """Half the weights, double a gradient, and forget a moment."""
    engine = start(stage, more=RECIPES[recipe])
    take_steps(engine, 2)
    param = engine.module.blocks[0].up.weight
    if how == "full":
        utils.safe_set_full_fp32_param(param, utils.safe_get_full_fp32_param(param) / 2)
        utils.safe_set_full_optimizer_state(param, torch.zeros_like(param, dtype=torch.float32), "exp_avg")
    else:
        utils.safe_set_local_fp32_param(param, utils.safe_get_local_fp32_param(param) / 2)
        utils.safe_set_local_optimizer_state(
            param, torch.zeros_like(utils.safe_get_local_optimizer_state(param, "exp_avg")), "exp_avg"
        )
    engine.backward(engine(batch_of(2, my_rank())))
    if how == "full":
        utils.safe_update_full_grad_vectorized([param], lambda grad, _: grad * 2)
    else:
        utils.safe_set_local_grad(param, utils.safe_get_local_grad(param) * 2)
    engine.step()
    take_steps(engine, 1, first=3)
    return digest_of_weights(engine)


def untouched(stage: int, recipe: str) -> str:
    engine = start(stage, more=RECIPES[recipe])
    take_steps(engine, 4)
    return digest_of_weights(engine)


@pytest.mark.parametrize("recipe", RECIPES)
def test_what_is_written_counts_at_every_stage(two, recipe):
    found = {(how, stage): two.run(writes, stage, recipe, how)[0] for how in ("full", "local") for stage in range(4)}
    assert len(set(found.values())) == 1
    assert found["full", 0] != two.run(untouched, 0, recipe)[0]


def test_mistakes_with_fragments():
    engine = start(2)
    weight = engine.module.head.weight
    with pytest.raises(UsageError, match="no gradient now"):
        utils.safe_set_full_grad(weight, torch.zeros_like(weight))
    with pytest.raises(UsageError, match='no state "exp_avg" now'):
        utils.safe_set_full_optimizer_state(weight, torch.zeros_like(weight), "exp_avg")
    with pytest.raises(UsageError, match=r'"head.weight" has the shape \[64, 64\], and the value \[3\]'):
        utils.safe_set_full_fp32_param(weight, torch.zeros(3))
    with pytest.raises(UsageError, match="belongs to no engine"):
        utils.safe_get_full_fp32_param(nn.Parameter(torch.zeros(3)))
    with engine.gathered(), pytest.raises(UsageError, match=r"inside engine\.gathered"):
        utils.safe_set_full_fp32_param(weight, torch.zeros_like(weight))


def test_what_was_read_at_stage_0_stays_as_it_was():
    engine = start(0)
    take_steps(engine, 1)
    read = [utils.safe_get_full_fp32_param(engine.module.head.weight)]
    read.append(utils.safe_get_full_optimizer_state(engine.module.head.weight, "exp_avg"))
    before = digest(read)
    take_steps(engine, 1, first=1)
    assert digest(read) == before


# --- GatheredParameters -------------------------------------------------------------------------------------------------


def one_rank_writes(stage: int, recipe: str, rank: int) -> tuple[str, float, float]:
    engine = start(stage, more=RECIPES[recipe])
    take_steps(engine, 1)
    weight = engine.module.tok.weight
    with zero.GatheredParameters([weight], modifier_rank=rank):
        if my_rank() == rank:
            weight.data.fill_(0.25)
    with zero.GatheredParameters(weight):
        first = weight.float().mean().item()
    take_steps(engine, 1, first=1)
    with zero.GatheredParameters(engine.module):
        later = weight.float().mean().item()
    return digest_of_weights(engine), first, later


@pytest.mark.parametrize("recipe", ["fp32", "bf16"])
@pytest.mark.parametrize("rank", [0, 1])
def test_what_one_rank_writes_all_have_and_training_goes_on_from_it(two, recipe, rank):
    runs = [two.run(one_rank_writes, stage, recipe, rank) for stage in range(4)]
    assert all(run == runs[0] for run in runs)
    assert runs[0][0] == runs[0][1]
    _, first, later = runs[0][0]
    assert first == 0.25
    assert 0.2 < later < 0.3, "masters follow"


def whole_ones(engine: Engine) -> set[str]:
    return {name for name, param in engine.module.named_parameters() if not bool(param.isnan().any())}


def only_what_is_asked() -> tuple[set[str], set[str]]:
    engine = start(3)
    with zero.GatheredParameters([engine.module.head.weight]):
        some = whole_ones(engine)
    with zero.GatheredParameters(engine.module, enabled=False):
        assert not whole_ones(engine)
    with engine.gathered(param for param in engine.module.parameters()):
        every = whole_ones(engine)
    assert not whole_ones(engine)
    with (
        pytest.raises(UsageError, match=r"of shape \[3\] is not one of the engine's"),
        engine.gathered([nn.Parameter(torch.ones(3))]),
    ):
        pass
    return some, every


def test_only_the_units_of_the_parameters_are_gathered(two):
    some, every = two.run(only_what_is_asked)[0]
    assert "head.weight" in some
    assert not any(name.startswith("blocks") for name in some)
    assert every == {name for name, _ in MODELS["plain"]().named_parameters()}


def one_rank_writes_within(stage: int) -> str:
    engine = start(stage)
    weight = engine.module.tok.weight
    with engine.gathered(), zero.GatheredParameters(weight, modifier_rank=1):
        if my_rank() == 1:
            weight.data.fill_(0.25)
    take_steps(engine, 1)
    return digest_of_weights(engine)


def test_a_writer_within_what_is_lent_already_is_heard(two):
    runs = [two.run(one_rank_writes_within, stage) for stage in range(4)]
    assert all(run == runs[0] for run in runs)
    assert runs[0][0] == runs[0][1]


def frozen_ones(stage: int) -> tuple[str, str]:
    """Frozen weights can be written too, as a whole; and what was read does not change behind one's back."""
    engine = start(stage, "frozen")
    frozen = next(param for param in engine.module.parameters() if not param.requires_grad)
    before = utils.safe_get_full_fp32_param(frozen)
    kept = before.clone()
    utils.safe_set_full_fp32_param(frozen, nn.Parameter(before * 3))
    take_steps(engine, 2)
    assert torch.equal(before, kept)
    return digest_of_weights(engine), digest([utils.safe_get_full_fp32_param(frozen) / 3 - kept])


def test_frozen_weights_can_be_written_at_every_stage(two):
    runs = [two.run(frozen_ones, stage) for stage in range(4)]
    assert all(run == runs[0] for run in runs)
    assert runs[0][0] == runs[0][1]


def test_mistakes_with_gathered_parameters():
    engine = start(3)
    with zero.GatheredParameters(None):
        pass
    with pytest.raises(UsageError, match="there is no rank 9"), zero.GatheredParameters(engine.module, modifier_rank=9):
        pass


def test_parameters_of_no_engine_are_whole_anyway():
    layer = nn.Linear(2, 2)
    with zero.Init(config_dict_or_path=config_of(3)), zero.GatheredParameters(layer, modifier_rank=0):
        layer.weight.data.zero_()
    assert not layer.weight.any()


# --- norms --------------------------------------------------------------------------------------------------------------


def norms(stage: int, recipe: str) -> dict[str, float]:
    engine = start(stage, more=RECIPES[recipe])
    engine.backward(engine(batch_of(0, my_rank())))
    found = engine.grad_norms()
    for name, param in engine.module.named_parameters():
        assert found[name] == pytest.approx(utils.safe_get_full_grad(param).double().norm().item(), rel=1e-6)
    engine.step()
    assert sum(norm**2 for norm in found.values()) ** 0.5 == pytest.approx(engine.get_global_grad_norm(), rel=1e-9)
    return found


@pytest.mark.parametrize("recipe", RECIPES)
def test_norms_of_single_parameters_can_be_read(two, recipe):
    runs = [two.run(norms, stage, recipe)[0] for stage in range(4)]
    assert all(run.keys() == runs[0].keys() for run in runs)
    assert all(list(run.values()) == pytest.approx(list(runs[0].values()), rel=1e-6) for run in runs)


# --- states that step aside ---------------------------------------------------------------------------------------------


def parks(stage: int, recipe: str, include: Any) -> tuple[str, str]:
    engine: Engine = start(stage, more=RECIPES[recipe])
    take_steps(engine, 2)
    held = engine.report()["live"]
    engine.offload_states(include=include)
    live = engine.report()["live"]
    assert sum(live.values()) == sum(held.values())
    assert live["states"] == 0 < live["away"]
    assert live["weights"] == 0
    for use in (
        lambda: engine(batch_of(0, 0)),
        lambda: engine.module(batch_of(0, 0)),
        lambda: engine.module.state_dict(),
        lambda: engine.gathered(),
        lambda: engine.grad_norms(),
        lambda: engine.offload_states(),
        lambda: utils.safe_get_full_fp32_param(engine.module.head.weight),
    ):
        with pytest.raises(UsageError, match="reload_states"):
            use()
    engine.reload_states()
    assert engine.report()["live"] == held | {"away": 0}
    engine.reload_states()  # nothing is away
    take_steps(engine, 2, first=2)
    return digest_of_weights(engine), untouched(stage, recipe)


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize(("recipe", "include"), [("bf16", None), ("fp32", ["optim_states", "lp_params"])])
def test_states_can_step_aside_and_come_back(two, stage, recipe, include):
    for parked, plain in two.run(parks, stage, recipe, include):
        assert parked == plain


def parks_gradients(stage: int) -> tuple[str, str]:
    """Between two micro-batches of a step."""
    weights = []
    for parked in (True, False):
        engine = start(stage, accumulation=2)
        take_steps(engine, 1)
        if parked:
            engine.offload_states()
            live = engine.report()["live"]
            assert not any(live.get(name) for name in ("weights", "whole gradients", "owned gradients"))
            engine.reload_states()
        take_steps(engine, 3, first=1)
        weights.append(digest_of_weights(engine))
    return weights[0], weights[1]


@pytest.mark.parametrize("stage", range(4))
def test_gradients_step_aside_too(two, stage):
    for parked, plain in two.run(parks_gradients, stage):
        assert parked == plain


def test_mistakes_with_states_that_step_aside():
    engine = start(1)
    with pytest.raises(UsageError, match='no states of the kind "weights"'):
        engine.offload_states(include=["weights"])
    with pytest.raises(UsageError, match="only be moved to the cpu"):
        engine.offload_states(device="nvme")
