"""What the engine's Python costs for each unit and step: the slope of step time over the number of units.

One process and tiny blocks, so that nothing but Python is measured; the same blocks without an engine are subtracted.

    .venv/bin/python benchmarks/overhead.py
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

import naught

COUNTS, STEPS, ROUNDS = (10, 20, 40, 80), 30, 5


class Block(nn.Module):
    """As many parameters as a small block has, and next to no arithmetic."""

    def __init__(self) -> None:
        super().__init__()
        self.gains = nn.ParameterList(torch.ones(64) for _ in range(3))
        self.shifts = nn.ParameterList(torch.zeros(64) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for gain, shift in zip(self.gains, self.shifts, strict=True):
            x = torch.addcmul(shift, x, gain)
        return x


def main() -> None:
    torch.set_num_threads(1)
    print("units", *(f"stage {stage}" for stage in range(4)), "(microseconds a step beyond plain PyTorch)", sep="\t")
    beyond: dict[int, list[float]] = {stage: [] for stage in range(4)}
    for count in COUNTS:
        plain = best(lambda count=count: plain_steps(count))
        for stage in range(4):
            beyond[stage].append(best(lambda stage=stage, count=count: engine_steps(stage, count)) - plain)
        print(count, *(f"{beyond[stage][-1]:.0f}" for stage in range(4)), sep="\t")
    slopes = [(found[-1] - found[0]) / (COUNTS[-1] - COUNTS[0]) for found in beyond.values()]
    print("a unit", *(f"{slope:.1f}" for slope in slopes), sep="\t")


def best(take: Callable[[], float]) -> float:
    return min(take() for _ in range(ROUNDS))


def make(count: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(count)))


def plain_steps(count: int) -> float:
    model, x = make(count), torch.randn(64)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for step in range(STEPS + 5):
        if step == 5:
            start = time.perf_counter()
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()
    return (time.perf_counter() - start) / STEPS * 1e6


def engine_steps(stage: int, count: int) -> float:
    x = torch.randn(64)
    config = {"train_batch_size": 2, "optimizer": {"type": "AdamW"}, "zero_optimization": {"stage": stage}}
    engine, *_ = naught.initialize(model=make(count), config=config)
    for step in range(STEPS + 5):
        if step == 5:
            start = time.perf_counter()
        engine.backward(engine(x).sum())
        engine.step()
    return (time.perf_counter() - start) / STEPS * 1e6


if __name__ == "__main__":
    main()
