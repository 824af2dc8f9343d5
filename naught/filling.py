"""Filling: gives a model that was built on the meta device real weights, a unit at a time, so that no more than one is
whole at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import Tensor, nn

from naught.errors import ModelError

__all__ = ["Filling"]


class Filling:
    """Fills the modules of a model by their own `reset_parameters`, in the order in which they were defined: the random
    numbers are those that building the model in place would have drawn, as far as modules draw for themselves.

    Tied parameters stay tied and keep what the first of their modules gave them.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self.device = device
        there = device.type != "meta"  # else nothing has contents
        self.owners = [(name, module) for name, module in model.named_modules() if there and _is_meta(module)]
        self.filled: dict[int, nn.Parameter] = {}  # by the id of the meta parameter, which the model no longer holds
        self.kept = [param for param in model.parameters() if param.is_meta]  # so that no id is used twice

    def last_owner(self, params: Sequence[nn.Parameter]) -> int:
        """The place of the last module that owns one of these parameters; -1 if none is to be filled."""
        wanted = {id(param) for param in params}
        owners = [at for at, (_, module) in enumerate(self.owners) if wanted & set(map(id, module.parameters(recurse=False)))]
        return max(owners, default=-1)

    def fill_through(self, place: int) -> None:
        """Fill the modules up to a place, those that are still empty."""
        for name, module in self.owners[: place + 1]:
            if _is_meta(module):
                self._fill(name, module)

    def fill_rest(self) -> None:
        """Fill what is left: modules that have buffers only."""
        self.fill_through(len(self.owners))

    def of(self, param: nn.Parameter) -> nn.Parameter:
        """What has taken the place of a parameter."""
        return self.filled.get(id(param), param)

    def _fill(self, name: str, module: nn.Module) -> None:
        reset = getattr(module, "reset_parameters", None)
        if reset is None:
            raise ModelError(
                f'"{name or "the model"}" ({type(module).__name__}) was built on the meta device and cannot fill itself',
                fix="give the class a method reset_parameters() that fills its own parameters and buffers",
            )
        given = {short: param.detach().clone() for short, param in self._materialize(module).items()}
        cast(Callable[[], None], reset)()
        with torch.no_grad():
            for short, value in given.items():
                module._parameters[short].copy_(value)  # type: ignore[union-attr]

    def _materialize(self, module: nn.Module) -> dict[str, nn.Parameter]:
        """Give a module memory for its own tensors. Returns those that another module has filled already."""
        filled: dict[str, nn.Parameter] = {}
        for short, param in list(module._parameters.items()):
            if param is None or not param.is_meta:
                continue
            known = self.filled.get(id(param))
            if known is not None:
                filled[short] = known
            module._parameters[short] = self.filled.setdefault(id(param), nn.Parameter(self._empty(param), param.requires_grad))
        for short, buffer in list(module._buffers.items()):
            if buffer is not None and buffer.is_meta:
                module._buffers[short] = self._empty(buffer)
        return filled

    def _empty(self, like: Tensor) -> Tensor:
        return torch.empty_like(like, device=self.device)


def _is_meta(module: nn.Module) -> bool:
    own = (*module.parameters(recurse=False), *module.buffers(recurse=False))
    return any(tensor.is_meta for tensor in own)
