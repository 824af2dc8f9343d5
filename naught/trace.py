"""Trace: the activations of any module, measured on fake tensors. Nothing is computed and no memory is taken.

Of a row of like blocks two are run and the rest are taken to be like the second, so a model of a hundred layers
costs no more than one of two.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map

from naught.errors import ModelError
from naught.estimate import ActivationBytes
from naught.units import Node, Param, UnitRules, UnitSpec, find_units

__all__ = ["describe", "trace_activations"]


def describe(module: nn.Module) -> Node:
    """A module tree as plain data; a parameter under two names has one key."""
    keys: dict[int, int] = {}

    def visit(inner: nn.Module, name: str) -> Node:
        own = [
            Param(
                f"{name}.{short}".removeprefix("."),
                tuple(param.shape),
                str(param.dtype).removeprefix("torch."),
                param.requires_grad,
                keys.setdefault(id(param), len(keys)),
            )
            for short, param in inner.named_parameters(recurse=False)
        ]
        children = [visit(child, f"{name}.{short}".removeprefix(".")) for short, child in inner.named_children()]
        return Node(name, type(inner).__qualname__, tuple(own), tuple(children))

    return visit(module, "")


def trace_activations(
    module: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    rules: UnitRules | None = None,
    floats: torch.dtype | None = None,
) -> ActivationBytes:
    """What autograd keeps between forward and backward of one micro-batch, with and without block checkpoints.

    `floats` traces the module as if its weights and floating inputs had this type.
    """
    rows = _rows(module, find_units(describe(module), rules))
    ledger = _Ledger()
    with ExitStack() as stack:
        for row in rows:
            stack.enter_context(_cut_short(module, row, ledger))
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        fake = _Faker(floats)
        fakes = {name: fake(tensor) for name, tensor in [*module.named_parameters(), *module.named_buffers()]}
        inputs, options = tree_map(fake, (tuple(args), dict(kwargs)))
        ledger.known = {_storage(tensor) for tensor in fakes.values()}
        stack.enter_context(torch.autograd.graph.saved_tensors_hooks(ledger.pack, lambda kept: kept))
        try:
            output = torch.func.functional_call(module, fakes, inputs, options)
        except Exception as error:
            raise ModelError(
                f"the module cannot be traced: {type(error).__name__}: {str(error).splitlines()[0][:300] if str(error) else ''}",
                fix="its forward must run on these inputs without looking at values; or plan by shape, such as gpt:layers=...",
            ) from error
        del output
    return ledger.sum(rows)


def _rows(module: nn.Module, units: Sequence[UnitSpec]) -> list[list[str]]:
    """Names of like blocks that follow each other: the same class and the same parameters."""
    modules = dict(module.named_modules())

    def likeness(unit: UnitSpec) -> tuple[Any, ...]:
        inner = modules[unit.name]
        return (type(inner), unit.name.rpartition(".")[0], tuple((param.shape, param.dtype) for param in unit.params))

    named = [unit for unit in units if unit.name]
    rows = [[unit.name for unit in row] for _, row in groupby(named, key=likeness)]
    return [row for row in rows if len(row) > 1]


@dataclass
class _Ledger:
    """Bytes that autograd saved, by the block in which it did; each storage once."""

    here: str = ""
    known: set[int] = field(default_factory=set)
    entered: set[int] = field(default_factory=set)
    saved: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    inputs: dict[str, int] = field(default_factory=dict)
    alive: list[Any] = field(default_factory=list)  # keeps storages from being freed and their addresses reused

    def pack(self, tensor: Tensor) -> Tensor:
        if self._first_time(tensor, self.known):
            self.saved[self.here] += tensor.untyped_storage().nbytes()
        return tensor

    def enter(self, name: str, values: Any) -> None:
        """A block's inputs are its checkpoint; what all blocks share (a mask, say) is not counted again."""
        self.inputs[name] = sum(
            leaf.untyped_storage().nbytes()
            for leaf in tree_leaves(values)
            if isinstance(leaf, Tensor) and self._first_time(leaf, self.entered)
        )

    def _first_time(self, tensor: Tensor, seen: set[int]) -> bool:
        self.alive.append(tensor)
        storage = _storage(tensor)
        fresh = storage not in seen
        seen.add(storage)
        return fresh

    def sum(self, rows: Sequence[Sequence[str]]) -> ActivationBytes:
        outside = self.saved[""]
        blocks = checkpoints = largest = 0
        for first, second, *others in rows:
            like_second = 1 + len(others)
            blocks += self.saved[first] + self.saved[second] * like_second
            checkpoints += self.inputs.get(first, 0) + self.inputs.get(second, 0) * like_second
            largest = max(largest, self.saved[first], self.saved[second])
        return ActivationBytes(outside + blocks, outside + largest, checkpoints, "traced on fake tensors")


@contextmanager
def _cut_short(module: nn.Module, row: Sequence[str], ledger: _Ledger) -> Iterator[None]:
    """While open, the blocks of a row from the third on return what the second returned."""
    blocks = [module.get_submodule(name) for name in row]
    originals = [block.__dict__.get("forward") for block in blocks]
    returned: list[Any] = []

    def real(name: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            ledger.enter(name, (args, kwargs))
            outer, ledger.here = ledger.here, name
            try:
                result = forward(*args, **kwargs)
            finally:
                ledger.here = outer
            returned[:] = [result]
            return result

        return run

    def repeated(*_: Any, **__: Any) -> Any:
        return returned[0]

    try:
        for at, (name, block) in enumerate(zip(row, blocks, strict=True)):
            block.forward = real(name, block.forward) if at < 2 else repeated
        yield
    finally:
        for block, original in zip(blocks, originals, strict=True):
            if original is None:
                del block.forward
            else:
                block.forward = original


class _Faker:
    """Makes tensors of the same shape, type and need of gradients, on the CPU, without data; equal ones stay one."""

    def __init__(self, floats: torch.dtype | None) -> None:
        self.floats = floats
        self.made: dict[int, Tensor] = {}

    def __call__(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if id(value) not in self.made:
            dtype = self.floats if self.floats and value.is_floating_point() else value.dtype
            fake = torch.empty_strided(value.shape, value.stride(), dtype=dtype, device="cpu")
            self.made[id(value)] = fake.requires_grad_(value.requires_grad)
        return self.made[id(value)]


def _storage(tensor: Tensor) -> int:
    address: int = tensor.untyped_storage()._cdata
    return address
