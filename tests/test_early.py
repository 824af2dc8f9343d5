"""Updates in the backward: a unit is updated as soon as its gradients are summed, which are let go; training is the same."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from menagerie import MODELS
from test_offload import BF16, HOST, ON_GPU, PLACES, SMALL
from test_parameters import AWKWARD
from test_parity import SOAK, assert_ranks_agree
from torch import nn
from training import (
    DEVICE,
    batch_of,
    config_of,
    digest_in_32_bits,
    digest_of_weights,
    engine_of,
    my_rank,
    start,
    take_steps,
    train,
)

from naught import initialize
from naught.engine import Engine
from naught.errors import ConfigError, HalfUpdated, PlacementError, ScheduleError, UsageError
from naught.estimate import forecast
from naught.fragments import safe_get_full_fp32_param, safe_get_full_grad, safe_get_full_optimizer_state
from naught.holding import Buffer
from naught.job import ActivationBytes, Checkpointing, Job
from naught.machine import Machine
from naught.placement import PLACEMENTS, Kind, Tier
from naught.shapes import Run
from naught.sizes import PlacedRun

EARLY = {"naught": {"update_in_backward": True}}
STAGES = {f"stage{stage}": (stage, {}) for stage in range(4)} | PLACES
NOTHING = ActivationBytes(0, 0, 0, "nothing")


def early(more: dict[str, Any] | None = None) -> dict[str, Any]:
    more = more or {}
    return more | {"naught": more.get("naught", {}) | EARLY["naught"]}


def start_early(stage: int, name: str = "plain", more: dict[str, Any] | None = None, **options: Any) -> Engine:
    return start(stage, name, more=early(more), **options)


# --- bit for bit ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_training_is_the_same_as_with_updates_in_the_step(two, name):
    """Not at every stage here: that all of them agree other tests show."""
    for place in STAGES if SOAK else ("stage1", "stage3", "stage2-offload"):
        stage, zero = STAGES[place]
        late, soon = two.reference(train, name, stage, **zero), two.run(train, name, stage, more=EARLY, **zero)
        assert_ranks_agree([soon])
        assert soon == late, place


SELECTION = [
    ("plain", 1, "stage0", BF16),
    ("tied", 3, "stage2", SMALL),
    ("lora", 1, "half", BF16),
    ("block_used_twice", 3, "infinity-host", {}),
    ("experts_by_rank_and_batch", 3, "stage2-offload", BF16),
    ("block_skipped_on_one_rank", 3, "stage1", {"naught": {"lazy_weights": True}}),
    ("checkpoint_reentrant", 1, "infinity-host", SMALL),
    ("unused_parameters", 3, "stage3-offload", BF16 | {"naught": {"lazy_weights": False}}),
    ("plain", 1, "param-only", BF16),
    ("plain", 1, "stage2-offload", BF16 | {"naught": {"wide_gradients": False}}),
    ("plain", 1, "stage3", BF16 | {"naught": {"small_moments": True}}),
    ("plain", 3, "stage3", {"zero_optimization": {"stage": 3, "overlap_comm": False}}),
    ("convolution", 3, "stage1-offload", {}),
    ("plain", 3, "stage2-offload", {"naught": {"lazy_weights": False}}),
]


@pytest.mark.parametrize(
    ("name", "size", "place", "more"),
    [case for case in product(MODELS, (1, 3), STAGES, ({}, BF16, SMALL)) if case[2:] != ("stage0", SMALL)] if SOAK else SELECTION,
)
def test_more_ranks_places_and_precisions(worlds, name, size, place, more):
    stage, zero = STAGES[place]
    late = worlds[size].reference(train, name, stage, more=more, **zero)
    assert worlds[size].run(train, name, stage, more=early(more), **zero) == late


def take_awkward_steps(name: str, stage: int, more: dict[str, Any]) -> tuple[list[float], str]:
    torch.manual_seed(0)
    engine = engine_of(AWKWARD[name](), config_of(stage, more=more))
    return take_steps(engine, 4), digest_of_weights(engine)


@pytest.mark.parametrize("name", AWKWARD)
def test_a_parameter_that_is_used_outside_of_its_module_is_updated_after_its_last_use(two, name):
    late = two.run(take_awkward_steps, name, 1, {})
    for stage, more in ((0, {}), (1, {"naught": {"lazy_weights": False}}), (3, {})):
        assert two.run(take_awkward_steps, name, stage, early(more)) == late


def take_penalized_steps(stage: int, more: dict[str, Any], use: str) -> tuple[list[float], str]:
    """With a part of the loss that is computed of weights before the forward begins, and goes through them in the backward."""
    engine = start(stage, more=more)
    losses = []
    for step in range(4):
        weight = engine.module.get_submodule(use).weight
        penalty = (weight * weight.detach().sign()).mean()
        loss = engine(batch_of(step, my_rank())) + penalty
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses, digest_of_weights(engine)


@pytest.mark.parametrize("use", ["tok", "blocks.1.up", "head"])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_weight_that_was_used_before_the_forward_is_updated_after_its_last_use(two, stage, use):
    whole = {"naught": {"lazy_weights": False}}
    assert two.run(take_penalized_steps, stage, early(whole), use) == two.run(take_penalized_steps, stage, whole, use)


def train_pooled(folder: str | None, soon: bool) -> tuple[list[float], str, int]:
    """With what rests on the device: so many units' weights, gradients and states."""
    limits = {"placement": "auto", "gpu_memory": "350kB", "host_memory": "350kB" if folder else "1MB", "activation_memory": 1}
    more = BF16 | {"naught": limits | ({"nvme_path": folder} if folder else {}) | {"update_in_backward": soon}}
    engine = start(3, more=more | {"aio": {"block_size": 16384, "queue_depth": 2}}, stage3_prefetch_bucket_size=0)
    near = sum(unit.placement.of(kind).tier is Tier.DEVICE for unit in engine.schedule.units.values() for kind in Kind)
    losses = take_steps(engine, 4)
    found = losses, digest_in_32_bits(engine), near
    engine.destroy()
    return found


@pytest.mark.skipif(ON_GPU, reason="what is updated where depends on what fits, and kernels differ")
@pytest.mark.parametrize("disk", [False, True])
def test_a_pool_puts_more_near_and_trains_the_same(two, tmp_path, disk):
    folder = str(tmp_path) if disk else None
    late, soon = (two.run(train_pooled, folder, soon) for soon in (False, True))
    assert [(losses, weights) for losses, weights, _ in soon] == [(losses, weights) for losses, weights, _ in late]
    assert all(nearer > near for (_, _, nearer), (_, _, near) in zip(soon, late, strict=True))


def test_states_on_disk_too(two, tmp_path):
    disk = {"device": "nvme", "nvme_path": str(tmp_path)}
    zero = {"offload_optimizer": disk, "offload_param": disk}
    assert two.run(train, "plain", 3, more=early(BF16), **zero) == two.run(train, "plain", 3, more=BF16, **zero)


def write_between(soon: bool, through_data: bool) -> tuple[list[float], str]:
    engine = start_early(2, more=BF16) if soon else start(2, more=BF16)
    losses = take_steps(engine, 2)
    for param in engine.module.parameters():
        with torch.no_grad():
            (param.data if through_data else param).mul_(0.5)
    losses += take_steps(engine, 2, first=2)
    return losses, digest_in_32_bits(engine)


@pytest.mark.parametrize("through_data", [False, True])
def test_what_is_written_between_steps_is_kept(two, through_data):
    assert two.run(write_between, True, through_data) == two.run(write_between, False, through_data)


def save_and_go_on(folder: str, soon: bool) -> tuple[list[float], str]:
    engine = start_early(2, more=BF16, offload_optimizer=HOST)
    take_steps(engine, 2)
    engine.save_checkpoint(folder)
    take_steps(engine, 1, first=2)
    engine = start_early(3, more=BF16, offload_optimizer=HOST) if soon else start(3, more=BF16, offload_optimizer=HOST)
    engine.load_checkpoint(folder)
    return take_steps(engine, 2, first=2), digest_in_32_bits(engine)


def test_checkpoints_do_not_know_how_they_were_trained(two, tmp_path):
    soon, late = (two.run(save_and_go_on, str(tmp_path / str(soon)), soon) for soon in (True, False))
    assert soon == late


# --- what it is for ---------------------------------------------------------------------------------------------------


def updated_when(stage: int, zero: dict[str, Any]) -> tuple[list[str], list[str], int]:
    """The units that have been updated when autograd returns, in their order, those that have not, and the steps taken."""
    engine = start_early(stage, more=BF16, **zero)
    take_steps(engine, 1)
    engine(batch_of(1, my_rank())).backward()
    updated = [unit.name for unit in engine.stepping.early.norms]
    left = [unit.name for unit in engine.schedule.units.values() if unit not in engine.stepping.early.norms]
    engine.step()
    return updated, left, engine.global_steps


@pytest.mark.parametrize("place", ["stage2", "stage3", "stage2-offload", "infinity-host"])
def test_units_are_updated_in_the_backward_last_ones_first(two, place):
    for updated, left, steps in two.run(updated_when, *STAGES[place]):
        assert updated == ["head", "blocks.2", "blocks.1"]
        assert left == ["", "tok", "blocks.0"], "the reduce of a block goes on beside what is left of the backward"
        assert steps == 2


def gathered_when() -> tuple[list[str], list[str]]:
    """The units that are being gathered when the backward has returned, and those that are there after the step."""
    engine = start_early(2, more=BF16 | {"naught": {"lazy_weights": False}}, offload_optimizer=HOST)
    take_steps(engine, 1)
    units = engine.schedule.units.values()
    engine.backward(engine(batch_of(1, my_rank())))
    assert len(engine.stepping.early.norms) == len(engine.schedule.units)
    pending = [unit.name for unit in units if unit.pending]
    engine.step()
    return pending, [unit.name for unit in units if not unit.present]


def test_a_backward_does_not_wait_for_updates_on_the_host_also_where_weights_are_to_be_there_after_the_step(two):
    assert two.run(gathered_when) == [([], [])] * 2


def deep(layers: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(layers))))


def take_deep_steps(engine: Engine, steps: int) -> None:
    for _ in range(steps):
        loss = engine(torch.randn(2, 64, device=DEVICE, dtype=torch.bfloat16)).square().mean()
        engine.backward(loss)
        engine.step()


def held_by(layers: int, stage: int, zero: dict[str, Any], soon: bool) -> tuple[dict[str, int], dict[str, int]]:
    ours = {"stage3_prefetch_bucket_size": 0} if stage == 3 else {}
    engine = engine_of(deep(layers), config_of(stage, more=early(BF16) if soon else BF16, **zero, **ours))
    take_deep_steps(engine, 3)
    found = engine.report()["peak"], engine.planned()
    engine.destroy()
    return found


KINDS = [*(kind.value for kind in (Buffer.WHOLE_GRADS, Buffer.OWNED_GRADS, Buffer.GRAD_FLATS)), "host gradients"]


@pytest.mark.parametrize("place", ["stage0", "stage1", "stage2", "stage3", "stage2-offload", "infinity-host"])
def test_gradients_take_as_much_however_deep_a_model_is_and_as_planned(two, place):
    stage, zero = STAGES[place]
    few, many, late = (two.run(held_by, layers, stage, zero, soon) for layers, soon in ((4, True), (12, True), (12, False)))
    for (held, planned), (deep, deep_planned), (waiting, _) in zip(few, many, late, strict=True):
        assert {kind: held.get(kind, 0) for kind in KINDS} == {kind: deep.get(kind, 0) for kind in KINDS}
        for found, said in ((held, planned), (deep, deep_planned)):
            assert {kind: found.get(kind, 0) for kind in KINDS} == {kind: said.get(kind, 0) for kind in KINDS}
        assert sum(deep.get(kind, 0) for kind in KINDS) < sum(waiting.get(kind, 0) for kind in KINDS) / 2


@pytest.mark.parametrize("name", ["stage0", "stage1", "stage2", "stage3", "stage2-offload", "infinity-host"])
def test_a_forecast_has_gradients_of_no_more_than_a_few_units(name):
    def held(units: int, soon: bool) -> dict[Tier, int]:
        job = Job(checkpointing=Checkpointing.NONE, update_in_backward=soon)
        found = forecast("x", [PlacedRun(Run("block", 1 << 20, units), PLACEMENTS[name])], NOTHING, Machine(ranks=2), job)
        return {tier: found.total(tier) for tier in Tier}

    placement = PLACEMENTS[name]
    tier = placement.sums_rest
    each = 4 if tier is Tier.HOST else 2
    saved = {units: held(units, False)[tier] - held(units, True)[tier] for units in (8, 24)}
    share = 1 if not placement.grad.split and tier is Tier.DEVICE else 2
    assert saved[24] - saved[8] == 16 * each * (1 << 20) // share, "for each unit more the gradients of one"


@pytest.mark.skipif(ON_GPU, reason="a GPU hands out no less than 2 MB")
def test_a_model_that_fits_only_without_gradients_is_told_so_and_trains_within_its_limits():
    limits = {"placement": "auto", "gpu_memory": "600kB", "host_memory": "920kB", "activation_memory": 1}

    def engine(soon: bool) -> Engine:
        more = BF16 | {"naught": limits | {"update_in_backward": soon}}
        return engine_of(deep(24), config_of(3, more=more, stage3_prefetch_bucket_size=0))

    with pytest.raises(PlacementError, match=r"Set naught\.update_in_backward, for one micro-batch a step, no clipping"):
        engine(False)
    trained = engine(True)
    take_deep_steps(trained, 3)
    peak = trained.report()["peak"]
    assert 0 < sum(nbytes for name, nbytes in peak.items() if name.startswith("host ")) <= 920_000
    trained.destroy()


# --- what it cannot be beside, and what happens in the middle ------------------------------------------------------------


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"gradient_clipping": 1.0}, r"clipping at 1 needs the norm of all gradients.*set gradient_clipping to 0"),
        ({"fp16": {"enabled": True}}, "fp16 has to know whether any gradient overflows"),
        ({"gradient_accumulation_steps": 2}, "gradients that are summed over micro-batches have to stay"),
        ({"managed_gradient_accumulation": False}, "who counts micro-batches says too late"),
        ({"train_batch_size": 4, "gradient_accumulation_steps": None}, "a step has 2 of them.*zero.Vertical"),
        (
            {"zero_optimization": {"stage": 2, "offload_optimizer": HOST}, "naught": EARLY["naught"] | {"delay_update_after": 1}},
            "updates come either in the backward or a step late",
        ),
    ],
)
def test_what_would_have_to_wait_is_refused(more, words):
    config = {key: value for key, value in (config_of(2, more=EARLY) | more).items() if value is not None}
    with pytest.raises((ConfigError, UsageError), match=words):
        engine_of(MODELS["plain"](), config)


def test_that_clipping_is_the_default_is_said():
    config = config_of(2, more=EARLY)
    del config["gradient_clipping"]
    with pytest.raises(ConfigError, match=r"clipping at 1 \(the default\) needs the norm"):
        engine_of(MODELS["plain"](), config)


def test_an_optimizer_that_works_in_step_is_refused():
    model = MODELS["plain"]().to(DEVICE)
    config = config_of(2, more=EARLY)
    del config["optimizer"]
    with pytest.raises(UsageError, match=r"update_in_backward is not for this optimizer \(NAdam\)"):
        initialize(model=model, optimizer=torch.optim.NAdam(model.parameters(), lr=1e-3), config=config)


def backward(engine: Engine, factor: float = 1.0) -> None:
    engine.backward(engine(batch_of(1, my_rank())) * factor)


def evaluate(engine: Engine) -> None:
    with torch.no_grad():
        engine(batch_of(1, my_rank()))


def first_of(engine: Engine) -> nn.Parameter:
    return next(engine.module.parameters())


def make_infinite(engine: Engine) -> None:
    backward(engine, float("inf") if my_rank() == 0 else 1.0)
    engine.step()


def come_late(engine: Engine) -> None:
    backward(engine)
    engine.empty_partition_cache()  # the pass is over
    first_of(engine).grad = torch.ones_like(first_of(engine)) if my_rank() == 0 else None
    engine.step()


def change_rate(engine: Engine) -> None:
    backward(engine)
    if my_rank() == 0:
        engine.optimizer.set_lr(0.5)
    engine.step()


def leave_unsynced(engine: Engine) -> None:
    with engine.no_sync():
        backward(engine)


def say_that_it_goes_on(engine: Engine) -> None:
    engine(batch_of(1, my_rank()))
    engine.set_gradient_accumulation_boundary(False)


def look_at_gradients(engine: Engine) -> None:
    backward(engine)
    safe_get_full_grad(first_of(engine))


# What may be done behind a backward, without a step; a folder has a checkpoint.
MIDWAY: dict[str, Callable[[Engine, str], object]] = {
    "another backward": lambda engine, _: backward(engine),
    "evaluate": lambda engine, _: evaluate(engine),
    "gathered": lambda engine, _: engine.gathered().__enter__(),
    "zero_grad": lambda engine, _: engine.zero_grad(),
    "state_dict": lambda engine, _: engine.module.state_dict(),
    "read weights": lambda engine, _: safe_get_full_fp32_param(first_of(engine)),
    "read moments": lambda engine, _: safe_get_full_optimizer_state(first_of(engine), "exp_avg"),
    "save": lambda engine, folder: engine.save_checkpoint(folder, tag="midway"),
    "load a part": lambda engine, folder: engine.load_checkpoint(folder, load_optimizer_states=False),
}
ENDING = {
    make_infinite: "the gradients of this step are not finite, and units have been updated with them",
    come_late: "some rank has gradients that came after the updates of this step",
    change_rate: '"lr" was changed between a backward and its step',
}
REFUSED = {
    leave_unsynced: "this one is said not to end its step",
    say_that_it_goes_on: "this one is said not to end its step",
    look_at_gradients: "let go in the backward",
    lambda engine: engine.override_loss_scale(2.0): "a scale of 2 is undone before an update",
    lambda engine: engine.set_train_batch_size(engine.train_batch_size() * 2): "a step has 2 of them",
}


def make_mistakes(place: str) -> list[tuple[str, str]]:
    """Each in an engine of its own: what was to be said of it, and what was."""
    stage, zero = STAGES[place]
    stories = []
    for do, words in (ENDING | REFUSED).items():
        engine = start_early(stage, more=BF16, **zero)
        take_steps(engine, 1)
        with pytest.raises((UsageError, ScheduleError)) as caught:
            do(engine)
        notes = " ".join(getattr(caught.value, "__notes__", ()))
        assert ("Some weights are new and some are old: load a checkpoint" in notes) == (do in ENDING)
        stories.append((words, str(caught.value)))
        engine.destroy()
    return stories


@pytest.mark.parametrize("place", ["stage2", "stage3", "stage2-offload"])
def test_mistakes_are_told_on_every_rank_alike(two, place):
    for stories in two.run(make_mistakes, place):
        for words, story in stories:
            assert words in story


def write_midway(stage: int, more: dict[str, Any], name: str) -> str:
    """In a user's own backward: what training has come to, or what it was told."""
    engine = start(stage, more=more)
    take_steps(engine, 2)
    engine(batch_of(2, my_rank())).backward()
    weight = engine.module.get_submodule(name).weight
    with torch.no_grad():
        try:
            weight.mul_(0.5)
        except RuntimeError:
            weight.fill_(0.5)
    try:
        engine.step()
    except UsageError as error:
        return " ".join([str(error), *error.__notes__])
    return digest_in_32_bits(engine)


@pytest.mark.parametrize("precision", [{}, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_write_between_a_backward_and_its_step_is_told_or_kept_where_the_update_is_still_to_come(two, stage, precision):
    """Weights that are updated already read as NaN, and refuse writes."""
    more = precision | {"naught": {"lazy_weights": False}}
    for story in two.run(write_midway, stage, early(more), "head"):
        assert '"head.weight" was written to while it was released' in story
        assert "Some weights are new and some are old" in story
    assert two.run(write_midway, stage, early(more), "tok") == two.run(write_midway, stage, more, "tok")


def go_on(place: str, what: str, folder: str) -> str:
    stage, zero = STAGES[place]
    engine = start_early(stage, more=BF16, **zero)
    take_steps(engine, 2)
    engine.save_checkpoint(folder)
    engine.backward(engine(batch_of(2, my_rank())))
    with pytest.raises(UsageError, match=r"are in the weights already .* its step is not over"):
        MIDWAY[what](engine, folder)
    engine.step()
    take_steps(engine, 1, first=3)
    return digest_in_32_bits(engine)


@pytest.mark.parametrize("place", ["stage2", "stage3", "stage2-offload"])
@pytest.mark.parametrize("what", MIDWAY)
def test_who_is_refused_in_the_middle_has_lost_nothing(two, place, what, tmp_path):
    assert two.run(go_on, place, what, str(tmp_path)) == two.reference(take_four, place)


def take_four(place: str) -> str:
    stage, zero = STAGES[place]
    engine = start(stage, more=BF16, **zero)
    take_steps(engine, 4)
    return digest_in_32_bits(engine)


def backward_again(soon: bool, stage: int, zero: dict[str, Any]) -> tuple[str, float | None]:
    engine = start_early(stage, more=BF16, **zero) if soon else start(stage, more=BF16, **zero)
    take_steps(engine, 1)
    loss = engine(batch_of(1, my_rank()))
    engine.backward(loss, retain_graph=True)
    if soon:
        with pytest.raises(UsageError, match="a step is one forward and one backward"):
            engine.backward(loss)
    engine.step()
    return digest_in_32_bits(engine), engine.get_global_grad_norm()


@pytest.mark.parametrize("place", ["stage2", "stage3", "stage2-offload"])
def test_a_second_backward_is_refused_and_the_first_one_still_makes_a_step(two, place):
    assert two.run(backward_again, True, *STAGES[place]) == two.run(backward_again, False, *STAGES[place])


def backward_of_ones_own_again() -> str:
    engine = start_early(3, more=BF16)
    take_steps(engine, 1)
    loss = engine(batch_of(1, my_rank()))
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError) as caught:
        loss.backward()
    return str(caught.value)


def test_a_second_backward_of_ones_own_through_new_weights_is_told(two):
    """By autograd, which knows that they are not those of the forward."""
    for story in two.run(backward_of_ones_own_again):
        assert "modified by an inplace operation" in story


@pytest.mark.parametrize("steps", [False, True])
def test_an_engine_that_is_let_go_in_the_middle_says_so(caplog, steps):
    engine = start_early(2, more=BF16)
    engine.backward(engine(batch_of(1, 0)))
    if steps:
        engine.step()
    engine.destroy()
    assert ("some are new and some are old" in caplog.text) is not steps


class Fails(nn.Module):
    """In its backward, if it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.fails = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.requires_grad:
            x.register_hook(self._look)
        return x

    def _look(self, grad: torch.Tensor) -> torch.Tensor:
        if self.fails:
            raise ValueError("in the middle of it")
        return grad


def fail_and_load(folder: str, own: bool, stage: int, zero: dict[str, Any]) -> tuple[list[str], str, str]:
    """In a backward of the engine, or in one of the user's own, of which the engine hears nothing."""
    torch.manual_seed(0)
    model = MODELS["plain"]()
    fails = Fails()
    model.blocks.insert(1, fails)
    engine = engine_of(model, config_of(stage, more=early(BF16), **zero))
    take_steps(engine, 2)
    engine.save_checkpoint(folder)
    take_steps(engine, 1, first=2)
    once = digest_of_weights(engine)
    engine.load_checkpoint(folder)
    fails.fails = True
    with pytest.raises(ValueError, match="in the middle of it") as caught:
        loss = engine(batch_of(2, my_rank()))
        loss.backward() if own else engine.backward(loss)
    fails.fails = False
    for refused in () if own else (lambda: take_steps(engine), engine.step, lambda: engine.save_checkpoint(folder, tag="torn")):
        with pytest.raises(HalfUpdated, match="some weights are new and some are old"):
            refused()
    with pytest.raises(UsageError):  # of this nothing is left to be meant, and to load a part would not mend it
        engine.load_checkpoint(folder, load_module_only=True)
    engine.load_checkpoint(folder)
    take_steps(engine, 1, first=2)
    return getattr(caught.value, "__notes__", []), once, digest_of_weights(engine)


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("place", ["stage0", "stage1", "stage2-offload", "infinity-host"])
def test_an_exception_in_the_middle_is_not_gone_on_with_and_a_checkpoint_mends_it(two, tmp_path, own, place):
    for notes, once, again in two.run(fail_and_load, str(tmp_path), own, *STAGES[place]):
        assert own or any("Some weights are new and some are old: load a checkpoint" in note for note in notes)
        assert once == again


def test_gradients_that_are_not_finite_are_not_gone_on_with(two):
    for stories in two.run(after_not_finite):
        assert [words in story for words, story in zip(("are not finite", "Load a checkpoint"), stories, strict=True)] == [
            True
        ] * 2
    assert 'from unit "head" on' in two.run(after_not_finite)[0][0]


def after_not_finite() -> list[str]:
    engine = start_early(2)
    take_steps(engine, 1)
    loss = engine(batch_of(1, my_rank())) * (float("nan") if my_rank() == 1 else 1.0)
    engine.backward(loss)
    stories = []
    for _ in range(2):
        with pytest.raises((ScheduleError, HalfUpdated)) as caught:
            engine.step()
        stories.append(str(caught.value))
    return stories
