"""Plan file: the configuration that does what a forecast is of."""

from __future__ import annotations

from typing import Any, NamedTuple

from naught.advice import POOLED
from naught.estimate import Forecast
from naught.job import Checkpointing, Job
from naught.machine import Machine
from naught.placement import PLACEMENTS, Placement, Tier

__all__ = ["Wanted", "document_of"]

_DEVICES = {Tier.HOST: "cpu", Tier.DISK: "nvme"}


_OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adamw": {"type": "AdamW", "params": {"lr": 1e-4}},
    "adam": {"type": "Adam", "params": {"lr": 1e-4}},
    "lion": {"type": "Lion", "params": {"lr": 1e-5}},
    "adagrad": {"type": "Adagrad", "params": {"lr": 1e-2}},
    "sgd": {"type": "SGD", "params": {"lr": 1e-2}},
    "sgd-momentum": {"type": "SGD", "params": {"lr": 1e-2, "momentum": 0.9}},
}


class Wanted(NamedTuple):
    """For which machine and job, in which precision, by which optimizer, and where on disk."""

    machine: Machine
    job: Job
    dtype: str
    optimizer: str
    nvme_path: str


def document_of(row: Forecast, wanted: Wanted) -> dict[str, Any]:
    document: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": wanted.job.micro_batch,
        "gradient_accumulation_steps": wanted.job.accumulation,
        "gradient_clipping": 1.0,
        "optimizer": _OPTIMIZERS[wanted.optimizer],
    }
    if wanted.dtype != "fp32":
        document[wanted.dtype] = {"enabled": True}
    ours: dict[str, Any] = {}
    if row.name == POOLED:
        document["zero_optimization"] = {"stage": 3}
        # What it was planned for; on a machine that has more, a pool without limits would be another one.
        limits = {"gpu_memory": wanted.machine.gpu.memory_bytes, "host_memory": wanted.machine.host_for_states}
        ours |= {name: nbytes for name, nbytes in limits.items() if nbytes}
        ours |= {"placement": POOLED} | ({"nvme_path": wanted.nvme_path} if row.total(Tier.DISK) else {})
    else:
        document["zero_optimization"] = _zero(PLACEMENTS[row.name], wanted.nvme_path)
        if PLACEMENTS[row.name].grad.tier is Tier.DISK:
            ours["gradients"] = "disk"
    if row.tiles > 1:
        ours["tiles"] = row.tiles
    if row.checkpointing is Checkpointing.HOST:
        document["activation_checkpointing"] = {"cpu_checkpointing": True}
    if row.checkpointing is Checkpointing.DISK:
        ours |= {"activations": "disk", "nvme_path": wanted.nvme_path}
    return document | ({"naught": ours} if ours else {})


def _zero(placement: Placement, nvme_path: str) -> dict[str, Any]:
    splits = (placement.param.split, placement.grad.split, placement.optim.split)
    zero: dict[str, Any] = {"stage": sum(splits)}
    for key, place in (("offload_optimizer", placement.optim), ("offload_param", placement.param)):
        if place.tier is not Tier.DEVICE:
            zero[key] = {"device": _DEVICES[place.tier]}
            if place.tier is Tier.DISK:
                zero[key]["nvme_path"] = nvme_path
    return zero
