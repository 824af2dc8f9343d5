"""Every rule, at every stage, computes what torch's optimizer or its formula computes, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from menagerie import DEVICE, MODELS, batch_of
from torch import nn
from training import config_of, digest, engine_of, take_steps, train

pytestmark = pytest.mark.usefixtures("one_thread")


class LionByFormula:
    """theta <- theta (1 - lr wd) - lr sign(m + (1 - b1)(g - m)); then m <- m + (1 - b2)(g - m)."""

    def __init__(self, params: Iterable[nn.Parameter], *, lr: float, weight_decay: float, betas: tuple[float, float]) -> None:
        self.params, self.lr, self.decay, self.betas = list(params), lr, weight_decay, betas
        self.moments = [torch.zeros_like(param) for param in self.params]

    def zero_grad(self) -> None:
        for param in self.params:
            param.grad = None

    @torch.no_grad()
    def step(self) -> None:
        for param, moment in zip(self.params, self.moments, strict=True):
            direction = torch.lerp(moment, param.grad, 1 - self.betas[0]).sign()
            param.mul_(1 - self.lr * self.decay)
            param.sub_(direction, alpha=self.lr)
            moment.lerp_(param.grad, 1 - self.betas[1])


Make = Callable[[Iterable[nn.Parameter]], Any]
RULES: dict[str, tuple[str, dict[str, Any], Make]] = {
    "sgd": (
        "SGD",
        {"lr": 1e-2, "momentum": 0.9, "weight_decay": 0.1},
        lambda params: torch.optim.SGD(params, lr=1e-2, momentum=0.9, weight_decay=0.1, foreach=False),
    ),
    "plain sgd": ("SGD", {"lr": 1e-2}, lambda params: torch.optim.SGD(params, lr=1e-2, foreach=False)),
    "nesterov": (
        "SGD",
        {"lr": 1e-2, "momentum": 0.9, "nesterov": True},
        lambda params: torch.optim.SGD(params, lr=1e-2, momentum=0.9, nesterov=True, foreach=False),
    ),
    "adam means adamw": (
        "Adam",
        {"lr": 1e-2, "weight_decay": 0.1},
        lambda params: torch.optim.AdamW(params, lr=1e-2, weight_decay=0.1, fused=True),
    ),
    "adam": (
        "Adam",
        {"lr": 1e-2, "weight_decay": 0.1, "adam_w_mode": False},
        lambda params: torch.optim.Adam(params, lr=1e-2, weight_decay=0.1, fused=True),
    ),
    "adagrad": (
        "Adagrad",
        {"lr": 1e-2, "lr_decay": 0.1, "weight_decay": 0.1, "initial_accumulator_value": 0.5},
        lambda params: torch.optim.Adagrad(
            params, lr=1e-2, lr_decay=0.1, weight_decay=0.1, initial_accumulator_value=0.5, foreach=False
        ),
    ),
    "lion": (
        "Lion",
        {"lr": 1e-3, "weight_decay": 0.1},
        lambda params: LionByFormula(params, lr=1e-3, weight_decay=0.1, betas=(0.9, 0.99)),
    ),
}


def plainly(name: str) -> str:
    torch.manual_seed(0)
    model = MODELS["plain"]().to(DEVICE)
    optimizer = RULES[name][2](model.parameters())
    for step in range(4):
        optimizer.zero_grad()
        for rank in range(2):
            (model(batch_of(step, rank)) / 2).backward()
        optimizer.step()
    return digest(list(model.parameters()))


@pytest.mark.parametrize("name", RULES)
def test_a_rule_is_torchs_at_every_stage(worlds, name):
    kind, params, _ = RULES[name]
    runs = [worlds[2].run(train, "plain", stage, optimizer=kind, params=params) for stage in range(4)]
    assert all(run == runs[0] for run in runs)
    assert runs[0][0].weights == worlds[1].run(plainly, name)[0]


def scheduled(stage: int) -> tuple[list[float], str]:
    torch.manual_seed(0)
    warm_up = {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-2, "warmup_num_steps": 3, "warmup_type": "linear"}}
    engine = engine_of(MODELS["plain"](), config_of(stage) | {"scheduler": warm_up})
    rates = []
    for step in range(5):
        rates += engine.get_lr()
        take_steps(engine, 1, first=step)
    return rates, digest([param for param in engine.module.parameters() if stage < 3])


def test_the_engine_steps_the_schedule_that_the_configuration_names(two):
    rates, _ = two.run(scheduled, 0)[0]
    assert rates == pytest.approx([0.0, 0.0, 1e-2 / 3, 2e-2 / 3, 1e-2])
    assert two.run(scheduled, 1) == two.run(scheduled, 2) == two.run(scheduled, 0)


def test_a_skipped_step_does_not_step_the_schedule():
    config = config_of(0) | {"scheduler": {"type": "WarmupLR"}}
    engine = engine_of(MODELS["plain"](), config)
    engine.backward(engine(batch_of(0, 0)) * float("nan"))
    engine.step()
    assert engine.lr_scheduler is not None
    assert (engine.skipped_steps, engine.lr_scheduler.last_batch_iteration) == (1, -1)
