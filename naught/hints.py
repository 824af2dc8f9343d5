"""Hints: what a user says of modules before there is an engine: which are one unit each, and which use parameters of others.

Nothing is written onto modules: whoever builds an engine asks here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from typing import NamedTuple
from weakref import ReferenceType, ref

from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from naught.claims import claimed
from naught.errors import UsageError

__all__ = [
    "Loan",
    "get_z3_leaf_modules",
    "leaf_names",
    "loans_of",
    "register_external_parameter",
    "renew_loans",
    "set_z3_leaf_module",
    "set_z3_leaf_modules",
    "set_z3_leaf_modules_by_name",
    "set_z3_leaf_modules_by_suffix",
    "unregister_external_parameter",
    "unset_z3_leaf_modules",
    "z3_leaf_module",
]

_LEAVES: MutableMapping[nn.Module, bool] = WeakIdKeyDictionary()  # modules that are one unit each
_LOANS: MutableMapping[nn.Module, list[ReferenceType[nn.Parameter]]] = (
    WeakIdKeyDictionary()
)  # by module, the parameters of others that it uses


def set_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Sequence[type | str] | type | str, raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Make every module of these classes one unit, whose weights come and go together. Before initialize."""
    if isinstance(leaf_module_classes, type | str):
        leaf_module_classes = [leaf_module_classes]
    wanted = {kind if isinstance(kind, str) else f"{kind.__module__}.{kind.__qualname__}" for kind in leaf_module_classes}

    def is_wanted(_: str, module: nn.Module) -> bool:
        names = {f"{kind.__module__}.{kind.__qualname__}" for kind in type(module).__mro__}
        return bool(wanted & (names | {type(module).__name__, type(module).__qualname__}))

    return _mark(model, is_wanted, f"of the classes {', '.join(sorted(wanted))}", must=raise_if_not_found)


def set_z3_leaf_modules_by_name(model: nn.Module, names: Iterable[str], raise_if_not_found: bool = True) -> list[nn.Module]:
    wanted = set(names)
    return _mark(model, lambda name, _: name in wanted, f"named {', '.join(sorted(wanted))}", must=raise_if_not_found)


def set_z3_leaf_modules_by_suffix(model: nn.Module, suffixes: Iterable[str], raise_if_not_found: bool = True) -> list[nn.Module]:
    ends = tuple(suffixes)
    return _mark(model, lambda name, _: name.endswith(ends), f"whose names end in {', '.join(ends)}", must=raise_if_not_found)


def set_z3_leaf_module(model: nn.Module, flag: bool) -> None:
    """Make this one module a unit, or leave it to the engine again."""
    if flag:
        _LEAVES[model] = True
    else:
        _LEAVES.pop(model, None)


def unset_z3_leaf_modules(model: nn.Module, leaf_module_classes: Sequence[type]) -> list[nn.Module]:
    gone = [module for module in get_z3_leaf_modules(model) if isinstance(module, tuple(leaf_module_classes))]
    for module in gone:
        set_z3_leaf_module(module, False)
    return gone


def z3_leaf_module(model: nn.Module) -> bool:
    return model in _LEAVES


def get_z3_leaf_modules(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if module in _LEAVES]


def leaf_names(model: nn.Module) -> Iterator[str]:
    """The names of the modules that are one unit each."""
    return (name for name, module in model.named_modules() if module in _LEAVES)


def _mark(model: nn.Module, is_wanted: Callable[[str, nn.Module], bool], story: str, *, must: bool) -> list[nn.Module]:
    found = [module for name, module in model.named_modules() if is_wanted(name, module)]
    if must and not found:
        raise UsageError(f"the model has no modules {story}", fix="name what print(model) shows")
    for module in found:
        set_z3_leaf_module(module, True)
    return found


class Loan(NamedTuple):
    """A module, by its name in the model, uses a parameter that belongs to another."""

    module: str
    param: nn.Parameter


def register_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Say that a module's forward uses this parameter of another module. Where a forward uses it by itself, the engine
    finds that out; this is for uses that it cannot see. Before initialize: afterwards it is an error."""
    if not isinstance(module, nn.Module) or not isinstance(parameter, nn.Parameter):
        kinds = f"{type(module).__name__} and {type(parameter).__name__}"
        raise UsageError(
            f"register_external_parameter wants a module and a parameter, not {kinds}",
            fix="call register_external_parameter(module, parameter)",
        )
    if claimed.owner_of(parameter) is not None:
        raise UsageError("the parameter belongs to an engine already", fix="register it before naught.initialize")
    _LOANS.setdefault(module, []).append(ref(parameter))


def unregister_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    kept = [held for held in _LOANS.get(module, []) if held() is not parameter]
    if len(kept) == len(_LOANS.get(module, [])):
        raise UsageError("the parameter was not registered for this module", fix="register it first")
    _LOANS[module] = kept


def loans_of(model: nn.Module) -> Iterator[Loan]:
    for name, module in model.named_modules():
        for held in _LOANS.get(module, []):
            param = held()
            if param is not None:
                yield Loan(name, param)


def renew_loans(model: nn.Module, successor: Callable[[nn.Parameter], nn.Parameter]) -> None:
    """Parameters that were built on the meta device have others in their place now."""
    for module in model.modules():
        if module in _LOANS:
            held = (member() for member in _LOANS[module])
            _LOANS[module] = [ref(successor(param)) for param in held if param is not None]
