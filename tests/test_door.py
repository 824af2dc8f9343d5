"""DeepSpeed's door: every name that its scripts use, called as they call it."""

from __future__ import annotations

import argparse
import base64
import json
from typing import Any

import pytest
import torch
from menagerie import DEVICE, MODELS, batch_of, my_rank
from torch import nn
from torch.utils.data import Dataset
from training import config_of, digest_of_weights, engine_of, start, take_steps

import naught as deepspeed
from naught.errors import UsageError

pytestmark = pytest.mark.usefixtures("one_thread")


def model_of(name: str = "plain") -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name]().to(DEVICE)


class Numbers(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> torch.Tensor:
        return batch_of(index, 0)[0].cpu()


# --- initialize ---------------------------------------------------------------------------------------------------------


def test_the_configuration_may_come_by_every_way(tmp_path):
    config = config_of(1)
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(config))
    parser = deepspeed.add_config_arguments(argparse.ArgumentParser())
    args = parser.parse_args(["--deepspeed", "--deepspeed_config", str(path)])
    ways: list[dict[str, Any]] = [
        {"config": config},
        {"config": str(path)},
        {"config_params": config},
        {"args": args},
        {"config": base64.urlsafe_b64encode(json.dumps(config).encode()).decode()},
    ]
    for way in ways:
        engine, optimizer, loader, scheduler = deepspeed.initialize(model=model_of(), **way)
        assert isinstance(engine, deepspeed.DeepSpeedEngine)
        assert (engine.zero_optimization_stage(), optimizer, loader, scheduler) == (1, engine.optimizer, None, None)
    with pytest.raises(UsageError, match="two configurations"):
        deepspeed.initialize(args=args, model=model_of(), config=config)
    with pytest.raises(UsageError, match="no configuration"):
        deepspeed.initialize(model=model_of())
    with pytest.raises(UsageError, match="the model is a NoneType"):
        deepspeed.initialize(config=config)
    with pytest.raises(deepspeed.DeepSpeedConfigError):
        deepspeed.initialize(model=model_of(), config={"train_batch_size": "many"})


def loads(stage: int) -> list[list[list[int]]]:
    engine, _, loader, _ = deepspeed.initialize(
        model=model_of(),
        config=config_of(stage),
        training_data=Numbers(),
        collate_fn=torch.stack,
        model_parameters=None,
        dist_init_required=False,
    )
    assert loader is engine.training_dataloader
    epochs = []
    for _ in range(2):
        epochs.append([batch[:, 0].tolist() for batch in loader])
        for batch in loader:
            engine.backward(engine(batch.to(engine.device)))
            engine.step()
    return epochs


def test_training_data_is_shared_out_in_micro_batches(two):
    one, other = two.run(loads, 2)
    assert len(one[0]) == 3
    assert all(len(batch) == 2 for batch in one[0])
    everything = sorted(int(Numbers()[index][0]) for index in range(12))
    for mine, theirs in zip(one, other, strict=True):
        assert sorted(number for batch in mine + theirs for number in batch) == everything
    assert one[0] != one[1], "shuffled anew"


def test_deepspeed_io_and_the_repeating_loader():
    engine = engine_of(model_of(), config_of(0) | {"dataloader_drop_last": True})
    assert len(engine.deepspeed_io(Numbers())) == 6
    assert len(engine.deepspeed_io(Numbers(), batch_size=5)) == 2
    forever = deepspeed.utils.RepeatingLoader(engine.deepspeed_io(Numbers(), batch_size=6))
    assert [next(forever).shape[0] for _ in range(5)] == [6] * 5


def test_data_that_is_none_is_told_before_anything_happens_to_the_model():
    model = model_of()
    with pytest.raises(UsageError, match="the dataset is empty"):
        deepspeed.initialize(model=model, config=config_of(3), training_data=[])
    take_steps(engine_of(model, config_of(3)), 1)


def test_data_for_evaluation_comes_in_its_own_order():
    engine = start(0)
    loader = engine.deepspeed_io(Numbers(), 4, "eval", False)
    assert torch.equal(torch.cat(list(loader)), torch.stack([Numbers()[index] for index in range(12)]))


def test_sequence_parallelism_is_refused_and_an_mpu_of_one_rank_is_nothing():
    class Mpu:
        def get_model_parallel_world_size(self) -> int:
            return 1

    with pytest.raises(UsageError, match="mesh_param is for sequence parallelism"):
        deepspeed.initialize(model=model_of(), config=config_of(0), mesh_param=(1, 1))
    take_steps(deepspeed.initialize(model=model_of(), config=config_of(0), mpu=Mpu())[0], 1)


# --- what an engine tells -------------------------------------------------------------------------------------------------


def tells(stage: int) -> dict[str, Any]:
    config = config_of(stage, accumulation=2, clip=0.5) | {"fp16": {"enabled": True, "initial_scale_power": 4}}
    engine, optimizer, *_ = deepspeed.initialize(model=model_of(), config=config)
    assert engine.module is not engine
    before = {name: getattr(engine, name)() for name in ("is_gradient_accumulation_boundary", "was_step_applied")}
    take_steps(engine, 4)
    assert optimizer.loss_scale == optimizer.cur_scale == engine.loss_scale() == 16.0
    assert optimizer.dynamic_loss_scale
    assert optimizer.loss_scaler == (16.0, 16.0, 2, 1000)
    assert engine.tput_timer.avg_samples_per_sec() > 0
    assert not optimizer.overflow
    assert optimizer._global_grad_norm == engine.get_global_grad_norm() > 0
    assert optimizer.get_lr() == engine.get_lr() == [1e-2]
    assert set(engine.timers) == set(engine.get_wall_clock_timers()) >= {"forward", "backward", "step"}
    engine.allreduce_gradients()
    engine.empty_partition_cache()
    with engine.coalesce_grad_reduction():
        pass
    optimizer.set_lr(2e-2)
    assert engine.get_lr() == [2e-2]
    optimizer.override_loss_scale(8.0)
    assert (optimizer.loss_scale, optimizer.dynamic_loss_scale) == (8.0, False)
    assert engine.config["gradient_clipping"] == 0.5
    assert engine.monitor.enabled is False
    return before | {
        "device": engine.device.type,
        "ranks": (engine.global_rank, engine.world_size, engine.dp_world_size),
        "local": engine.local_rank,
        "counts": (engine.global_steps, engine.micro_steps, engine.skipped_steps, engine.global_samples),
        "batch": (engine.train_batch_size(), engine.train_micro_batch_size_per_gpu(), engine.gradient_accumulation_steps()),
        "info": tuple(engine.get_batch_info()),
        "stage": (engine.zero_optimization(), engine.zero_optimization_stage()),
        "split": (engine.zero_optimization_partition_gradients(), engine.zero_optimization_partition_weights()),
        "precision": (engine.fp16_enabled(), engine.bfloat16_enabled(), engine.dynamic_loss_scale()),
        "mom": engine.get_mom(),
        "applied": engine.was_step_applied(),
        "clip": engine.gradient_clipping(),
        "print": engine.steps_per_print(),
        "save": engine.zero_gather_16bit_weights_on_model_save(),
    }


def test_an_engine_answers_by_deepspeeds_names(two):
    for rank, told in enumerate(two.run(tells, 2)):
        assert told == {
            "is_gradient_accumulation_boundary": False,
            "was_step_applied": False,
            "device": DEVICE.type,
            "ranks": (rank, 2, 2),
            "local": 0,  # no launcher has said anything else
            "counts": (2, 4, 0, 16),
            "batch": (8, 2, 2),
            "info": (8, 2, 2),
            "stage": (True, 2),
            "split": (True, False),
            "precision": (True, False, False),
            "mom": [(0.9, 0.95)],
            "applied": True,
            "clip": 0.5,
            "print": None,
            "save": False,
        }


def test_what_an_engine_does_not_know_its_module_knows():
    engine = start(0)
    assert engine.head is engine.module.head
    assert engine.training
    engine.eval()
    assert not engine.module.training
    engine.train()
    with pytest.raises(AttributeError, match="nonsense"):
        engine.nonsense  # noqa: B018
    assert next(name for name, _ in engine.named_parameters()).startswith("module.")


# --- boundaries -----------------------------------------------------------------------------------------------------------


def declared(stage: int, steps: int, *, always: bool) -> tuple[str, int]:
    """As accelerate does: the caller says what the last micro-batch is, and steps only then, or always."""
    engine = start(stage, accumulation=steps)
    for micro in range(4):
        last = micro % 2 == 1
        engine.set_gradient_accumulation_boundary(is_boundary=last)
        assert engine.is_gradient_accumulation_boundary() == last
        loss = engine(batch_of(micro, my_rank()))
        engine.backward(loss / 2, scale_wrt_gas=False) if micro else (loss / (2 / steps)).backward()
        if not last:
            engine.zero_grad()  # in the middle of a step, this is nothing
        if last or always:
            engine.step()
        if not last:
            engine.zero_grad()
    assert engine.global_steps == 2
    engine.set_train_batch_size(8 * engine.world_size)
    return digest_of_weights(engine), engine.global_samples


def counted(stage: int, **more: Any) -> str:
    engine = start(stage, accumulation=2, **more)
    take_steps(engine, 4)
    return digest_of_weights(engine)


@pytest.mark.parametrize("stage", range(4))
def test_the_caller_may_say_where_a_step_ends(two, stage):
    for steps, always in ((1, False), (2, True), (2, False)):
        for weights, samples in two.run(declared, stage, steps, always=always):
            assert (weights, samples) == (two.reference(counted, stage)[0], 16)


def unmanaged(stage: int) -> str:
    engine = start(stage, accumulation=2, more={"managed_gradient_accumulation": False})
    for micro in range(4):
        engine.backward(engine(batch_of(micro, my_rank())))
        if micro % 2:
            engine.step()
    assert engine.global_samples == 16
    return digest_of_weights(engine)


@pytest.mark.parametrize("stage", range(4))
def test_unmanaged_every_step_of_the_caller_is_one(two, stage):
    assert two.run(unmanaged, stage) == two.reference(counted, stage)


class Both(nn.Module):
    """Returns its loss and what it was made of, as models of Hugging Face do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = MODELS["plain"]()

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.inner.tok(tokens)
        for block in self.inner.blocks:
            hidden = block(hidden)
        return hidden.float().square().mean(), hidden


def by_hand(stage: int, how: str, more: dict[str, Any]) -> tuple[str, list[float]]:
    """Who divides and who scales, where the backward is the user's own: the engine divides, engine.scale scales."""
    torch.manual_seed(0)
    engine = engine_of(Both(), config_of(stage, accumulation=2, more=more))
    norms = []
    for micro in range(4):
        loss, _ = engine(batch_of(micro, my_rank()))
        if how == "plain":
            engine.scale(loss).backward()
        elif how == "divided":
            shown = engine.backward(loss / 2, scale_wrt_gas=False)
            assert shown == loss.detach() / 2
        else:
            engine.backward(loss, retain_graph=True)
        engine.step()
        norms += [engine.get_global_grad_norm()] if micro % 2 else []
    return digest_of_weights(engine), norms


@pytest.mark.parametrize("stage", range(4))
def test_a_plain_backward_is_divided_by_the_micro_batches_and_scaled_by_the_engine(two, stage):
    assert len({two.run(by_hand, stage, how, {})[0][0] for how in ("engine", "plain", "divided")}) == 1
    half = {"fp16": {"enabled": True, "loss_scale": 256.0}}  # where smallest numbers are rounded before or after the division
    engines, plain = (two.run(by_hand, stage, how, half)[0][1] for how in ("engine", "plain"))
    assert plain == pytest.approx(engines, rel=1e-2)


def mixed(stage: int) -> float:
    """In one micro-batch a backward of the engine's and one of the user's own, and losses over two engines."""
    one, other = (start(stage, accumulation=2) for _ in range(2))
    for micro in range(2):
        batch = batch_of(micro, my_rank())
        one(batch).backward()
        one.backward(one(batch) + other(batch))
        one.step()
        other.step()
    assert one.get_global_grad_norm() == pytest.approx(2 * other.get_global_grad_norm(), rel=1e-5)
    return other.get_global_grad_norm()


@pytest.mark.parametrize("stage", range(4))
def test_backwards_of_both_kinds_and_of_two_engines_are_divided_once(two, stage):
    assert two.run(mixed, stage)[0] == pytest.approx(two.run(norm_of_two, stage)[0], rel=1e-5)


def norm_of_two(stage: int) -> float:
    engine = start(stage, accumulation=2)
    take_steps(engine, 2)
    return engine.get_global_grad_norm()


def test_the_batch_can_change_between_steps():
    engine = start(2, accumulation=2)
    take_steps(engine, 2)
    engine.set_train_batch_size(8)
    assert engine.get_batch_info() == (8, 2, 4)
    take_steps(engine, 4)
    assert (engine.global_steps, engine.global_samples) == (2, 12)
    engine.set_train_micro_batch_size(1)
    assert engine.get_batch_info() == (4, 1, 4)
    engine.set_train_micro_batch_size(2)
    with pytest.raises(UsageError, match="a batch of 3 cannot be made of micro-batches of 2 on 1 ranks"):
        engine.set_train_batch_size(3)
    take_steps(engine, 1)
    with pytest.raises(UsageError, match="in the middle of a step"):
        engine.set_train_batch_size(8)
    with pytest.raises(UsageError, match="a batch of 0 cannot be made"):
        start(0).set_train_micro_batch_size(0)
    with pytest.raises(UsageError, match="another kind of sum"):
        start(2, more={"bf16": {"enabled": True}}).set_train_batch_size(8)


@pytest.mark.parametrize("loss", [torch.ones(3, requires_grad=True), 1.0])
def test_a_loss_that_is_none_is_refused(loss):
    with pytest.raises(UsageError, match="not one number"):
        start(0).backward(loss)


# --- what users say of modules ---------------------------------------------------------------------------------------------


def test_modules_can_be_made_units():
    model = model_of()
    utils = deepspeed.utils
    found = utils.set_z3_leaf_modules(model, [nn.LayerNorm])
    assert len(found) == sum(isinstance(module, nn.LayerNorm) for module in model.modules())
    assert utils.get_z3_leaf_modules(model) == found
    assert utils.z3_leaf_module(model.norm)
    utils.unset_z3_leaf_modules(model, [nn.LayerNorm])
    assert not utils.get_z3_leaf_modules(model)
    assert utils.set_z3_leaf_modules_by_suffix(model, ["up"]) == [block.up for block in model.blocks]
    assert utils.set_z3_leaf_modules_by_name(model, ["norm"]) == [model.norm]
    engine = engine_of(model, config_of(3))
    assert {"norm", "blocks.0.up"} <= set(engine.schedule.units)
    assert take_steps(engine, 3) == take_steps(start(0), 3)
    with pytest.raises(UsageError, match=r"no modules of the classes .*GRU"):
        utils.set_z3_leaf_modules(model, nn.GRU)


class Borrower(nn.Module):
    """Uses the weights of another module."""

    def __init__(self, table: nn.Embedding) -> None:
        super().__init__()
        self.table = [table]  # not a submodule
        self.own = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.own(x) @ self.table[0].weight.t()


class Sharing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(64, 64)
        self.blocks = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))
        self.borrower = Borrower(self.table)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.table(tokens)
        for block in self.blocks:
            x = block(x)
        return self.borrower(x).square().mean()


def shares(stage: int, registered: bool) -> tuple[list[float], bool]:
    torch.manual_seed(0)
    model = Sharing().to(DEVICE)
    if registered:
        deepspeed.zero.register_external_parameter(model.borrower, model.table.weight)
    engine = engine_of(model, config_of(stage))
    known = any("table" in lent for lent in engine.passes.hooks.loans.borrowed.values())
    return take_steps(engine, 3), known


def test_a_parameter_of_another_module_can_be_registered(two):
    losses, _ = two.run(shares, 0, False)[0]
    for registered in (True, False):
        assert two.run(shares, 3, registered)[0][0] == losses
    assert two.run(shares, 3, True)[0][1], "known before the first forward"
    assert not two.run(shares, 3, False)[0][1]


def test_a_registered_parameter_may_be_on_the_meta_device():
    with torch.device("meta"):
        model = Sharing()
    deepspeed.zero.register_external_parameter(model.borrower, model.table.weight)
    engine = engine_of_meta(model)
    assert any("table" in lent for lent in engine.passes.hooks.loans.borrowed.values())
    take_steps(engine, 2)
    with pytest.raises(UsageError, match="belongs to an engine already"):
        deepspeed.zero.register_external_parameter(model.borrower, model.table.weight)


def engine_of_meta(model: nn.Module) -> Any:
    return deepspeed.initialize(model=model, config=config_of(3))[0]


def test_mistakes_with_external_parameters():
    layer = nn.Linear(2, 2)
    with pytest.raises(UsageError, match="wants a module and a parameter, not Linear and Tensor"):
        deepspeed.zero.register_external_parameter(layer, torch.zeros(2))
    with pytest.raises(UsageError, match="was not registered"):
        deepspeed.zero.unregister_external_parameter(layer, layer.weight)
    deepspeed.zero.register_external_parameter(layer, layer.weight)
    deepspeed.zero.unregister_external_parameter(layer, layer.weight)


# --- the rest ---------------------------------------------------------------------------------------------------------------


def compiles(stage: int) -> tuple[list[float], bool, bool]:
    import warnings

    engine = start(stage)
    before = engine.is_compiled
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        engine.compile(backend="aot_eager")
        losses = take_steps(engine, 3)
    return losses, before, engine.is_compiled


def test_an_engine_compiles_its_units(two):
    losses, before, after = two.run(compiles, 3)[0]
    assert (before, after) == (False, True)
    assert losses == pytest.approx(take_steps_on_two(two), rel=1e-5)


def take_steps_on_two(two: Any) -> list[float]:
    return two.run(three_steps)[0]


def three_steps() -> list[float]:
    return take_steps(start(3), 3)


def predivided(stage: int, keys: dict[str, Any]) -> str:
    engine = start(stage, more=keys)
    take_steps(engine, 2)
    return digest_of_weights(engine)


@pytest.mark.parametrize("keys", [{"prescale_gradients": True}, {"gradient_predivide_factor": 4.0}])
def test_where_gradients_are_divided_does_not_matter_by_powers_of_two(two, keys):
    plain = two.run(predivided, 0, {})[0]
    assert all(two.run(predivided, stage, keys)[0] == plain for stage in range(4))


def test_the_predivide_factor_is_heeded(worlds):
    thirds = {worlds[3].run(predivided, stage, {"gradient_predivide_factor": 7.0})[0] for stage in range(4)}
    assert len(thirds) == 1
    assert thirds != {worlds[3].run(predivided, 0, {})[0]}, "a seventh before and seven thirds after round differently"


def test_a_module_logger_and_log_dist(caplog):
    import logging

    assert deepspeed.utils.logger is logging.getLogger("naught")
    with caplog.at_level(logging.INFO, logger="naught"):
        deepspeed.utils.log_dist("here", ranks=[0])
        deepspeed.utils.log_dist("not here", ranks=[5])
    assert [record.getMessage() for record in caplog.records] == ["[rank 0] here"]


def test_buffers_take_the_precision_that_is_asked_for():
    model = nn.BatchNorm1d(4).to(DEVICE)
    engine_of(model, config_of(0, more={"data_types": {"buffer_dtype": "bf16"}}))
    assert model.running_mean.dtype == torch.bfloat16
    assert model.num_batches_tracked.dtype == torch.int64
