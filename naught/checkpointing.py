"""Checkpointing: activations that are computed again in the backward. DeepSpeed's names for it; what is kept of each checkpoint
can be split over the ranks that have the same, and rest on the host or in memory of its own."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch.utils import checkpoint as _torchs

from naught.accelerator import get_accelerator
from naught.activation_rests import AsItIs, OnDevice, OnHost, Rest, Split
from naught.comm import Among, Ledger
from naught.config import Source, load
from naught.errors import UsageError
from naught.flat import Meter
from naught.running import Own
from naught.saved import Saves

__all__ = ["checkpoint", "configure", "is_configured", "non_reentrant_checkpoint", "report", "reset"]

_LOG = logging.getLogger("naught")


class _Configured:
    """How checkpoints are kept, and what they have taken and moved."""

    def __init__(self, rest: Rest, ledger: Ledger, meter: Meter) -> None:
        self.saves, self.ledger, self.meter = Saves(rest), ledger, meter


_NOW: Own[list[_Configured]] = Own(list)  # at most one


def configure(
    mpu_: Any = None,
    deepspeed_config: Source | None = None,
    partition_activations: bool | None = None,
    contiguous_checkpointing: bool | None = None,
    num_checkpoints: int | None = None,
    checkpoint_in_cpu: bool | None = None,
    synchronize: bool | None = None,
    profile: bool | None = None,
) -> None:
    """Say how `checkpoint` keeps inputs, from here on. What is not said is as the configuration has it, or not so."""
    del synchronize, profile  # nothing waits for the device, and an engine times every phase
    asked = load(deepspeed_config if deepspeed_config is not None else {}).activation_checkpointing
    split = asked.partition_activations if partition_activations is None else partition_activations
    on_host = asked.cpu_checkpointing if checkpoint_in_cpu is None else checkpoint_in_cpu
    contiguous = asked.contiguous_memory_optimization if contiguous_checkpointing is None else contiguous_checkpointing
    count = asked.number_checkpoints if num_checkpoints is None else num_checkpoints
    if contiguous and not on_host and not count:
        raise UsageError(
            "checkpoints in memory of their own need to know how many there are", fix="give num_checkpoints (number_checkpoints)"
        )
    device = torch.device(get_accelerator().current_device_name())
    ledger, meter = Ledger(), Meter()
    rest: Rest = AsItIs()
    if on_host:
        rest = OnHost(device, meter)
    elif contiguous:
        rest = OnDevice(device, meter, count or 0)
    if split and mpu_ is None:
        raise UsageError(
            "activations are split over the model-parallel ranks, and there are none", fix="give mpu_, or do not partition"
        )
    if split and mpu_.get_model_parallel_world_size() > 1:
        rest = Split(rest, Among(ledger, mpu_.get_model_parallel_group()))
    reset()
    _NOW().append(_Configured(rest, ledger, meter))


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function, and keep of it only what it was given: the backward calls it again, with the same random numbers."""
    keeping = _NOW()[0].saves.open() if _NOW() and torch.is_grad_enabled() else nullcontext()
    with keeping:
        return _torchs.checkpoint(function, *args, use_reentrant=False, **kwargs)


non_reentrant_checkpoint = checkpoint


def is_configured() -> bool:
    return bool(_NOW())


def reset() -> None:
    """Keep checkpoints as torch does, and let go of memory that was theirs."""
    while _NOW():
        _NOW().pop().saves.rest.close()


def report() -> dict[str, dict[str, int]]:
    """Bytes that checkpoints hold and have held at most, by where; that went there and back; and that ranks have sent."""
    if not _NOW():
        return {"live": {}, "peak": {}, "moved": {}, "sent": {}}
    now = _NOW()[0]
    sent = {collective: now.ledger.total(collective) for collective in {key[0] for key in now.ledger.sent}}
    return {"live": dict(now.meter.live), "peak": dict(now.meter.peak), "moved": dict(now.meter.moved), "sent": sent}
