"""Born: parameters that are split while their model is built. Those that were touched last are whole, as far as a window has
room; when one is pushed out, every rank keeps its own part, of what rank 0 has. Whoever touches it again finds it whole:
initializers that run over a whole model after it was built need not know."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, MutableMapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from naught.comm import Group
from naught.running import Own
from naught.spill import Stored

__all__ = ["Keeping", "Lent", "Nursery", "lend", "may_split", "raise_whole", "split", "splits", "take_back"]


class Keeping(NamedTuple):
    """How parts are kept: among which ranks, where those can reach each other's tensors, and what puts a part away."""

    group: Group
    place: torch.device
    put_away: Callable[[Tensor], Tensor | Stored]


class _Born(NamedTuple):
    """A parameter that is split: this rank's part, where it was built, and how it is kept."""

    part: Tensor | Stored
    device: torch.device
    keeping: Keeping

    def whole(self, shape: torch.Size, device: torch.device) -> Tensor:
        """All of it, on every rank. All of them must ask."""
        group, place, _ = self.keeping
        part = self.part.whole() if isinstance(self.part, Stored) else self.part
        if isinstance(self.part, Stored):
            self.part.will_change()  # no copy of it is kept
            self.part.give_back()
        flat = torch.empty(part.numel() * group.parts, dtype=part.dtype, device=place)
        slices = list(torch.split(flat, part.numel()))
        slices[group.part].copy_(part)
        group.gather(flat, slices, "").wait()
        return flat[: shape.numel()].view(shape).to(device)


_SPLIT: MutableMapping[nn.Parameter, _Born] = WeakIdKeyDictionary()


def splits(param: nn.Parameter) -> bool:
    """Whether a parameter was split when it was built, and no engine has it yet."""
    return param in _SPLIT


def raise_whole(params: Sequence[nn.Parameter], device: torch.device | None = None) -> None:
    """Make parameters whole that were split, where they were built or on another device. All ranks must do so."""
    with torch._C.DisableTorchFunction():
        for param in params:
            born = _SPLIT.pop(param, None)
            if born is not None:
                param.data = born.whole(param.shape, device or born.device)


_OPEN: Own[list[Nursery]] = Own(list)  # at most one: inside of it another has nothing to do


class Nursery(TorchFunctionMode):
    """While open, parameters that are built are split."""

    def __init__(self, keeping: Keeping, window_bytes: int) -> None:
        super().__init__()
        self.keeping, self.window_bytes = keeping, window_bytes
        self.make = nn.Parameter.__new__
        # The latest last. Held, so that it is the same on every rank: when a garbage collector comes by is not.
        self.window: OrderedDict[int, nn.Parameter] = OrderedDict()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not _only_describes(func):
            leaves = [leaf for leaf in tree_leaves((args, kwargs)) if type(leaf) is nn.Parameter]
            self._touch([leaf for leaf in leaves if id(leaf) in self.window or splits(leaf)])
        return func(*args, **kwargs)

    def __enter__(self) -> Nursery:
        if _OPEN():
            return self
        _OPEN().append(self)
        self.make = nn.Parameter.__new__

        def make(kind: type[nn.Parameter], *args: Any, **kwargs: Any) -> nn.Parameter:
            made = self.make(kind, *args, **kwargs)
            with torch._C.DisableTorchFunction():
                if may_split(made):
                    self._touch([made])
            return made

        nn.Parameter.__new__ = staticmethod(make)  # type: ignore[method-assign, assignment]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *raised: Any) -> None:
        if self not in _OPEN():
            return
        _OPEN().clear()
        nn.Parameter.__new__ = staticmethod(self.make)  # type: ignore[method-assign]
        super().__exit__(*raised)  # type: ignore[no-untyped-call]
        if raised[0] is None:
            for param in self.window.values():
                split(param, self.keeping)
        self.window.clear()

    def _touch(self, leaves: Sequence[nn.Parameter]) -> None:
        """Have these whole, all at once, and others only as far as there is room."""
        if not leaves:
            return
        with torch._C.DisableTorchFunction():
            raise_whole(leaves)
            for leaf in leaves:
                self.window.pop(id(leaf), None)
                self.window[id(leaf)] = leaf
            held = sum(param.nbytes for param in self.window.values())
            wanted = set(map(id, leaves))
            for key, param in list(self.window.items()):
                if held <= self.window_bytes:
                    break
                if key not in wanted:
                    held -= param.nbytes
                    split(self.window.pop(key), self.keeping)


def split(param: nn.Parameter, keeping: Keeping, writer: int = 0) -> None:
    """Have every rank keep its own part of what one rank has. All of them must do so. What has no NaN stays as it is."""
    if not may_split(param) or splits(param):
        return
    group, place, put_away = keeping
    with torch._C.DisableTorchFunction():
        device, numel = param.device, param.numel()
        each = -(-max(numel, 1) // group.parts)
        flat = torch.zeros(each * group.parts, dtype=param.dtype, device=place)
        flat[:numel].copy_(param.data.reshape(-1))
        group.spread(flat, writer)
        part = put_away(flat[group.part * each : (group.part + 1) * each])
        param.data = torch.full((), math.nan, dtype=param.dtype, device=device).expand(param.shape)  # a read gives NaN
    _SPLIT[param] = _Born(part, device, keeping)


def may_split(param: nn.Parameter) -> bool:
    return type(param) is nn.Parameter and not param.is_meta and param.is_floating_point()


class Lent(NamedTuple):
    """A parameter that is whole for a while, and how it is kept otherwise."""

    param: nn.Parameter
    keeping: Keeping


def lend(params: Sequence[nn.Parameter]) -> list[Lent]:
    """Make those whole that are split."""
    found = [Lent(param, _SPLIT[param].keeping) for param in {id(param): param for param in params}.values() if splits(param)]
    raise_whole([param for param, _ in found])
    return found


def take_back(lent: Sequence[Lent], writer: int | None) -> None:
    for param, keeping in lent:
        split(param, keeping, writer or 0)


def _only_describes(func: Any) -> bool:
    """Whether a function asks for a tensor's shape, type or device: what a split one knows as well."""
    name, owner = getattr(func, "__name__", ""), getattr(func, "__self__", None)
    if name == "__get__":
        return getattr(owner, "__name__", "") not in ("data", "T", "mT", "H", "grad")
    return name in ("size", "dim", "numel", "stride", "is_floating_point", "element_size", "requires_grad_", "__hash__")
