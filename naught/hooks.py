"""Hooks: the only file that touches module hooks and autograd. Hooks decide nothing: they say what happened.

A unit's backward begins when a gradient reaches one of its outputs, and is over when the gradients of all its inputs are
complete. Both are known from the tensors that pass between units, so no layer is wrapped and nothing is patched.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol
from weakref import WeakMethod

import torch
from torch import Tensor, nn

from naught.in_graph import inside_graph, tensors_in
from naught.loans import Hearer, Loans
from naught.steps import Moment

__all__ = ["Hooks", "Listener", "keep_out_of_graphs", "letting_go", "recomputing"]


class Listener(Hearer, Protocol):
    """Whoever wants to know."""

    def begin(self) -> None: ...

    def end(self) -> None: ...

    def made(self, param: nn.Parameter) -> None: ...

    def exported(self) -> None: ...

    def imported(self) -> None: ...

    def is_recording(self) -> bool: ...


class _Call:
    """One forward of a unit that wants a backward: how many of its inputs still wait for their gradient."""

    __slots__ = ("unit", "waiting")

    def __init__(self, unit: str, waiting: int) -> None:
        self.unit, self.waiting = unit, waiting


class _Output:
    """What one forward of a unit has made, until a gradient reaches any of it."""

    __slots__ = ("reached", "unit")

    def __init__(self, unit: str) -> None:
        self.unit = unit
        self.reached = False


class _Edge:
    """A tensor between units, as a hook of its own. When its gradient is complete, its consumers are done and its
    producers begin."""

    __slots__ = ("consumers", "fire", "producers", "version")

    def __init__(self, fire: Callable[[_Edge], None], version: int) -> None:
        self.fire = fire
        self.version = version  # an operation in place gives the same tensor another place in the graph
        self.consumers: list[_Call] = []
        self.producers: list[_Output] = []

    def __call__(self, _: Tensor) -> None:
        self.fire(self)


class Hooks:
    """Listens to a module and its units, and to the gradients of large parameters, until it is removed. `pieces` has the trained
    parameters of units that are pieces of layers."""

    def __init__(
        self,
        module: nn.Module,
        units: Mapping[str, nn.Module],
        listener: Listener,
        *,
        frozen: Collection[str],
        large: Collection[nn.Parameter],
        pieces: Mapping[str, Collection[nn.Parameter]],
    ) -> None:
        self.listener, self.frozen = listener, frozen
        self.fire = self._fire_of_a_pass()
        self.loans = Loans(listener, units)
        self.aside: dict[str, list[tuple[nn.Module, str]]] = {}  # where a unit's modules put tensors beside its output
        self.stack: list[str] = []  # units whose forward is running, the innermost last
        self.through: list[nn.Module] = []  # doors through which they were entered
        self.depth = 0
        self.handles: list[Any] = []
        for name, inner in units.items():
            # First in, and after the hooks that are there already, so that they find the weights.
            self._keep(inner.register_forward_pre_hook(self._enter_of(name, inner), with_kwargs=True, prepend=True))
            self._keep(inner.register_forward_hook(self._exit_of(name, inner), with_kwargs=True))
        keep_out_of_graphs()
        self._keep(module.register_forward_pre_hook(self._begin_of(module), prepend=True))
        self._keep(module.register_forward_hook(self._end_of(module), always_call=True))
        for param in large:
            self._keep(_when_made(param, listener.made))
        self.pieces = pieces
        self.unmade: dict[str, set[nn.Parameter]] = {}  # gradients that tell, and are not made yet
        for name, params in pieces.items():
            for param in params:
                self._keep(_when_made(param, self._made, name))
        for inner in module.modules():
            self._keep(inner.register_state_dict_pre_hook(_if_same(inner, listener.exported)))  # type: ignore[no-untyped-call]
            self._keep(inner.register_load_state_dict_pre_hook(_if_same(inner, listener.imported)))  # type: ignore[no-untyped-call]

    def add_doors(self, unit: str, modules: Collection[nn.Module]) -> None:
        """Parts of a unit that may be called while the unit itself is not: then they stand for it."""
        for inner in modules:
            self._keep(inner.register_forward_pre_hook(self._enter_of(unit, inner, door=True), with_kwargs=True, prepend=True))
            self._keep(inner.register_forward_hook(self._exit_of(unit, inner, door=True), with_kwargs=True))

    def _keep(self, handle: Any) -> None:
        self.handles.append(handle)

    def remove(self) -> None:
        for handle in self.handles:
            handle.remove()
        self.handles.clear()
        self.forget()

    def forget(self) -> None:
        """A pass is over, one way or another."""
        self.fire = self._fire_of_a_pass()
        self.loans.forget()
        self.stack.clear()
        self.through.clear()
        self.unmade.clear()
        self.depth = 0

    def borrow(self, unit: str) -> None:
        """The unit that is running uses this one. From now on both come and go together."""
        self.loans.borrow(self.stack[-1] if self.stack else "", unit)

    # A copy of the model carries the hooks along, and they must not take it for the model: each knows its own module.
    # They are functions, not methods, for a method would be copied together with all that it belongs to.

    def _begin_of(self, module: nn.Module) -> Callable[..., None]:
        def begin(called: nn.Module, _: Any) -> None:
            if called is module and not recomputing():
                self.depth += 1
                if self.depth == 1:
                    self.listener.begin()

        return begin

    def _end_of(self, module: nn.Module) -> Callable[..., None]:
        def end(called: nn.Module, *_: Any) -> None:
            if called is module and not recomputing():
                self.depth = max(0, self.depth - 1)
                if self.depth == 0:
                    self.listener.end()

        return end

    def _enter_of(self, unit: str, module: nn.Module, *, door: bool = False) -> Callable[..., None]:
        def enter(called: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if called is not module or (door and unit in self.stack):
                return
            if recomputing():
                self.loans.say_grad(unit)  # a reentrant checkpoint: the backward begins with this
                return
            if door:
                self.through.append(module)
            self.stack.append(unit)
            self.loans.say(Moment.ENTER, unit)
            inputs = inside_graph((args, kwargs) if kwargs else args)
            if inputs:  # else nothing will tell that its backward is over, for most units: the end of the pass does
                self._watch(unit, inputs)
            elif unit in self.pieces:
                self.unmade[unit] = set(self.pieces[unit])

        return enter

    def _made(self, unit: str, param: nn.Parameter) -> None:
        """A piece of a layer that was given nothing inside the graph is done when all of its gradients are made."""
        waiting = self.unmade.get(unit)
        if waiting is not None:
            waiting.discard(param)
            if not waiting:
                del self.unmade[unit]
                self.loans.say_done(unit)

    def _watch(self, unit: str, inputs: Collection[Tensor]) -> None:
        """A unit's backward is over when these have their gradients."""
        call = _Call(unit, len(inputs))
        self.loans.calls[unit] += 1
        for tensor in inputs:
            self._edge(tensor).consumers.append(call)

    def _exit_of(self, unit: str, module: nn.Module, *, door: bool = False) -> Callable[..., None]:
        def leave(called: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            if called is not module or recomputing() or (door and module not in self.through):
                return
            if door:
                self.through.remove(module)
            self._pop(unit)
            if torch.is_grad_enabled():
                outputs = [*inside_graph(output), *self._beside(unit, module)]
                if not outputs and not self._is_graphless(unit, (args, kwargs)):
                    return  # its backward cannot be foreseen: the weights stay until the pass is over
                if outputs:
                    made = _Output(unit)
                    self.loans.unreached[unit] += 1
                    for tensor in outputs:
                        self._edge(tensor).producers.append(made)
            self.loans.say(Moment.EXIT, unit)

        return leave

    def _beside(self, unit: str, module: nn.Module) -> Collection[Tensor]:
        """Tensors that a unit's modules have put into attributes, as auxiliary losses are: a backward may begin there."""
        if self.listener.is_recording():
            members = ((inner, name, value) for inner in module.modules() for name, value in vars(inner).items())
            self.aside[unit] = [(inner, name) for inner, name, value in members if inside_graph(value)]
        places = self.aside.get(unit)
        return inside_graph([getattr(inner, name, None) for inner, name in places]) if places else ()

    def _is_graphless(self, unit: str, inputs: Any) -> bool:
        """Whether a unit has nothing to train and was given nothing to train: no backward will ever reach it."""
        return unit in self.frozen and not any(leaf.requires_grad for leaf in tensors_in(inputs))

    def _pop(self, unit: str) -> None:
        """Those above it were left by an exception that somebody has caught."""
        while self.stack and self.stack.pop() != unit:
            pass

    def _edge(self, tensor: Tensor) -> _Edge:
        """The edge that a tensor is in this pass; it lives as long as the tensor does."""
        version = tensor._version
        for hook in (tensor._backward_hooks or {}).values():
            if type(hook) is _Edge and hook.fire is self.fire and hook.version == version:
                return hook
        edge = _Edge(self.fire, version)
        tensor.register_hook(edge)  # type: ignore[no-untyped-call]
        return edge

    def _fire_of_a_pass(self) -> Callable[[_Edge], None]:
        """Edges of one pass share this; those of an earlier one say nothing."""

        def fire(edge: _Edge) -> None:
            if fire is not self.fire:
                return
            # With create_graph the graph will be gone through again: nothing is done yet.
            for call in () if torch.is_grad_enabled() else edge.consumers:
                call.waiting -= 1
                if call.waiting == 0:
                    self.loans.calls[call.unit] -= 1
                    self.loans.say_done(call.unit)
            for made in edge.producers:
                if not made.reached:
                    made.reached = True
                    self.loans.unreached[made.unit] -= 1
                self.loans.say_grad(made.unit)

        return fire


def keep_out_of_graphs() -> None:
    """Let torch.compile, if it is there, break its graphs around what lies in this package instead of tracing into it."""
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is not None and not _KEPT_OUT:
        dynamo.trace_rules.add("naught")
        _KEPT_OUT.append(True)


_KEPT_OUT: list[bool] = []


def _if_same(module: nn.Module, say: Callable[[], None]) -> Callable[..., None]:
    def heard(called: nn.Module, *_: Any) -> None:
        if called is module:
            say()

    return heard


def _when_made(param: nn.Parameter, say: Callable[..., None], *of: str) -> Any:
    """Have it said when a gradient is made. Torch keeps such a hook where Python's collector does not look: it must not keep who
    is told, and all that he has, when nobody else does any more."""
    listens = WeakMethod(say)

    def made(param: nn.Parameter) -> None:
        heard = listens()
        if heard is not None:
            heard(*of, param)

    return param.register_post_accumulate_grad_hook(made)  # type: ignore[no-untyped-call]


@contextmanager
def letting_go(params: Iterable[nn.Parameter]) -> Iterator[None]:
    """While open, gradients of these go as they come."""

    def let_go(param: Tensor) -> None:
        param.grad = None

    hooks = [param.register_post_accumulate_grad_hook(let_go) for param in params if param.requires_grad]  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def recomputing() -> bool:
    """Whether autograd is running: a forward now is a checkpoint's recompute."""
    return torch._C._current_graph_task_id() != -1
