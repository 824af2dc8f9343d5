"""In graph: the tensors in what modules take and return, and those of them that lie inside autograd's graph."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from torch import Tensor, nn

__all__ = ["inside_graph", "tensors_in"]


def inside_graph(value: Any) -> Collection[Tensor]:
    """The tensors of a value that lie inside the graph, each once. A leaf's gradient is no sign: it may be there before
    those of the parameters beside it."""
    return {id(leaf): leaf for leaf in tensors_in(value) if leaf.requires_grad and not leaf.is_leaf}.values()


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Every tensor in what modules take and return: containers and dataclasses at any depth, and members of objects."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list | set):
        for member in value:
            yield from tensors_in(member)
    elif value is None or isinstance(value, int | float | str):
        return
    elif isinstance(value, Mapping):
        for member in value.values():
            yield from tensors_in(member)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for part in dataclasses.fields(value):
            yield from tensors_in(getattr(value, part.name))
    elif not isinstance(value, type | nn.Module):
        yield from (member for member in getattr(value, "__dict__", {}).values() if isinstance(member, Tensor))
