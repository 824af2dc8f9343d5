"""Live bytes: what tensors hold that are made while one looks, as they come and go. Those without contents count like others."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from naught.hooks import letting_go

__all__ = ["Activations", "LiveBytes", "activations_of"]


class Activations(NamedTuple):
    """What a forward leaves for its backward, and the most that the two hold at once."""

    kept: int
    most: int


def activations_of(params: Iterable[nn.Parameter], run: Callable[[], Tensor]) -> Activations:
    """Of one micro-batch: all that its forward and backward make, but gradients of parameters, which are let go as they come."""
    with letting_go(params), LiveBytes() as live:
        loss = run()
        kept = live.held
        torch.autograd.backward(loss)
    return Activations(kept, live.most)


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own
    """While open, storages that an operation makes are counted until nobody has them. One that it was given is none of them, and
    one that is resized to 0 stays counted as it was made."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.held = self.most = 0

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        given = {_storage(leaf)._cdata for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        made = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(made):
            if isinstance(leaf, Tensor) and _storage(leaf)._cdata not in given:
                given.add(_storage(leaf)._cdata)
                self._count(_storage(leaf))
        return made

    def _count(self, storage: torch.UntypedStorage) -> None:
        nbytes = storage.nbytes()
        self.held += nbytes
        self.most = max(self.most, self.held)
        weakref.finalize(storage, self._let_go, nbytes).atexit = False

    def _let_go(self, nbytes: int) -> None:
        self.held -= nbytes


def _storage(tensor: Tensor) -> torch.UntypedStorage:
    return tensor.untyped_storage()
