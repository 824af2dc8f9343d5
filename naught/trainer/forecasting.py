"""Forecasting: what a run will hold, send and compute on each rank, before its first step."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn

from naught.accelerator import get_accelerator
from naught.config import Batch, placement_of
from naught.config.recipe import Recipe
from naught.devices import free_host_bytes, room_on
from naught.errors import ModelError
from naught.estimate import forecast
from naught.formulas import Recipe as Bytes
from naught.formulas import recipe as byte_recipe
from naught.job import ActivationBytes, Checkpointing, Job
from naught.limits import limits_of_bytes
from naught.machine import Machine
from naught.modules import model_of
from naught.placement import PLACEMENTS, Tier
from naught.pooling import Arrangement, place_in_pool
from naught.precision import precision_of
from naught.shapes import Run
from naught.sizes import PlacedRun
from naught.trace import trace_activations

__all__ = ["Expected", "dtype_of", "expect"]

_LOG = logging.getLogger("naught")

_BACKWARD = 2  # a backward computes as much as two forwards


class Expected(NamedTuple):
    """The bytes of a rank by category, all of them, and those of a rank at stage 0; what it sends in a step by collective, and
    what it computes in one, without what it computes again."""

    memory: Mapping[str, int]
    total: int
    whole: int  # all of them if nothing were split
    sent: Mapping[str, int]
    flops: int | None  # None: the model cannot be traced
    activations: int = 0  # of one micro-batch, at their most


def expect(model: nn.Module, recipe: Recipe, batch: Batch, world: int) -> Expected:
    """The planner's forecast for just this model, placement, precision and batch, its activations traced."""
    checkpointing = Checkpointing.BLOCK if recipe.model.checkpointing else Checkpointing.NONE
    job = Job(
        micro_batch=batch.micro,
        seq=recipe.data.seq,
        accumulation=batch.accumulation,
        recipe=_bytes(recipe),
        checkpointing=checkpointing,
        wide_gradients=precision_of(recipe, batch.accumulation).wide,
        host_sums=recipe.naught.host_sums,
        update_in_backward=recipe.naught.update_in_backward,
    )
    runs = model_of(model).runs
    activations = _activations(model, recipe, batch.micro)
    alone = get_accelerator().device_name() == "cpu"
    machine = Machine(ranks=world, ranks_per_node=world, unified=alone)  # its sizes and rates do not count here
    held = _most(activations, checkpointing)
    placed = [PlacedRun(run, placement_of(recipe)) for run in runs]
    if recipe.naught.placement != "stage":
        units, arranged = _pooled(model, recipe, batch, world, held)
        placed = [PlacedRun(*pair) for pair in zip(units, arranged.placements, strict=True)]
        machine, job = replace(machine, berths=arranged.berths), replace(job, wide_gradients=arranged.wide)
    found = forecast("run", placed, activations, machine, job)
    whole = forecast("run", [PlacedRun(run, PLACEMENTS["stage0"]) for run in runs], activations, machine, job)
    memory = {category.value: nbytes for category, nbytes in found.memory[Tier.DEVICE].items()}
    flops = activations.forward_flops and activations.forward_flops * (1 + _BACKWARD) * batch.accumulation
    return Expected(memory, found.total(Tier.DEVICE), whole.total(Tier.DEVICE), dict(found.volume), flops, held)


def _bytes(recipe: Recipe) -> Bytes:
    ours = recipe.naught
    small = {"small_masters": ours.small_masters, "small_moments": ours.small_moments}
    return byte_recipe(dtype_of(recipe), _optimizer(recipe), **small)


def _most(activations: ActivationBytes, checkpointing: Checkpointing) -> int:
    kept = activations.full if checkpointing is Checkpointing.NONE else activations.working + activations.checkpoints
    return kept + activations.gradient


def _pooled(model: nn.Module, recipe: Recipe, batch: Batch, world: int, activation_bytes: int) -> tuple[list[Run], Arrangement]:
    """Every unit, and how the pool will place it, on a machine whose ranks have as much as this one."""
    device = torch.device(get_accelerator().current_device_name())
    gpu, host = recipe.naught.gpu_memory or room_on(device).free, recipe.naught.host_memory or free_host_bytes()
    moments = int(byte_recipe(dtype_of(recipe), _optimizer(recipe)).moments) // 4
    limits = limits_of_bytes(recipe, precision_of(recipe, batch.accumulation), moments, world, device, gpu=gpu, host=host)
    if recipe.naught.activation_memory is None:
        limits = replace(limits, activation_bytes=activation_bytes)
    units = [run._replace(repeat=1) for run in model_of(model).runs for _ in range(run.repeat)]
    return units, place_in_pool(units, limits)


def dtype_of(recipe: Recipe) -> str:
    return "fp16" if recipe.fp16.enabled else "bf16" if recipe.bf16.enabled else "fp32"


def _optimizer(recipe: Recipe) -> str:
    if recipe.optimizer is None:
        return "adamw"
    momentum = "-momentum" if getattr(recipe.optimizer.params, "momentum", 0) else ""
    return recipe.optimizer.type.lower() + momentum


def _activations(model: nn.Module, recipe: Recipe, micro: int) -> ActivationBytes:
    floats = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(dtype_of(recipe))
    with torch.device("meta"):
        ids = torch.empty(micro, recipe.data.seq, dtype=torch.int64)
    inputs: dict[str, Any] = {"input_ids": ids, "labels": ids}
    try:
        return trace_activations(model, (), inputs, floats=floats)
    except ModelError as error:
        _LOG.warning("the plan leaves activations out: %s", error.what)
        return ActivationBytes(0, 0, 0, "nothing", None)
