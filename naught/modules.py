"""Modules: advice for a module from Python, the way `naught plan` gives it for a shape."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from naught.advice import Advice, advise
from naught.errors import ModelError
from naught.estimate import Job
from naught.machine import Machine, detect
from naught.shapes import Model, Run
from naught.trace import describe, trace_activations
from naught.units import UnitRules, UnitSpec, find_units

__all__ = ["model_of", "plan_for"]


def plan_for(
    module: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    machine: Machine | None = None,
    job: Job | None = None,
    rules: UnitRules | None = None,
) -> Advice:
    """What a module needs on a machine (the present one by default) when it is called with these example inputs.

    The module may lie on the meta device. One micro-batch has the size of the inputs.
    """
    kwargs = kwargs or {}
    model = model_of(module, rules)
    job = job or _job_of((args, kwargs))
    floats = torch.bfloat16 if job.recipe.weight == 2 else None
    activations = trace_activations(module, args, kwargs, rules=rules, floats=floats)
    return advise(model, lambda _: activations, machine or detect()[0], job)


def model_of(module: nn.Module, rules: UnitRules | None = None) -> Model:
    """A module's units as the planner counts them: like neighbours in one run."""
    units = find_units(describe(module), rules)
    if not units:
        raise ModelError("the module has no parameters")

    def likeness(unit: UnitSpec) -> tuple[bool, int, int]:
        return unit.name == "", unit.numel, sum(param.numel for param in unit.params if not param.trainable)

    runs = []
    for (outer, numel, frozen), row in groupby(units, key=likeness):
        names = [unit.name or "root" for unit in row]
        runs.append(Run(names[0], numel, len(names), frozen, outer))
    return Model(type(module).__qualname__, tuple(runs), None)


def _job_of(inputs: Any) -> Job:
    """Batch and sequence length from the first tensor that has them."""
    shapes = [tuple(leaf.shape) for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor) and leaf.dim()]
    if not shapes:
        raise ModelError("the example inputs hold no tensor", fix="pass the inputs of one micro-batch, or a Job")
    first = shapes[0]
    return Job(micro_batch=max(1, first[0]), seq=max(1, first[1]) if len(first) > 1 else 1)
