"""Rates: the learning-rate schedules that a configuration can name, each a function of the step. Pure.

A scheduler writes the rates into the parameter groups of an optimizer, as torch's do: `step()` after every update.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from naught.errors import UsageError

__all__ = ["SCHEDULES", "Groups", "RateSchedule"]

Groups = Sequence[dict[str, Any]]


class RateSchedule:
    """One of the named schedules over the parameter groups of an optimizer.

    The numbers are those of the configuration's block. `last_batch_iteration` counts the updates that are over, from -1.
    """

    def __init__(self, kind: str, groups: Groups, numbers: Mapping[str, Any]) -> None:
        if kind not in SCHEDULES:
            raise UsageError(f'there is no schedule "{kind}"', fix=f"choose one of {', '.join(SCHEDULES)}")
        self.kind, self.groups, self.numbers = kind, groups, dict(numbers)
        self.last_batch_iteration: int = self.numbers.pop("last_batch_iteration", -1)
        self.base = [group["lr"] for group in groups]
        self._write()

    def step(self, last_batch_iteration: int | None = None) -> None:
        """An update is over; or so many are."""
        following = self.last_batch_iteration + 1
        self.last_batch_iteration = following if last_batch_iteration is None else last_batch_iteration
        self._write()

    def _write(self) -> None:
        for index, (group, base) in enumerate(zip(self.groups, self.base, strict=True)):
            numbers = {key: _of_group(value, index) for key, value in self.numbers.items()}
            changes = SCHEDULES[self.kind](self.last_batch_iteration, base, numbers)
            momentum = changes.pop("momentum", None)
            group.update(changes)
            if momentum is not None:
                group.update({"betas": (momentum, group["betas"][1])} if "betas" in group else {"momentum": momentum})

    def get_lr(self) -> list[float]:
        return [group["lr"] for group in self.groups]

    get_last_lr = get_lr

    def state_dict(self) -> dict[str, Any]:
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.step(state["last_batch_iteration"])


def _of_group(value: Any, index: int) -> Any:
    """A number may be given for each group."""
    return value[index] if isinstance(value, list | tuple) else value


def _warm_up(at: int, numbers: Mapping[str, Any]) -> float | None:
    """The share of the way that a warm-up has come; None once it is over."""
    steps, at = max(2, numbers["warmup_num_steps"]), max(0, at)
    if at >= steps:
        return None
    return at / steps if numbers["warmup_type"] == "linear" else math.log(at + 1) / math.log(steps)


def _warmup(at: int, base: float, numbers: Mapping[str, Any]) -> dict[str, float]:
    share = _warm_up(at, numbers)
    return {"lr": _between(numbers["warmup_min_lr"], _top(base, numbers), 1.0 if share is None else share)}


def _top(base: float, numbers: Mapping[str, Any]) -> float:
    """The rate after a warm-up; if none is given, the optimizer's own."""
    return base if numbers["warmup_max_lr"] is None else float(numbers["warmup_max_lr"])


def _warmup_decay(at: int, base: float, numbers: Mapping[str, Any]) -> dict[str, float]:
    steps, total = max(2, numbers["warmup_num_steps"]), numbers["total_num_steps"]
    share = _warm_up(at, numbers)
    if share is None:
        share = max(0.0, (total - at) / max(1.0, total - steps))
    return {"lr": _between(numbers["warmup_min_lr"], _top(base, numbers), share)}


def _warmup_cosine(at: int, base: float, numbers: Mapping[str, Any]) -> dict[str, float]:
    steps, total = max(2, numbers["warmup_num_steps"]), numbers["total_num_steps"]
    if at < 0:
        return {"lr": 0.0}
    share = _warm_up(at, numbers)
    if share is not None:
        return {"lr": base * _between(numbers["warmup_min_ratio"], 1.0, share)}
    turn = math.pi * min(1.0, (at - steps + 1) / max(1, total - steps))
    return {"lr": base * max(0.0, _between(numbers["cos_min_ratio"], 1.0, (1 + math.cos(turn)) / 2))}


def _range_test(at: int, base: float, numbers: Mapping[str, Any]) -> dict[str, float]:
    del base
    interval = (at + 1) / numbers["lr_range_test_step_size"]
    if numbers["lr_range_test_staircase"]:
        interval = math.floor(interval)
    return {"lr": numbers["lr_range_test_min_lr"] * (1 + numbers["lr_range_test_step_rate"] * interval)}


def _one_cycle(at: int, base: float, numbers: Mapping[str, Any]) -> dict[str, float]:
    """A rise and a fall of the rate, against those of the momentum; then both decay."""
    del base
    rise = numbers["cycle_first_step_size"]
    total = rise + (numbers["cycle_second_step_size"] or rise)
    low, high = numbers["cycle_min_lr"], numbers["cycle_max_lr"]
    slow, fast = numbers["cycle_min_mom"], numbers["cycle_max_mom"]
    if at < total:
        way = (at + 1) / total
        way -= math.floor(way)  # the last step of the cycle is the first of another
        share = way / (rise / total) if way <= rise / total else (way - 1) / (rise / total - 1)
        share = _on_stairs(share, (at + 1) % total, numbers)
        changes = {"lr": _between(low, high, share), "momentum": fast - (fast - slow) * share}
    else:
        stride = numbers["decay_step_size"]
        over = (at - total + 1) / stride if stride else 0.0
        changes = {
            "lr": low / (1 + numbers["decay_lr_rate"] * over),
            "momentum": fast * (1 + numbers["decay_mom_rate"] * over),
        }
    if not numbers["cycle_momentum"]:
        del changes["momentum"]
    return changes


def _on_stairs(share: float, at: int, numbers: Mapping[str, Any]) -> float:
    """The share of a cycle's height, if it goes by stairs; from whole steps, for a share may lie just below a stair."""
    rise = numbers["cycle_first_step_size"]
    fall, up = numbers["cycle_second_step_size"] or rise, numbers["cycle_first_stair_count"]
    down = up if numbers["cycle_second_stair_count"] is None else numbers["cycle_second_stair_count"]
    stairs, done, length = (up, at, rise) if at <= rise else (down, rise + fall - at, fall)
    return done * stairs // length / stairs if stairs else share


def _between(low: float, high: float, share: float) -> float:
    return low + (high - low) * share


SCHEDULES: Mapping[str, Callable[[int, float, Mapping[str, Any]], dict[str, float]]] = {
    "WarmupLR": _warmup,
    "WarmupDecayLR": _warmup_decay,
    "WarmupCosineLR": _warmup_cosine,
    "OneCycle": _one_cycle,
    "LRRangeTest": _range_test,
}
