"""Flat: one 1-D buffer that is allocated and freed in place, so that views of it come back to life when it is refilled."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import torch
from torch import Tensor

from naught.errors import UsageError

__all__ = ["Flat", "Meter"]


@dataclass
class Meter:
    """Bytes of live buffers by category, and the most that there have been."""

    live: Counter[str] = field(default_factory=Counter)
    peak: Counter[str] = field(default_factory=Counter)

    def change(self, category: str, nbytes: int) -> None:
        self.live[category] += nbytes
        self.peak[category] = max(self.peak[category], self.live[category])


class Flat:
    """A buffer of fixed size. While freed its tensor keeps its shape and must not be read."""

    def __init__(self, numel: int, like: Tensor, *, category: str, meter: Meter) -> None:
        self.tensor = torch.empty(numel, dtype=like.dtype, device=like.device)
        self.nbytes = self.tensor.nbytes
        self.category, self.meter = category, meter
        self.allocated = False
        self.tensor.untyped_storage().resize_(0)

    def alloc(self) -> None:
        if not self.allocated:
            self.tensor.untyped_storage().resize_(self.nbytes)
            self.allocated = True
            self.meter.change(self.category, self.nbytes)

    def free(self) -> None:
        if self.allocated:
            storage = self.tensor.untyped_storage()
            if not storage.resizable():
                raise UsageError(
                    "a gathered parameter is still shared with other code, so its memory cannot be freed",
                    fix="copy it first: param.detach().clone().numpy()",
                )
            storage.resize_(0)
            self.allocated = False
            self.meter.change(self.category, -self.nbytes)
