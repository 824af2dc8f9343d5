"""Numbers: what an optimizer keeps of whole parameters, written and read without a loss of type."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from naught.errors import CheckpointError
from naught.saves.inventory import DTYPES_BY_NAME, NAMES_BY_DTYPE

__all__ = ["number_of", "told"]


def told(value: Any) -> tuple[str, float]:
    """A number as its kind and its value: an int, a float, or a tensor of one element, on the host or on the device."""
    if isinstance(value, Tensor):
        place = "host" if value.device.type == "cpu" else "device"
        return f"{place} {NAMES_BY_DTYPE[value.dtype]}", float(value)
    return type(value).__name__, float(value)


def number_of(kind: str, value: float, device: torch.device) -> Any:
    if kind in ("int", "float", "bool"):
        return {"int": int, "float": float, "bool": bool}[kind](value)
    place, _, dtype = kind.partition(" ")
    if dtype not in DTYPES_BY_NAME or place not in ("host", "device"):
        raise CheckpointError(
            f'a number of the kind "{kind[:40]}" is not one that this release writes', fix="use a newer release"
        )
    return torch.tensor(value, dtype=DTYPES_BY_NAME[dtype], device=device if place == "device" else "cpu")
