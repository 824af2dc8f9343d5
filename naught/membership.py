"""Membership: which parameter of a model belongs to which parameter group."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from naught.errors import UsageError

__all__ = ["Membership"]

_LOG = logging.getLogger("naught")
_SHOWN = 3


class Membership:
    """The groups of an optimizer, and the place of each parameter in them. What is in no group, or requires no gradient
    when the engine is made, is not trained."""

    def __init__(self, model: nn.Module, groups: Sequence[dict[str, Any]]) -> None:
        self.groups = groups
        self.places: dict[int, int] = {}  # by the id of a parameter; the groups keep all of them alive
        names = {id(param): name for name, param in model.named_parameters()}
        for at, group in enumerate(groups):
            for param in group["params"]:
                if id(param) not in names:
                    raise UsageError(
                        f"parameter group {at} has a parameter of shape {list(param.shape)} that the model has not",
                        fix="give the optimizer the parameters of this very model, after the last change to its modules",
                    )
                self.places[id(param)] = at
        left_out = [name for name, param in model.named_parameters() if param.requires_grad and id(param) not in self.places]
        if groups and left_out:
            shown = ", ".join(f'"{name}"' for name in left_out[:_SHOWN]) + (" and others" if len(left_out) > _SHOWN else "")
            _LOG.warning("%d parameters require gradients and are in no group of the optimizer: %s", len(left_out), shown)

    def has(self, param: nn.Parameter) -> bool:
        """Whether a parameter is trained."""
        return param.requires_grad and id(param) in self.places

    def group_of(self, param: nn.Parameter) -> int:
        return self.places[id(param)]

    def replace(self, successor: Callable[[nn.Parameter], nn.Parameter]) -> None:
        """Parameters that were built on the meta device have others in their place now."""
        for group in self.groups:
            group["params"] = [successor(param) for param in group["params"]]
