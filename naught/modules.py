"""Modules: advice for a module from Python, the way `naught plan` gives it for a shape."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from naught.advice import Advice, advise
from naught.describe import describe
from naught.errors import ModelError, UsageError
from naught.job import Job
from naught.machine import Machine, detect
from naught.shapes import Model, Run
from naught.trace import trace_activations
from naught.units import UnitRules, UnitSpec, find_units

__all__ = ["model_of", "plan_for"]


def plan_for(
    module: nn.Module,
    args: Tensor | Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    machine: Machine | None = None,
    job: Job | None = None,
    rules: UnitRules | None = None,
) -> Advice:
    """What a module needs on a machine (the present one by default) when it is called with these example inputs.

    The module may lie on the meta device. One micro-batch is what the inputs hold, and only what the forward does is
    counted: wrap the module with its loss if the loss is computed outside.
    """
    module = _original(module)
    args = (args,) if isinstance(args, Tensor) else args
    kwargs = kwargs or {}
    if not any(isinstance(leaf, Tensor) for leaf in tree_leaves((args, kwargs))):
        raise ModelError("the example inputs hold no tensor", fix="pass the inputs of one micro-batch")
    model = model_of(module, rules)
    job = job or Job()
    floats = torch.bfloat16 if job.recipe.weight == 2 else None
    activations = trace_activations(module, args, kwargs, rules=rules, floats=floats)
    return advise(model, lambda _: activations, machine or detect()[0], job)


def model_of(module: nn.Module, rules: UnitRules | None = None) -> Model:
    """A module's units as the planner counts them: like neighbours in one run."""
    units = find_units(describe(_original(module)), rules)
    if not units:
        raise ModelError("the module has no parameters")

    def likeness(unit: UnitSpec) -> tuple[bool, int, int]:
        return unit.name == "", unit.numel, sum(param.numel for param in unit.params if not param.trainable)

    runs = []
    for (outer, numel, frozen), row in groupby(units, key=likeness):
        names = [unit.name or "root" for unit in row]
        runs.append(Run(names[0], numel, len(names), frozen, outer))
    return Model(type(module).__qualname__, tuple(runs), None)


def _original(module: nn.Module) -> nn.Module:
    """The module that torch.compile has wrapped, or the module itself."""
    if not isinstance(module, nn.Module):
        raise UsageError(f"a plan is for an nn.Module, not for a {type(module).__name__}")
    inner = getattr(module, "_orig_mod", module)
    assert isinstance(inner, nn.Module)
    return inner
