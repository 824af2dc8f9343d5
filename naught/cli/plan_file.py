"""Plan file: the configuration that does what a forecast is of."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import Any, NamedTuple

from naught.advice import POOLED
from naught.estimate import Forecast
from naught.job import Checkpointing, Job
from naught.machine import Machine
from naught.placement import PLACEMENTS, Placement, Tier

__all__ = ["UNNAMED_FOLDER", "Wanted", "Written", "asked_beside", "base_of", "document_of", "undecided"]

_DEVICES = {Tier.HOST: "cpu", Tier.DISK: "nvme"}


_OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adamw": {"type": "AdamW", "params": {"lr": 1e-4}},
    "adam": {"type": "Adam", "params": {"lr": 1e-4}},
    "lion": {"type": "Lion", "params": {"lr": 1e-5}},
    "adagrad": {"type": "Adagrad", "params": {"lr": 1e-2}},
    "sgd": {"type": "SGD", "params": {"lr": 1e-2}},
    "sgd-momentum": {"type": "SGD", "params": {"lr": 1e-2, "momentum": 0.9}},
}


# Where a placement needs a folder on disk, and nobody has named one.
UNNAMED_FOLDER = "/local_nvme"


class Wanted(NamedTuple):
    """For which machine, where on disk, if that was said, and what no placement decides."""

    machine: Machine
    nvme_path: str | None
    base: Mapping[str, Any]


class Written(NamedTuple):
    """A configuration, and whether it needs a folder on disk that nobody has named."""

    document: dict[str, Any]
    lacks_folder: bool


def base_of(job: Job, dtype: str, optimizer: str) -> dict[str, Any]:
    """What no placement decides, for who has given no configuration."""
    base = {**_batch(job), "gradient_clipping": 1.0, "optimizer": _OPTIMIZERS[optimizer]}
    return base | ({dtype: {"enabled": True}} if dtype != "fp32" else {})


def asked_beside(given: Mapping[str, Any], job: Job, *, batch: bool, dtype: str | None, optimizer: str | None) -> dict[str, Any]:
    """A configuration, with what is asked for beside it: the job's `batch`, a `dtype`, an `optimizer`."""
    asked = dict(given)
    if batch or not any(key in asked for key in _BATCH):
        asked = {key: value for key, value in asked.items() if key not in _BATCH} | _batch(job)
    if dtype is not None:
        asked = {key: value for key, value in asked.items() if key not in ("fp16", "bf16")}
        asked |= {dtype: {"enabled": True}} if dtype != "fp32" else {}
    if optimizer is not None:
        asked["optimizer"] = _OPTIMIZERS[optimizer]
    return asked


def undecided(document: Mapping[str, Any]) -> dict[str, Any]:
    """What of a configuration no placement decides."""
    base = deepcopy(dict(document))
    for path in _DECIDED:
        *blocks, key = path.split(".")
        block = base
        for name in blocks:
            block = block.get(name) or {}
        block.pop(key, None)
    return base


_OFFLOADS = ("offload_optimizer", "offload_param")
_BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
# What a placement says. Of blocks that move something elsewhere it keeps how.
_DECIDED = (
    "zero_optimization.stage",
    *(f"zero_optimization.{block}.{key}" for block in _OFFLOADS for key in ("device", "nvme_path", "ratio", "max_in_cpu")),
    "activation_checkpointing.cpu_checkpointing",
    *(f"naught.{key}" for key in ("placement", "nvme_path", "gradients", "activations", "tiles")),
)


def _batch(job: Job) -> dict[str, Any]:
    return {"train_micro_batch_size_per_gpu": job.micro_batch, "gradient_accumulation_steps": job.accumulation}


def document_of(row: Forecast, wanted: Wanted) -> Written:
    folder = wanted.nvme_path or UNNAMED_FOLDER
    zero: dict[str, Any] = {}
    ours: dict[str, Any] = {}
    if row.name == POOLED:
        zero = {"stage": 3}
        # What it was planned for; on a machine that has more, a pool without limits would be another one.
        limits = {"gpu_memory": wanted.machine.gpu.memory_bytes, "host_memory": wanted.machine.host_for_states}
        ours |= {name: nbytes for name, nbytes in limits.items() if nbytes}
        ours |= {"placement": POOLED} | ({"nvme_path": folder} if row.total(Tier.DISK) else {})
    else:
        zero = _zero(PLACEMENTS[row.name], folder)
        if PLACEMENTS[row.name].grad.tier is Tier.DISK:
            ours["gradients"] = "disk"
    if row.tiles > 1:
        ours["tiles"] = row.tiles
    checkpointing = {"cpu_checkpointing": True} if row.checkpointing is Checkpointing.HOST else {}
    if row.checkpointing is Checkpointing.DISK:
        ours |= {"activations": "disk", "nvme_path": folder}
    document = _over(wanted.base, {"zero_optimization": zero, "activation_checkpointing": checkpointing, "naught": ours})
    for name in _OFFLOADS:  # how something is moved that is not
        if name not in zero:
            document["zero_optimization"].pop(name, None)
    needs_folder = "nvme_path" in ours or any("nvme_path" in zero.get(name, ()) for name in _OFFLOADS)
    return Written(document, needs_folder and wanted.nvme_path is None)


def _over(base: Mapping[str, Any], said: Mapping[str, Any]) -> dict[str, Any]:
    """What is said, block by block, over what is there; blocks that say nothing go."""
    document = dict(base)
    for name, value in said.items():
        if not isinstance(value, Mapping):
            document[name] = value
            continue
        document[name] = _over(document.get(name) or {}, value)
        if not document[name]:
            del document[name]
    return document


def _zero(placement: Placement, nvme_path: str) -> dict[str, Any]:
    splits = (placement.param.split, placement.grad.split, placement.optim.split)
    zero: dict[str, Any] = {"stage": sum(splits)}
    for key, place in zip(_OFFLOADS, (placement.optim, placement.param), strict=True):
        if place.tier is not Tier.DEVICE:
            zero[key] = {"device": _DEVICES[place.tier]}
            if place.tier is Tier.DISK:
                zero[key] |= {"nvme_path": nvme_path} | ({"max_in_cpu": 0} if key == "offload_param" else {})
    return zero
