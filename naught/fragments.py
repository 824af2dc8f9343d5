"""Fragments: one parameter's weights, gradient and optimizer states, whole or as far as this rank has them, by DeepSpeed's
names. Read and written at every stage.

Every rank must call them, in the same order: what is whole is put together from all ranks, and a gradient is summed over
them first. It is there between backward and step, as the mean over the ranks, without the scale of the loss.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from naught.comm import Group
from naught.dividing import refuse_divided
from naught.engine import Engine, engines
from naught.errors import UsageError
from naught.layout import Span, intersect
from naught.local_parts import part_of
from naught.segment import Segment

__all__ = [
    "safe_get_full_fp32_param",
    "safe_get_full_grad",
    "safe_get_full_optimizer_state",
    "safe_get_local_fp32_param",
    "safe_get_local_grad",
    "safe_get_local_optimizer_state",
    "safe_set_full_fp32_param",
    "safe_set_full_grad",
    "safe_set_full_optimizer_state",
    "safe_set_local_fp32_param",
    "safe_set_local_grad",
    "safe_set_local_optimizer_state",
    "safe_update_full_grad_vectorized",
]


class _Home(NamedTuple):
    """Where a parameter lives."""

    engine: Engine
    segment: Segment
    place: int  # of its slot

    @property
    def group(self) -> Group:
        return self.engine.schedule.group

    def local(self, owned: Tensor) -> Tensor:
        """The parameter's part of what this rank has of a flat."""
        return owned[slice(*self.segment.states.part_of(self.place))]

    def whole(self, owned: Tensor) -> Tensor:
        """The parameter's part of a flat of which every rank has a part."""
        slot = self.segment.layout.slots[self.place]
        if self.segment.everywhere:
            return owned[slot.span.start : slot.span.stop].reshape(slot.shape)
        spans = [self._span(rank) for rank in range(self.group.parts)]
        row = torch.zeros(max(span.numel for span in spans), dtype=torch.float32, device=owned.device)
        row[: spans[self.group.part].numel] = self.local(owned)
        rows = self.group.exchange_parts(row)
        return torch.cat([part[: span.numel] for part, span in zip(rows, spans, strict=True)]).reshape(slot.shape)

    def write(self, owned: Tensor, value: Tensor) -> None:
        """Put this rank's part of a whole parameter into what it has of a flat."""
        slot = self.segment.layout.slots[self.place]
        if tuple(value.shape) != slot.shape:
            raise UsageError(
                f'"{slot.name}" has the shape {list(slot.shape)}, and the value {list(value.shape)}', fix="give one of its shape"
            )
        span = Span(0, slot.span.numel) if self.segment.everywhere else self._span(self.group.part)
        self.local(owned).copy_(value.detach().reshape(-1)[span.start : span.stop])

    def write_local(self, owned: Tensor, value: Tensor) -> None:
        mine = self.local(owned)
        if value.numel() != mine.numel():
            raise UsageError(f"this rank has {mine.numel()} elements of the parameter, not {value.numel()}", fix="give as many")
        mine.copy_(value.detach().reshape(-1))

    def _span(self, rank: int) -> Span:
        """What a rank updates of the parameter, from the parameter's own start."""
        slot = self.segment.layout.slots[self.place].span
        common = intersect(slot, self.segment.layout.shard(rank)) or Span(slot.start, slot.start)
        return Span(common.start - slot.start, common.stop - slot.start)

    # --- what there is of it ---

    def masters(self) -> Tensor:
        self.engine.passes.refuse_midway()
        return self.segment.exact

    def grads(self) -> Tensor | None:
        self.engine.stepping.refuse_to_look()
        self.engine.passes.complete_late()
        return self._summed()

    def own_grads(self) -> Tensor | None:
        """This rank's part of the sum: once all are summed it may ask for that alone."""
        self.engine.stepping.refuse_to_look()
        self.engine.passes.complete()
        return self._summed()

    def _summed(self) -> Tensor | None:
        return self.segment.grads.sum() if self.segment.trained else None

    def moments(self, name: str) -> Tensor | None:
        self.engine.passes.refuse_midway()
        moment = self.segment.states.held.get(name)
        return None if moment is None else moment.whole()

    # --- what follows a write ---

    def moments_written(self) -> None:
        self.segment.states.written()

    def masters_written(self) -> None:
        """The weights follow, on every rank."""
        self.segment.written()
        unit = self.engine.schedule.units[self.engine.passes.homes[self.segment.weights.params[self.place]]]
        unit.outdate(hide=False)
        if not unit.placement.param.split:
            unit.make_whole()

    def grads_written(self) -> None:
        """A parameter that has been given a gradient is used."""
        self.segment.grads.used[self.place] = True
        self.segment.grads.rewritten()


def _home_of(param: nn.Parameter, *, writes: bool = False) -> _Home:
    param = part_of(param)
    engine = engines.owner_of(param)
    if engine is None:
        refuse_divided([param])
        raise UsageError("the parameter belongs to no engine", fix="call naught.initialize with its model first")
    engine.refuse_away()
    if writes:
        engine.before_a_change()
    for segment in engine.schedule.units[engine.passes.homes[param]].segments:
        for index, member in enumerate(segment.weights.params):
            if member is param:
                return _Home(engine, segment, index)
    raise AssertionError("an engine knows its parameters")


class _Kind(NamedTuple):
    """Weights, gradients or states: how to find them, what to call them, and what follows a write."""

    find: Callable[[_Home], Tensor | None]
    what: str
    scaled: bool = False  # they are multiplied by the scale of the loss
    written: Callable[[_Home], None] = lambda _: None


_WEIGHTS = _Kind(_Home.masters, "weights", written=_Home.masters_written)
_GRADS = _Kind(_Home.grads, "gradient", scaled=True, written=_Home.grads_written)
_OWN_GRADS = _GRADS._replace(find=_Home.own_grads)


def _state(name: str) -> _Kind:
    return _Kind(lambda home: home.moments(name), f'state "{name}"', written=_Home.moments_written)


def _read(param: nn.Parameter, kind: _Kind, cut: Callable[[_Home, Tensor], Tensor]) -> Tensor | None:
    home = _home_of(param)
    owned = kind.find(home)
    if owned is None:
        return None
    found = cut(home, owned).to(param.device, torch.float32, copy=True)
    return found / home.engine.scaling.value if kind.scaled else found


def _write(param: nn.Parameter, kind: _Kind, put: Callable[[_Home, Tensor, Tensor], None], value: Tensor) -> None:
    home = _home_of(param, writes=True)
    home.engine.passes.close()
    owned = kind.find(home)
    if owned is None:
        raise UsageError(
            f"the parameter has no {kind.what} now",
            fix="gradients are there between backward and step, states after the first step",
        )
    put(home, owned, value * home.engine.scaling.value if kind.scaled else value)
    kind.written(home)


# --- whole ---


def safe_get_full_fp32_param(param: nn.Parameter) -> Tensor | None:
    """The parameter in 32 bits; what training goes by, not what it is rounded to."""
    return _read(param, _WEIGHTS, _Home.whole)


def safe_set_full_fp32_param(param: nn.Parameter, value: Tensor) -> None:
    """Write the parameter, and what it is rounded to. All ranks must give the same value."""
    _write(param, _WEIGHTS, _Home.write, value)


def safe_get_full_grad(param: nn.Parameter) -> Tensor | None:
    """The gradient; None if there is none."""
    return _read(param, _GRADS, _Home.whole)


def safe_set_full_grad(param: nn.Parameter, value: Tensor) -> None:
    _write(param, _GRADS, _Home.write, value)


def safe_get_full_optimizer_state(param: nn.Parameter, optim_state_key: str) -> Tensor | None:
    """What the optimizer remembers of the parameter; None before its first step, or if it has no such state."""
    return _read(param, _state(optim_state_key), _Home.whole)


def safe_set_full_optimizer_state(param: nn.Parameter, value: Tensor, optim_state_key: str) -> None:
    _write(param, _state(optim_state_key), _Home.write, value)


def safe_update_full_grad_vectorized(
    param_list: Iterable[nn.Parameter], update_func: Callable[[Tensor, nn.Parameter], Tensor]
) -> None:
    """Give each of these parameters the gradient that a function makes of the one that it has."""
    for param in param_list:
        grad = safe_get_full_grad(param)
        if grad is not None:
            safe_set_full_grad(param, update_func(grad, param))


# --- this rank's part, flat; maybe nothing ---


def safe_get_local_fp32_param(param: nn.Parameter) -> Tensor | None:
    return _read(param, _WEIGHTS, _Home.local)


def safe_set_local_fp32_param(param: nn.Parameter, value: Tensor) -> None:
    _write(param, _WEIGHTS, _Home.write_local, value)


def safe_get_local_grad(param: nn.Parameter) -> Tensor | None:
    return _read(param, _OWN_GRADS, _Home.local)


def safe_set_local_grad(param: nn.Parameter, value: Tensor) -> None:
    _write(param, _OWN_GRADS, _Home.write_local, value)


def safe_get_local_optimizer_state(param: nn.Parameter, optim_state_key: str) -> Tensor | None:
    return _read(param, _state(optim_state_key), _Home.local)


def safe_set_local_optimizer_state(param: nn.Parameter, value: Tensor, optim_state_key: str) -> None:
    _write(param, _state(optim_state_key), _Home.write_local, value)
