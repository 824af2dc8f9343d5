"""Unit flops: what each unit of a model computes, in a forward and in the backward behind it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from naught.flop_counts import counting, totals_of
from naught.hooks import letting_go

__all__ = ["UnitFlops", "flops_of_units", "module_flops"]


class UnitFlops(NamedTuple):
    """Operations of a forward, and of the backward behind it with whatever it computes again."""

    forward: float = 0.0
    backward: float = 0.0


def module_flops(model: nn.Module, loss_of: Callable[[Callable[..., Any]], Tensor]) -> dict[str, UnitFlops]:
    """Of all modules by their names, each with those inside of it."""
    with letting_go(model.parameters()), counting() as counter:
        loss = loss_of(model)
        forward = totals_of(counter)
        if isinstance(loss, Tensor) and loss.requires_grad:  # else the engine tells what is wrong with it
            torch.autograd.backward(loss)
    both, root = totals_of(counter), type(model).__name__
    # Of a backward torch does not tell what is the root's: that is all there is.
    names = {"": "Global"} | {name.removeprefix(f"{root}."): name for name in both if name.startswith(f"{root}.")}
    found = {name: (forward.get(key, 0), both.get(key, 0)) for name, key in names.items()}
    return {name: UnitFlops(float(first), float(total - first)) for name, (first, total) in found.items()}


def flops_of_units(counts: dict[str, UnitFlops], units: Sequence[str]) -> dict[str, UnitFlops]:
    """What each unit computes itself, without the units inside of it."""
    whole = {name: counts.get(name, UnitFlops()) for name in units}
    inner = {name: [other for other in units if other != name and (not name or other.startswith(f"{name}."))] for name in units}
    outermost = {
        name: [other for other in within if not any(other.startswith(f"{between}.") for between in within if between != other)]
        for name, within in inner.items()
    }
    return {
        name: UnitFlops(
            max(0.0, whole[name].forward - sum(whole[other].forward for other in outermost[name])),
            max(0.0, whole[name].backward - sum(whole[other].backward for other in outermost[name])),
        )
        for name in units
    }
