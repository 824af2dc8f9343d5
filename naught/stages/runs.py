"""Runs: the six configurations, DDP before them, and why each differs from the one before. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from naught.quantity import show_bytes

__all__ = ["DDP", "PHASES", "RUNS", "StageRun", "why"]

DDP = "ddp"
# The phases of a step after which memory is looked at, and what they are called.
PHASES = {"forward": "forward", "backward": "backward", "step_": "step"}


@dataclass(frozen=True)
class StageRun:
    """One of the runs: its name, what people call it, its part of a DeepSpeed configuration, with which it is compared and
    what is different."""

    name: str
    title: str
    config: Mapping[str, Any]
    against: str
    because: str


_HOST = {"device": "cpu", "pin_memory": True}
# The paper's stage 3: a block is let go after its forward, and little is gathered ahead. By default 50 million elements are,
# which is all of a small model.
_THREE = {"stage": 3, "stage3_max_reuse_distance": 0, "stage3_prefetch_bucket_size": 500_000}

RUNS: tuple[StageRun, ...] = (
    StageRun(DDP, "DDP", {}, "", "Every rank holds all weights, gradients and states: this is what the others are measured by."),
    StageRun(
        "zero1",
        "ZeRO-1",
        {"zero_optimization": {"stage": 1}},
        DDP,
        "Each rank keeps and updates the optimizer states of its own part of the weights only; gradients are reduce-scattered "
        "and new weights all-gathered, together as many bytes as DDP's all-reduce.",
    ),
    StageRun(
        "zero2",
        "ZeRO-2",
        {"zero_optimization": {"stage": 2}},
        "zero1",
        "A gradient is sent to its owner as soon as its block is done, and only the owner keeps it.",
    ),
    StageRun(
        "zero2-offload",
        "ZeRO-2 + CPU optimizer",
        {"zero_optimization": {"stage": 2, "offload_optimizer": _HOST}},
        "zero2",
        "States and gradients rest in host memory, and the CPU updates them.",
    ),
    StageRun(
        "zero3",
        "ZeRO-3",
        {"zero_optimization": _THREE},
        "zero2",
        "Weights are split too: each block is gathered before its forward and again before its backward, and let go after; that "
        "is one all-gather more in each step.",
    ),
    StageRun(
        "zero3-offload",
        "ZeRO-3 + CPU optimizer and weights",
        {"zero_optimization": {**_THREE, "offload_optimizer": _HOST, "offload_param": _HOST}},
        "zero3",
        "What is split rests in host memory, and comes to the device a block at a time.",
    ),
    StageRun(
        "zero3-fp16",
        "ZeRO-3, fp16",
        {"zero_optimization": _THREE, "fp16": {"enabled": True, "initial_scale_power": 12}},
        "zero3",
        "Weights, gradients and activations take 2 bytes instead of 4, and half as much is sent; 32-bit masters and moments "
        "remain, split.",
    ),
)


def why(run: StageRun, found: Mapping[str, Any], against: Mapping[str, Any] | None) -> str:
    """What is different, and by how much it was, as measured."""
    if against is None:
        return run.because
    last, before = found["memory"][-1], against["memory"][-1]
    changes = {phase: last[phase] - before[phase] for phase in PHASES}
    phase = max(changes, key=lambda phase: abs(changes[phase]))
    change = f"{show_bytes(abs(changes[phase]))} {'less' if changes[phase] < 0 else 'more'} after {PHASES[phase]}"
    ratio = found["seconds"] / against["seconds"]
    return f"{run.because} Against {run.against}: {change}, and {ratio:.2f} of its time."
