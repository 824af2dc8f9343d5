"""Scout: while a pass is recorded, notices parameters that are used where they are absent: outside of their own unit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import nn
from torch.overrides import TorchFunctionMode

__all__ = ["Scout"]

# Attributes that are views of a tensor's elements; to read any other does not touch them.
_VIEWS = {"T", "mT", "H", "mH", "data", "real", "imag"}
# Functions that do not touch them either.
_HARMLESS = {
    *("__set__", "__hash__", "__len__", "__repr__", "__format__", "data_ptr", "dim", "element_size", "get_device"),
    *("is_complex", "is_contiguous", "is_floating_point", "ndimension", "nelement", "numel"),
    *("requires_grad_", "size", "storage_offset", "stride", "untyped_storage"),
}


class Scout(TorchFunctionMode):
    """Looks at the arguments of every torch function. `find` is told each parameter that one of them is about to use."""

    def __init__(self, homes: Mapping[nn.Parameter, Any], find: Callable[[nn.Parameter], None]) -> None:
        super().__init__()
        self.homes, self.find = homes, find

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        kwargs = kwargs or {}
        if _touches(func):
            for value in (*args, *kwargs.values()):
                for leaf in value if isinstance(value, list | tuple) else (value,):
                    if isinstance(leaf, nn.Parameter) and leaf in self.homes:
                        self.find(leaf)
        return func(*args, **kwargs)


def _touches(func: Any) -> bool:
    name = getattr(func, "__name__", "")
    if name == "__get__":
        return getattr(getattr(func, "__self__", None), "__name__", "") in _VIEWS
    return name not in _HARMLESS
