"""Describe: a module tree as plain data, for everything that need not see a module."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from naught.errors import ModelError
from naught.tiled import pieces_of
from naught.units import UNIT, Node, Param
from naught.vertical import Vertical

__all__ = ["describe"]


def _requires_grad(param: nn.Parameter) -> bool:
    return param.requires_grad


def describe(
    module: nn.Module,
    dtypes: Mapping[str, torch.dtype] | None = None,
    is_trained: Callable[[nn.Parameter], bool] = _requires_grad,
    is_repeated: Callable[[nn.Parameter], bool] = lambda _: False,
) -> Node:
    """A module tree as plain data; a parameter under two names has one key. `dtypes` says which types it is to have."""
    keys: dict[int, int] = {}
    parts = [part for part in module.modules() if isinstance(part, Vertical)]
    units = {id(part) for part in (*pieces_of(module), *parts)}

    def visit(inner: nn.Module, name: str) -> Node:
        own = [
            Param(
                f"{name}.{short}".removeprefix("."),
                _shape(param, f"{name}.{short}".removeprefix(".")),
                str((dtypes or {}).get(f"{name}.{short}".removeprefix("."), param.dtype)).removeprefix("torch."),
                is_trained(param),
                keys.setdefault(id(param), len(keys)),
                is_repeated(param),
            )
            for short, param in inner.named_parameters(recurse=False)
        ]
        children = [visit(child, f"{name}.{short}".removeprefix(".")) for short, child in inner.named_children()]
        return Node(name, UNIT if id(inner) in units else type(inner).__qualname__, tuple(own), tuple(children))

    return visit(module, "")


def _shape(param: nn.Parameter, name: str) -> tuple[int, ...]:
    if is_lazy(param):
        raise ModelError(f'parameter "{name}" has no shape yet', fix="call the lazy module once with real inputs first")
    return tuple(param.shape)
