"""Trace: the activations and the arithmetic of any module, measured on fake tensors. Nothing is computed and no memory
is taken.

In a row of like blocks two calls are run; a further call with inputs of the same shapes is taken to be like the last,
so a model of a hundred layers costs no more than one of two.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import FlopCounterMode

from naught.describe import describe
from naught.errors import ModelError
from naught.job import ActivationBytes
from naught.units import UnitRules, UnitSpec, find_units

__all__ = ["trace_activations"]


def trace_activations(
    module: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    rules: UnitRules | None = None,
    floats: torch.dtype | None = None,
) -> ActivationBytes:
    """What autograd keeps between forward and backward of one micro-batch, with and without block checkpoints.

    Only what the forward does is seen: a loss that is computed outside of it is not. `floats` traces the module as if
    its weights and floating inputs had this type.
    """
    rows = _rows(module, find_units(describe(module), rules))
    ledger = _Ledger()
    with ExitStack() as stack:
        stack.enter_context(_quiet())
        for row in rows:
            stack.enter_context(_cut_short(module, row, ledger))
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        fake = _Faker(floats)
        fakes = {name: fake(tensor) for name, tensor in [*module.named_parameters(), *module.named_buffers()]}
        inputs, options = tree_map(fake, (tuple(args), dict(kwargs)))
        ledger.known = {_storage(tensor) for tensor in fakes.values()}
        stack.enter_context(torch.autograd.graph.saved_tensors_hooks(ledger.pack, lambda kept: kept))
        stack.enter_context(ledger.counter)
        try:
            torch.func.functional_call(module, fakes, inputs, options)
        except Exception as error:
            said = str(error).strip().splitlines()[:1] or [""]
            raise ModelError(
                f"the module cannot be traced: {type(error).__name__}: {said[0][:300]}",
                fix="its forward must run on these inputs without looking at values; or plan by shape, such as gpt:layers=...",
            ) from error
    return ledger.sum()


@contextmanager
def _quiet() -> Iterator[None]:
    """While open, torch does not log the failures that are raised anyway."""
    loggers = [logging.getLogger(name) for name in ("torch._subclasses.fake_tensor", "torch.utils.flop_counter")]
    before = [logger.disabled for logger in loggers]
    for logger in loggers:
        logger.disabled = True
    try:
        yield
    finally:
        for logger, disabled in zip(loggers, before, strict=True):
            logger.disabled = disabled


def _rows(module: nn.Module, units: Sequence[UnitSpec]) -> list[list[str]]:
    """Names of like blocks in one list: the same class and the same parameters."""
    modules = dict(module.named_modules())

    def likeness(unit: UnitSpec) -> tuple[Any, ...]:
        inner = modules[unit.name]
        return (type(inner), unit.name.rpartition(".")[0], tuple((param.shape, param.dtype) for param in unit.params))

    rows: dict[tuple[Any, ...], list[str]] = defaultdict(list)
    for unit in units:
        if unit.name:
            rows[likeness(unit)].append(unit.name)
    return [row for row in rows.values() if len(row) > 1]


def _attention_flops(query: Sequence[int], key: Sequence[int], value: Sequence[int], *_: Any, **__: Any) -> int:
    """Two products over all pairs of positions; torch's counter does not know the CPU's kernel."""
    batch, heads, targets, width = query
    return 2 * batch * heads * targets * key[2] * (width + value[3])


_CPU_ATTENTION = {torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops}


@dataclass
class _Call:
    """What one call of a block saved, was given and computed."""

    saved: int = 0
    inputs: int = 0
    flops: int = 0


@dataclass
class _Ledger:
    """What autograd saved and the operators computed, by call; each storage once."""

    outside: _Call = field(default_factory=_Call)
    calls: list[_Call] = field(default_factory=list)
    current: _Call | None = None
    counter: FlopCounterMode = field(default_factory=lambda: FlopCounterMode(display=False, custom_mapping=_CPU_ATTENTION))
    known: set[int] = field(default_factory=set)
    entered: set[int] = field(default_factory=set)
    widest: int = 0  # of what was saved outside of blocks: in a model of language what the loss is computed from
    alive: list[Any] = field(default_factory=list)  # keeps storages from being freed and their addresses reused

    def pack(self, tensor: Tensor) -> Tensor:
        if self._first_time(tensor, self.known):
            nbytes = tensor.untyped_storage().nbytes()
            (self.current or self.outside).saved += nbytes
            if self.current is None and tensor.is_floating_point():
                self.widest = max(self.widest, nbytes)
        return tensor

    @contextmanager
    def call(self, values: Any) -> Iterator[_Call]:
        """One call of a block. Its inputs are its checkpoint; what all blocks share (a mask, say) counts once."""
        call = _Call()
        call.inputs = sum(
            leaf.untyped_storage().nbytes()
            for leaf in tree_leaves(values)
            if isinstance(leaf, Tensor) and self._first_time(leaf, self.entered)
        )
        before = self.counter.get_total_flops()
        self.current = call
        try:
            yield call
        finally:
            self.current = None
        call.flops = self.counter.get_total_flops() - before
        self.calls.append(call)

    def _first_time(self, tensor: Tensor, seen: set[int]) -> bool:
        self.alive.append(tensor)
        storage = _storage(tensor)
        fresh = storage not in seen
        seen.add(storage)
        return fresh

    def sum(self) -> ActivationBytes:
        # A repeated call stands in the list a second time, as the same object.
        real = {id(call): call for call in self.calls}
        outside_flops = self.counter.get_total_flops() - sum(call.flops for call in real.values())
        return ActivationBytes(
            full=self.outside.saved + sum(call.saved for call in self.calls),
            working=self.outside.saved + max((call.saved for call in self.calls), default=0),
            checkpoints=sum(call.inputs for call in self.calls),
            checkpoint=max((call.inputs for call in self.calls), default=0),
            source="a trace on fake tensors",
            forward_flops=outside_flops + sum(call.flops for call in self.calls),
            gradient=2 * self.widest,  # of its output and of its input
            loss=3 * self.widest,
        )


@contextmanager
def _cut_short(module: nn.Module, row: Sequence[str], ledger: _Ledger) -> Iterator[None]:
    """While open, a call of a row's block that is like the last two returns what the last one returned."""
    blocks = [module.get_submodule(name) for name in row]
    originals = [block.__dict__.get("forward") for block in blocks]
    seen: dict[Any, list[tuple[_Call, Any]]] = {}

    def wrap(forward: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            if ledger.current is not None:  # a block within a block is part of the outer one
                return forward(*args, **kwargs)
            before = seen.setdefault(_likeness((args, kwargs)), [])
            if len(before) >= 2:
                call, result = before[-1]
                ledger.calls.append(call)
                return result
            with ledger.call((args, kwargs)) as call:
                result = forward(*args, **kwargs)
            before.append((call, result))
            return result

        return run

    try:
        for block in blocks:
            block.forward = wrap(block.forward)
        yield
    finally:
        for block, original in zip(blocks, originals, strict=True):
            if original is None:
                del block.forward
            else:
                block.forward = original


def _likeness(values: Any) -> tuple[Any, ...]:
    """Two calls are alike if their tensors have the same shapes, types and need of gradients."""
    return tuple(
        (tuple(leaf.shape), leaf.dtype, leaf.requires_grad) if isinstance(leaf, Tensor) else type(leaf)
        for leaf in tree_leaves(values)
    )


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
