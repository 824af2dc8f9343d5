"""Claims: which parameter belongs to which engine. Nothing is written onto parameters, and nothing is kept alive."""

from __future__ import annotations

from collections.abc import Iterable, MutableMapping
from typing import Generic, TypeVar
from weakref import ReferenceType, ref

from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from naught.errors import UsageError
from naught.running import Rank, running

__all__ = ["Claims", "claimed", "let_go", "refuse_claimed"]

Owner = TypeVar("Owner")


class Claims(Generic[Owner]):
    """Parameters and their owners."""

    def __init__(self) -> None:
        self.owners: MutableMapping[nn.Parameter, ReferenceType[Owner]] = WeakIdKeyDictionary()

    def claim(self, params: Iterable[nn.Parameter], owner: Owner) -> None:
        claimed: ReferenceType[Owner] = ref(owner)
        for param in params:
            self.owners[param] = claimed

    def drop(self, params: Iterable[nn.Parameter]) -> None:
        for param in params:
            self.owners.pop(param, None)

    def owner_of(self, param: nn.Parameter) -> Owner | None:
        found = self.owners.get(param)
        return found() if found is not None else None


# What listens to a parameter's module lives as long as that: these claims end with destroy().
claimed: Claims[object] = Claims()
# Ranks that share a process look at their models before any of them has an engine.
_seen: Claims[Rank] = Claims()


def let_go(module: nn.Module) -> None:
    """Of a rank that is no more: others may have its model."""
    _seen.drop(module.parameters())


def refuse_claimed(module: nn.Module) -> None:
    """Two engines cannot train one model, nor can two ranks."""
    rank = running()
    for name, param in module.named_parameters():
        if rank is not None and _seen.owner_of(param) not in (None, rank):
            raise UsageError(f'parameter "{name}" belongs to another rank already', fix="have every rank build its own model")
        if claimed.owner_of(param) is not None:
            raise UsageError(
                f'parameter "{name}" belongs to another engine already',
                fix="call destroy() on that engine, or make the model anew",
            )
    if rank is not None:
        _seen.claim(module.parameters(), rank)
