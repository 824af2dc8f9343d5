"""Shelves: where the states of a rank rest: on its device or in host memory, within a limit, and counted."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from naught.errors import PlacementError
from naught.flat import Meter
from naught.quantity import show_bytes
from naught.streams import Slab, host_of

__all__ = ["HOST", "DeviceShelf", "HostShelf", "Shelf"]

HOST = "host "  # what the meter's categories of host memory begin with


class Shelf(Protocol):
    def take(self, numel: int, dtype: torch.dtype, category: str, *, travels: bool = False) -> Tensor:
        """Zeros that are held from here on. What travels is copied between host and device."""

    def give_back(self, tensor: Tensor, category: str) -> None:
        """It is held no longer."""


class DeviceShelf:
    def __init__(self, device: torch.device, meter: Meter) -> None:
        self.device, self.meter = device, meter

    def take(self, numel: int, dtype: torch.dtype, category: str, *, travels: bool = False) -> Tensor:
        del travels
        made = torch.zeros(numel, dtype=dtype, device=self.device)
        self.meter.change(category, made.nbytes)
        return made

    def give_back(self, tensor: Tensor, category: str) -> None:
        self.meter.change(category, -tensor.nbytes)


class HostShelf:
    """Host memory in pieces of exactly the size that is needed. `limit` is the most that there may be of it; None: no limit."""

    def __init__(self, device: torch.device, meter: Meter, *, pins: bool, limit: int | None) -> None:
        self.meter, self.pins, self.limit = meter, pins and device.type == "cuda", limit
        self.apart = device.type == "cuda"  # the device is not the host itself
        self.place = host_of(device)
        self.held = 0

    def take(self, numel: int, dtype: torch.dtype, category: str, *, travels: bool = False) -> Tensor:
        nbytes = numel * dtype.itemsize
        if self.limit is not None and self.held + nbytes > self.limit:
            raise PlacementError(
                f"{show_bytes(self.held)} of host memory are held, and {show_bytes(nbytes)} more would exceed the limit of "
                f"{show_bytes(self.limit)}",
                where="naught.host_memory",
                fix="raise the limit, or let more of the states rest on the device: naught plan tells what fits",
            )
        if self.apart and nbytes:
            made = Slab(nbytes, register=self.pins and travels).tensor(numel, dtype)
        else:
            made = torch.zeros(numel, dtype=dtype, device=self.place)
        self.held += nbytes
        self.meter.change(HOST + category, nbytes)
        return made

    def give_back(self, tensor: Tensor, category: str) -> None:
        self.held -= tensor.nbytes
        self.meter.change(HOST + category, -tensor.nbytes)
