"""Hooks: the only file that touches module hooks and autograd. Hooks decide nothing: they say what happened.

A unit's backward begins when a gradient reaches one of its outputs, and is over when the gradients of all its inputs are
complete. Both are known from the tensors that pass between units, so no layer is wrapped and nothing is patched.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from naught.steps import Moment

__all__ = ["Hooks", "Listener"]


class Listener(Protocol):
    """Whoever wants to know."""

    def begin(self) -> None: ...

    def end(self) -> None: ...

    def happened(self, moment: Moment, unit: str) -> None: ...

    def collect(self, param: nn.Parameter) -> None: ...

    def in_backward(self, unit: str) -> bool: ...

    def exported(self) -> None: ...


class _Call:
    """One forward of a unit that wants a backward: how many of its inputs still wait for their gradient."""

    def __init__(self, unit: str, waiting: int) -> None:
        self.unit, self.waiting = unit, waiting


class _Edge:
    """A tensor between units. When its gradient is complete, its consumers are done and its producers begin."""

    def __init__(self, tensor: Tensor, fire: Callable[[_Edge], None]) -> None:
        self.tensor = weakref.ref(tensor)
        self.version = tensor._version  # an operation in place gives the same tensor another place in the graph
        self.consumers: list[_Call] = []
        self.producers: list[str] = []
        tensor.register_hook(lambda _: fire(self))  # type: ignore[no-untyped-call]


class Hooks:
    """Listens to a module and its units, and to the gradients of its parameters, until it is removed."""

    def __init__(self, module: nn.Module, units: Mapping[str, nn.Module], listener: Listener) -> None:
        self.listener = listener
        self.edges: dict[int, _Edge] = {}
        self.calls: dict[str, int] = dict.fromkeys(units, 0)
        self.depth = 0
        self.handles: list[Any] = []
        for name, inner in units.items():
            # First in and last out, so that the user's own hooks find the weights.
            self.handles.append(inner.register_forward_pre_hook(self._enter_of(name), with_kwargs=True, prepend=True))
            self.handles.append(inner.register_forward_hook(self._exit_of(name)))
        self.handles.append(module.register_forward_pre_hook(self._begin, prepend=True))
        self.handles.append(module.register_forward_hook(self._end, always_call=True))
        exported = module.register_state_dict_pre_hook(lambda *_: listener.exported())  # type: ignore[no-untyped-call]
        self.handles.append(exported)
        for param in module.parameters():
            if param.requires_grad:
                self.handles.append(param.register_post_accumulate_grad_hook(listener.collect))  # type: ignore[no-untyped-call]

    def remove(self) -> None:
        for handle in self.handles:
            handle.remove()
        self.handles.clear()
        self.forget()

    def forget(self) -> None:
        """A pass is over, one way or another."""
        self.edges.clear()
        self.calls = dict.fromkeys(self.calls, 0)
        self.depth = 0

    def _begin(self, *_: Any) -> None:
        if not _recomputing():
            self.depth += 1
            if self.depth == 1:
                self.listener.begin()

    def _end(self, *_: Any) -> None:
        if not _recomputing():
            self.depth = max(0, self.depth - 1)
            if self.depth == 0:
                self.listener.end()

    def _enter_of(self, unit: str) -> Callable[..., None]:
        def enter(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if _recomputing():
                if not self.listener.in_backward(unit):  # a reentrant checkpoint: the backward begins with this
                    self.listener.happened(Moment.GRAD, unit)
                return
            self.listener.happened(Moment.ENTER, unit)
            self._watch_inputs(unit, _tensors((args, kwargs)))

        return enter

    def _watch_inputs(self, unit: str, values: Iterable[Tensor]) -> None:
        """Inputs that lie inside the graph, also of a checkpoint that runs its forward without one. A leaf's gradient is
        no sign: it may be there before those of the parameters beside it."""
        inputs = {id(tensor): tensor for tensor in values if tensor.grad_fn is not None}.values()
        if not inputs:
            return  # nothing will tell that its backward is over: the end of the pass does
        call = _Call(unit, len(inputs))
        self.calls[unit] += 1
        for tensor in inputs:
            self._edge(tensor).consumers.append(call)

    def _exit_of(self, unit: str) -> Callable[..., None]:
        def leave(_: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            del args
            if _recomputing():
                return
            if torch.is_grad_enabled():
                outputs = [leaf for leaf in _tensors(output) if leaf.requires_grad and leaf.grad_fn is not None]
                if not outputs:
                    return  # its backward cannot be foreseen: the weights stay until the pass is over
                for tensor in outputs:
                    self._edge(tensor).producers.append(unit)
            self.listener.happened(Moment.EXIT, unit)

        return leave

    def _edge(self, tensor: Tensor) -> _Edge:
        edge = self.edges.get(id(tensor))
        if edge is None or edge.tensor() is not tensor or edge.version != tensor._version:
            edge = self.edges[id(tensor)] = _Edge(tensor, self._fire)
        return edge

    def _fire(self, edge: _Edge) -> None:
        # With create_graph the graph will be gone through again: nothing is done yet.
        for call in () if torch.is_grad_enabled() else edge.consumers:
            call.waiting -= 1
            if call.waiting == 0:
                self.calls[call.unit] -= 1
                if self.calls[call.unit] <= 0 and self.listener.in_backward(call.unit):
                    self.listener.happened(Moment.DONE, call.unit)
        for unit in edge.producers:
            if not self.listener.in_backward(unit):
                self.listener.happened(Moment.GRAD, unit)


def _recomputing() -> bool:
    """Whether autograd is running: a forward now is a checkpoint's recompute."""
    return torch._C._current_graph_task_id() != -1


def _tensors(value: Any) -> Iterator[Tensor]:
    """Every tensor in what modules take and return: containers and dataclasses, at any depth."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for member in value.values():
            yield from _tensors(member)
    elif isinstance(value, list | tuple | set):
        for member in value:
            yield from _tensors(member)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for part in dataclasses.fields(value):
            yield from _tensors(getattr(value, part.name))
