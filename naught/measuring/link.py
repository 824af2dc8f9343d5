"""Link: bytes a second between pinned memory of the host and an accelerator, one direction after the other."""

from __future__ import annotations

from typing import NamedTuple

import torch

from naught.measuring.rounds import median_round_s

__all__ = ["LinkRate", "link_rate"]


class LinkRate(NamedTuple):
    """Bytes a second, each way."""

    to_device: float
    to_host: float

    @property
    def bytes_s(self) -> float:
        """For as much in either direction."""
        return 2 / (1 / self.to_device + 1 / self.to_host)


def link_rate(device: torch.device, *, nbytes: int = 2**28, budget_s: float = 0.5) -> LinkRate:
    on_host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    on_device = torch.empty(nbytes, dtype=torch.uint8, device=device)
    down = median_round_s(lambda: on_device.copy_(on_host, non_blocking=True), device, budget_s=budget_s)
    up = median_round_s(lambda: on_host.copy_(on_device, non_blocking=True), device, budget_s=budget_s)
    return LinkRate(nbytes / down, nbytes / up)
