"""Parameter groups and users' own optimizers and schedules: at every stage what plain PyTorch computes, bit for bit."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from menagerie import DEVICE, MODELS, batch_of, my_rank
from torch import nn
from training import config_of, digest, digest_of_moments, digest_of_weights, take_steps

from naught.engine import Engine
from naught.errors import RankMismatch, UsageError
from naught.ops.adagrad import DeepSpeedCPUAdagrad
from naught.ops.adam import DeepSpeedCPUAdam, FusedAdam
from naught.ops.lion import DeepSpeedCPULion, FusedLion
from naught.start import initialize

pytestmark = pytest.mark.usefixtures("one_thread")

Make = Callable[[Any], torch.optim.Optimizer]


def bare(stage: int, **more: Any) -> dict[str, Any]:
    """A configuration that names no optimizer."""
    config = config_of(stage, **more)
    del config["optimizer"]
    return config


def model_of(name: str = "plain") -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name]().to(DEVICE)


def decay_and_none(model: nn.Module) -> list[dict[str, Any]]:
    """Matrices decay, vectors do not and learn faster; and a group that has nobody."""
    matrices = [param for param in model.parameters() if param.ndim > 1]
    vectors = [param for param in model.parameters() if param.ndim <= 1]
    return [{"params": matrices, "weight_decay": 0.1}, {"params": []}, {"params": vectors, "weight_decay": 0.0, "lr": 3e-2}]


MAKE: dict[str, Make] = {
    "AdamW": lambda params: torch.optim.AdamW(params, lr=1e-2),
    "AdamW fused": lambda params: torch.optim.AdamW(params, lr=1e-2, fused=True),
    "AdamW foreach amsgrad": lambda params: torch.optim.AdamW(params, lr=1e-2, foreach=True, amsgrad=True),
    "Adam": lambda params: torch.optim.Adam(params, lr=1e-2, weight_decay=0.1),
    "Adam maximize": lambda params: torch.optim.Adam(params, lr=1e-2, maximize=True, fused=True),
    "SGD": lambda params: torch.optim.SGD(params, lr=1e-2, momentum=0.9, dampening=0.1),
    "RMSprop": lambda params: torch.optim.RMSprop(params, lr=1e-3, momentum=0.9, centered=True),
    "NAdam": lambda params: torch.optim.NAdam(params, lr=1e-2),
    "RAdam": lambda params: torch.optim.RAdam(params, lr=1e-2),
    "Adamax": lambda params: torch.optim.Adamax(params, lr=1e-2),
    "Adadelta": lambda params: torch.optim.Adadelta(params, lr=1e-1),
    "ASGD": lambda params: torch.optim.ASGD(params, lr=1e-2),
    "Rprop": lambda params: torch.optim.Rprop(params, lr=1e-3),
    "Adagrad": lambda params: torch.optim.Adagrad(params, lr=1e-2, initial_accumulator_value=0.3),
    "DeepSpeedCPUAdam": lambda params: DeepSpeedCPUAdam(params, lr=1e-2, weight_decay=0.1),
    "FusedAdam": lambda params: FusedAdam(params, lr=1e-2, weight_decay=0.1, adam_w_mode=False),
    "DeepSpeedCPUAdagrad": lambda params: DeepSpeedCPUAdagrad(params, lr=1e-2),
    "DeepSpeedCPULion": lambda params: DeepSpeedCPULion(params, lr=1e-3, weight_decay=0.1),
    "FusedLion": lambda params: FusedLion(params, lr=1e-3),
}


def with_mine(stage: int, name: str, *, grouped: bool = False, of: str = "plain", steps: int = 4) -> tuple[str, str]:
    model = model_of(of)
    engine, optimizer, *_ = initialize(
        model=model,
        config=bare(stage),
        optimizer=MAKE[name](decay_and_none(model) if grouped else model.parameters()),
    )
    assert optimizer is engine.optimizer
    take_steps(engine, steps)
    return digest_of_weights(engine), digest_of_moments(engine)


def plainly(name: str, world: int, *, grouped: bool = False, of: str = "plain", steps: int = 4) -> str:
    model = model_of(of)
    optimizer = MAKE[name](decay_and_none(model) if grouped else model.parameters())
    for step in range(steps):
        optimizer.zero_grad()
        for rank in range(world):
            (model(batch_of(step, rank)) / world).backward()
        optimizer.step()
    return digest(list(model.parameters()))


class Counting(torch.optim.Optimizer):
    """Counts its steps in its group and in itself, as some do."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 1e-2, "step": 0})
        self.calls = 0

    @torch.no_grad()
    def step(self, _: Any = None) -> None:
        self.calls += 1
        for group in self.param_groups:
            group["step"] += 1
            for param in group["params"]:
                if param.grad is not None:
                    param.sub_(param.grad, alpha=group["lr"] / (group["step"] * self.calls))


class FirstGroupsRate(torch.optim.Optimizer):
    """Takes the rate of the first group for all."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 1e-2})

    @torch.no_grad()
    def step(self, _: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.sub_(param.grad, alpha=self.param_groups[0]["lr"])


class Wilful(torch.optim.AdamW):
    """Asks for the fused kernel and then does as it likes."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=1e-2, fused=True)

    @torch.no_grad()
    def step(self, _: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.sub_(param.grad.sign(), alpha=group["lr"])


class Prepared(torch.optim.Optimizer):
    """Makes its states when it is made, as some do, and needs an attribute of its own."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 1e-2})
        self.share = 0.9
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param] = {"average": torch.full_like(param, 0.5), "count": 0}

    @torch.no_grad()
    def step(self, _: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    state = self.state[param]
                    state["count"] += 1
                    state["average"] = state["average"] * self.share + param.grad * (1 - self.share)
                    param.sub_(state["average"], alpha=group["lr"] / state["count"])


MAKE |= {"Prepared": Prepared, "Counting": Counting, "FirstGroupsRate": FirstGroupsRate, "Wilful": Wilful}


@pytest.mark.parametrize("name", MAKE)
def test_a_torch_optimizer_does_at_every_stage_what_it_does_alone(worlds, name):
    runs = [worlds[2].run(with_mine, stage, name) for stage in range(4)]
    assert all(run == runs[0] for run in runs)
    assert runs[0][0][0] == worlds[1].reference(plainly, name, 2)[0]


@pytest.mark.parametrize("name", ["AdamW", "AdamW fused", "NAdam", "SGD", "FirstGroupsRate", "Counting"])
def test_groups_have_hyperparameters_of_their_own(worlds, name):
    runs = [worlds[2].run(with_mine, stage, name, grouped=True) for stage in range(4)]
    assert all(run == runs[0] for run in runs)
    assert runs[0][0][0] == worlds[1].run(plainly, name, 2, grouped=True)[0]
    same = name == "FirstGroupsRate"  # which does not look at the others
    assert (runs[0][0][0] == worlds[1].reference(plainly, name, 2)[0]) == same


@pytest.mark.parametrize("of", ["uneven_sizes_and_users_hooks", "unused_parameters", "tied", "lora"])
def test_odd_sizes_unused_tied_and_frozen_parameters(worlds, of):
    """A parameter by itself is rounded as torch rounds it, its odd tail too."""
    runs = [worlds[2].run(with_mine, stage, "AdamW", of=of) for stage in range(4)]
    assert all(run == runs[0] for run in runs)
    assert runs[0][0][0] == worlds[1].run(plainly, "AdamW", 2, of=of)[0]


# --- by name, with groups -----------------------------------------------------------------------------------------------


def named_with_groups(stage: int, more: dict[str, Any]) -> tuple[str, str]:
    model = model_of("frozen")
    groups = [{**group, "params": [param for param in group["params"]]} for group in decay_and_none(model)]
    engine = initialize(model=model, config=config_of(stage, params={"lr": 1e-2}, more=more), model_parameters=groups)[0]
    take_steps(engine, 3)
    return digest_of_weights(engine), digest_of_moments(engine)


class OddEnds(nn.Module):
    """Parameters of odd lengths, so placed that a boundary between two ranks' parts falls between two of one group."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Parameter(torch.randn(numel)) for numel in (127, 63, 64))

    def forward(self, x: torch.Tensor, *, third: bool = True) -> torch.Tensor:
        parts = [self.first, self.second, *([self.third] if third else [])]
        return sum((part.tanh().float() * x[:, : part.numel()]).mean() for part in parts)


def trained_with_odd_ends(stage: int, more: dict[str, Any], zero: dict[str, Any]) -> str:
    torch.manual_seed(0)
    model = OddEnds().to(DEVICE)
    groups = [{"params": [model.first, model.second]}, {"params": [model.third], "weight_decay": 0.0}]
    engine = initialize(model=model, config=config_of(stage, clip=0.01, more=more, **zero), model_parameters=groups)[0]
    for step in range(20):
        x = torch.randn(2, 127, generator=torch.Generator().manual_seed(2 * step + my_rank())).to(DEVICE)
        engine.backward(engine(x, third=step % 3 != 1))
        engine.step()
    return digest_of_weights(engine)


@pytest.mark.parametrize("more", [{}, {"naught": {"small_moments": True}}, {"bf16": {"enabled": True}}])
def test_groups_of_odd_lengths_of_which_not_all_are_used_are_alike_in_every_placement(worlds, more):
    split = {"stage3_param_persistence_threshold": 0}
    near = [(0, {}), (1, {}), (2, {}), (3, split)]
    far = [(stage, zero | {"offload_optimizer": {"device": "cpu"}}) for stage, zero in near[1:]]
    for size in (1, 2, 3):
        for places in (near, far) if DEVICE.type == "cuda" else (near + far,):
            assert (
                len({found for stage, zero in places for found in worlds[size].run(trained_with_odd_ends, stage, more, zero)})
                == 1
            )


@pytest.mark.parametrize(("size", "more"), [(2, {}), (3, {"bf16": {"enabled": True}})])
def test_a_named_optimizer_takes_groups_too_and_frozen_members(worlds, size, more):
    runs = [worlds[size].run(named_with_groups, stage, more) for stage in range(4)]
    assert all(run == runs[0] for run in runs)
    if not more:
        model = model_of("frozen")
        optimizer = torch.optim.AdamW(decay_and_none(model), lr=1e-2, weight_decay=0.0, fused=True)
        for step in range(3):
            optimizer.zero_grad()
            for rank in range(2):
                (model(batch_of(step, rank)) / 2).backward()
            optimizer.step()
        assert runs[0][0][0] == digest(list(model.parameters()))


def test_what_is_in_no_group_is_not_trained(caplog):
    for stage in (0, 3):
        model = model_of()
        before = digest([model.head.weight])
        rest = [param for name, param in model.named_parameters() if not name.startswith("head")]
        engine = initialize(model=model, config=config_of(stage), model_parameters=rest)[0]
        take_steps(engine, 2)
        assert model.head.weight.grad is None
        with engine.gathered():
            assert digest([model.head.weight]) == before
        assert "exp_avg" not in engine.schedule.units["head"].segments[0].states.moments
    assert "are in no group of the optimizer" in caplog.text
    assert '"head.weight"' in caplog.text


def test_a_function_makes_the_optimizer_of_the_parameters():
    made: list[torch.optim.Optimizer] = []

    def make(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        made.append(torch.optim.NAdam(params, lr=1e-2))
        return made[0]

    engine, optimizer, _, _ = initialize(model=model_of(), config=bare(2), optimizer=make)
    assert optimizer.optimizer is made[0]
    assert optimizer.param_groups is made[0].param_groups
    take_steps(engine, 1)
    assert not made[0].state, "what it remembers is in the engine's flats"


def without_any(stage: int) -> list[float]:
    engine, optimizer, loader, scheduler = initialize(model=model_of(), config=bare(stage, more={"bf16": {"enabled": True}}))
    assert (optimizer, loader, scheduler) == (None, None, None)
    with torch.no_grad():
        losses = [engine(batch_of(step, my_rank())).item() for step in range(3)]
    assert set(engine.report()["live"]) == {"weights"} | ({"gathered weights"} if stage == 3 else set()), "no masters either"
    with pytest.raises(UsageError, match="without an optimizer"):
        engine.step()
    return losses


def test_without_an_optimizer_a_model_only_computes(two):
    assert two.run(without_any, 3) == two.run(without_any, 0)


# --- what is refused ----------------------------------------------------------------------------------------------------


class Lamb(torch.optim.Optimizer):
    """Scales the step of a parameter by its norm."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, _: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.sub_(param.grad * (param.norm() / param.grad.norm()), alpha=group["lr"])


class Clipped(torch.optim.SGD):
    """Looks at all gradients together."""

    def step(self, _: Any = None) -> None:
        torch.nn.utils.clip_grad_norm_([param for group in self.param_groups for param in group["params"]], 50.0)
        super().step()


class Around(torch.optim.Optimizer):
    """Has another optimizer inside."""

    def __init__(self, params: Any) -> None:
        params = list(params)
        self.inner = torch.optim.SGD(params, lr=0.1)
        super().__init__(params, {"lr": 0.1})

    def step(self, _: Any = None) -> None:
        self.inner.step()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (Lamb, "Lamb cannot be used .* depends on other elements"),
        (lambda params: Clipped(params, lr=0.1), "Clipped cannot be used .* depends on other elements"),
        (Around, "Around cannot be used .* did not change parameters"),
        (torch.optim.LBFGS, "LBFGS cannot be used .*closure"),
        (torch.optim.Adafactor, "Adafactor cannot be used .* depends on other elements"),
    ],
)
def test_an_optimizer_that_is_not_elementwise_is_refused_with_the_reason(make, words):
    model = model_of()
    with pytest.raises(UsageError, match=words):
        initialize(model=model, config=bare(1), optimizer=make(model.parameters()))
    initialize(model=model, config=config_of(1))  # nothing has happened to the model


def stepped(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters())
    model(batch_of(0, 0)).backward()
    optimizer.step()
    return optimizer


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (lambda _: {"optimizer": torch.optim.SGD(MODELS["plain"]().parameters(), lr=1.0)}, "that the model has not"),
        (lambda model: {"optimizer": stepped(model)}, "has taken steps already"),
        (lambda _: {"optimizer": "adam"}, "is a str, not a torch.optim.Optimizer"),
        (lambda _: {"lr_scheduler": "cosine", "config": config_of(0)}, r"lr_scheduler is a str and has no step\(\)"),
        (lambda _: {"lr_scheduler": torch.optim.lr_scheduler.ConstantLR}, "there is no optimizer whose rate"),
        (lambda _: {"model_parameters": 3, "config": config_of(0)}, "model_parameters is a int"),
        (lambda _: {"optimizer": lambda _: 3}, "is a int, not a torch.optim.Optimizer"),
        (lambda _: {"model_parameters": ["head"], "config": config_of(0)}, "has a str where a parameter should be"),
        (
            lambda model: {"model_parameters": [{"params": [model.head.weight]}] * 2, "config": config_of(0)},
            r"of shape \[64, 64\] is in the parameter groups 0 and 1",
        ),
    ],
)
def test_mistakes_with_parameters_get_one_clear_error(arguments, words):
    model = model_of()
    with pytest.raises(UsageError, match=words):
        initialize(**{"model": model, "config": bare(0), **arguments(model)})


def different_groups() -> str:
    model = model_of()
    rate = 1e-2 if my_rank() == 0 else 1e-3
    try:
        initialize(model=model, config=bare(2), optimizer=torch.optim.AdamW(model.parameters(), lr=rate))
    except RankMismatch as error:
        return str(error)
    return "nothing was noticed"


def test_ranks_with_other_hyperparameters_are_told(two):
    for said in two.run(different_groups):
        assert '"lr" of parameter group 0: 0.01 on rank 0, 0.001 on rank 1' in said


def wrong_on_one_rank() -> str:
    model = model_of()
    try:
        initialize(model=model, config=bare(2), optimizer=(Lamb if my_rank() == 1 else torch.optim.AdamW)(model.parameters()))
    except UsageError as error:
        return str(error)
    return "nothing was noticed"


def test_a_mistake_on_one_rank_is_told_on_all(two):
    other, own = two.run(wrong_on_one_rank)
    assert "[rank 1]" in other
    assert "Lamb cannot be used" in own


# --- schedules ------------------------------------------------------------------------------------------------------------


def rates_and_weights(engine: Engine, steps: int = 5, **kwargs: Any) -> tuple[list[list[float]], str]:
    rates = []
    for step in range(steps):
        rates.append(engine.get_lr())
        engine.backward(engine(batch_of(step, my_rank())))
        engine.step(**kwargs)
    return rates, digest_of_weights(engine)


def by_torch(how: str, stage: int) -> tuple[list[list[float]], str]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch warns if it believes that no step has been
        return scheduled(how, stage)


def scheduled(how: str, stage: int) -> tuple[list[list[float]], str]:
    """A scheduler made of the user's optimizer before, by a function, or of the engine's optimizer afterwards."""
    model = model_of()
    optimizer = torch.optim.AdamW(decay_and_none(model), lr=1e-2, fused=True)

    def make(of: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.OneCycleLR(of, max_lr=[1e-2, 1e-3, 2e-2], total_steps=6)

    if how == "afterwards":
        engine, returned, *_ = initialize(model=model, config=bare(stage), optimizer=optimizer)
        scheduler = make(returned)
        rates = []
        for step in range(5):
            rates.append(engine.get_lr())
            take_steps(engine, 1, first=step)
            scheduler.step()
        return rates, digest_of_weights(engine)
    given = make if how == "function" else make(optimizer)
    engine, _, _, scheduler = initialize(model=model, config=bare(stage), optimizer=optimizer, lr_scheduler=given)
    assert scheduler is engine.lr_scheduler
    return rates_and_weights(engine)


def alone(world: int) -> tuple[list[list[float]], str]:
    model = model_of()
    optimizer = torch.optim.AdamW(decay_and_none(model), lr=1e-2, fused=True)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=[1e-2, 1e-3, 2e-2], total_steps=6)
    rates = []
    for step in range(5):
        rates.append([group["lr"] for group in optimizer.param_groups])
        optimizer.zero_grad()
        for rank in range(world):
            (model(batch_of(step, rank)) / world).backward()
        optimizer.step()
        scheduler.step()
    return rates, digest(list(model.parameters()))


@pytest.mark.parametrize("how", ["object", "function", "afterwards"])
@pytest.mark.parametrize("stage", [0, 3])
def test_a_torch_scheduler_sets_the_rates(worlds, how, stage):
    assert worlds[2].run(by_torch, how, stage)[0] == worlds[1].reference(alone, 2)[0]


def test_a_rate_that_begins_at_zero_is_no_reason_to_refuse():
    model = model_of()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    warm_up = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 2)
    engine = initialize(model=model, config=bare(1), optimizer=optimizer, lr_scheduler=warm_up)[0]
    assert rates_and_weights(engine, 3)[0] == [[0.0], [5e-3], [1e-2]]


def test_hooks_of_a_users_optimizer_are_called_around_every_step():
    model, heard = model_of(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    optimizer.register_step_pre_hook(lambda *_: heard.append("before"))
    optimizer.register_step_post_hook(lambda *_: heard.append("after"))
    engine = initialize(model=model, config=bare(1), optimizer=optimizer)[0]
    take_steps(engine, 2)
    assert heard == ["before", "after"] * 2


def stepping_ones_own(stage: int) -> tuple[str, str]:
    model = model_of()
    mine = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine = initialize(model=model, config=bare(stage), optimizer=mine)[0]
    for step in range(3):
        engine(batch_of(step, my_rank())).backward()
        mine.step()
        mine.zero_grad()
    assert engine.global_steps == 3
    weights = digest_of_weights(engine)
    engine.destroy()
    mine.step()  # their own again
    return weights, with_mine(stage, "AdamW", steps=3)[0]


@pytest.mark.parametrize("stage", [1, 3])
def test_a_step_of_ones_own_optimizer_is_the_engines(two, stage):
    for stepped, engines in two.run(stepping_ones_own, stage):
        assert stepped == engines


def test_states_of_an_optimizer_are_in_the_engine():
    engine = initialize(model=model_of(), config=config_of(1))[0]
    with pytest.raises(UsageError, match="safe_get_full_optimizer_state"):
        engine.optimizer.state_dict()
    with pytest.raises(UsageError, match="safe_set_full_optimizer_state"):
        engine.optimizer.load_state_dict({})
    with pytest.raises(UsageError, match="cannot be added to an engine"):
        engine.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})


def test_a_scheduler_gets_the_arguments_of_the_step():
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
    engine = initialize(model=model, config=bare(0), optimizer=optimizer, lr_scheduler=plateau)[0]
    rates, _ = rates_and_weights(engine, lr_kwargs={"metrics": 1.0})
    assert rates == [[1.0], [1.0], [0.5], [0.25], [0.125]]


def test_a_scheduler_of_another_optimizer_is_refused():
    model = model_of()
    other = torch.optim.lr_scheduler.ConstantLR(torch.optim.SGD(model.parameters(), lr=1.0))
    with pytest.raises(UsageError, match="writes its rates into another optimizer"):
        initialize(model=model, config=config_of(0), lr_scheduler=other)


def test_the_configurations_schedule_goes_before_the_callers(caplog):
    warm_up = {"type": "WarmupLR", "params": {"warmup_num_steps": 3}}
    engine, _, _, scheduler = initialize(
        model=model_of(), config=config_of(0) | {"scheduler": warm_up}, lr_scheduler=torch.optim.lr_scheduler.ConstantLR
    )
    assert scheduler is engine.lr_scheduler
    assert type(scheduler).__name__ == "RateSchedule"
    assert "lr_scheduler is not used" in caplog.text
