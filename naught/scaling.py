"""Scaling: what the papers say of more and more devices, as forecasts of this planner beside it. Pure.

The devices are the papers': DGX-2 nodes of 16 V100 with 32 GB, 1.5 TB of memory, 28 TB of NVMe and 100 GB/s to other nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import NamedTuple

from naught.advice import best_forecast, largest_numel
from naught.estimate import Forecast, forecast
from naught.formulas import recipe
from naught.job import Job, transformer_activations
from naught.machine import GPUS, Machine
from naught.papers import Table
from naught.placement import PLACEMENTS, Tier
from naught.presets import PRESETS, gpt_of_count
from naught.quantity import show_bytes
from naught.shapes import Transformer
from naught.sizes import PlacedRun

__all__ = ["CURVES", "PAPER_SAYS", "Bandwidth", "Point", "bandwidth", "curve", "largest_model"]

_PER_NODE = 16
_NODE = Machine(
    gpu=GPUS["v100"],
    host_bytes=1_500 * 10**9,
    disk_bytes=28 * 10**12,
    host_bytes_s=16 * 3e9,  # ZeRO-Infinity: 3 GB/s for each of 16 devices that read at once
    disk_bytes_s=16 * 1.6e9,
    update_numel_s=4e9,
)
_MOST_BATCH = 64

PAPER_SAYS: Mapping[str, str] = MappingProxyType(
    {
        "zero-scaling": "from 64 to 400 devices the speed grows more than they do, for each then has room for a larger batch.",
        "offload-scaling": "nearly linear, over 30 TFLOP/s each; stage 2 does not fit below 32 devices and is faster from 64 on.",
        "infinity-scaling": "1T on one node and 32T on 32, without model parallelism, with all states on NVMe.",
    }
)


class Point(NamedTuple):
    """A number of devices, and the forecast with the largest micro-batch that fits; None: not even one sample does."""

    ranks: int
    micro_batch: int
    forecast: Forecast | None
    flops: float = 0.0  # of one device in a second, with nothing overlapping

    @property
    def total(self) -> float:
        return self.flops * self.ranks

    @property
    def most_flops(self) -> float:
        """Of one device in a second, with everything overlapping."""
        return self.flops * self.forecast.times.serial / self.forecast.times.overlapped if self.forecast else 0.0


def curve(shape: Transformer, placement: str, ranks: tuple[int, ...], *, samples: int | None = None) -> list[Point]:
    """The same model on more and more devices, each with the largest micro-batch that it has room for. With a number of samples a
    step has as many, in micro-batches of a power of two."""
    return [_point(shape, placement, count, samples) for count in ranks]


def largest_model(placement: str, ranks: int) -> int:
    """Parameters of the largest model that fits, with one sample on each device."""
    return largest_numel(placement, _machine(ranks), Job(recipe=recipe("fp16", "adamw")))


class Bandwidth(NamedTuple):
    """Bytes a second that all devices together have of their nodes' memory and disks, each fetching a part of its own."""

    host: float
    disk: float


def bandwidth(ranks: int) -> Bandwidth:
    machine = _machine(ranks)
    return Bandwidth(machine.link_bytes_s * ranks, machine.disk_bytes_s / machine.local_ranks * ranks)


def _machine(ranks: int) -> Machine:
    """Within a node devices talk by NVLink; between nodes they share what leaves theirs."""
    between = 100e9 / _PER_NODE
    return replace(
        _NODE, ranks=ranks, ranks_per_node=min(ranks, _PER_NODE), network_bytes_s=0.0 if ranks <= _PER_NODE else between
    )


def _point(shape: Transformer, placement: str, ranks: int, samples: int | None) -> Point:
    machine = _machine(ranks)
    each = _MOST_BATCH if samples is None else samples // ranks
    tried = range(each, 0, -1) if samples is None else (each >> halves for halves in range(each.bit_length()))
    for batch in tried:
        found = _forecast(shape, placement, machine, batch, 1 if samples is None else each // batch)
        if found.fits:
            # What a step computes, without what it computes again, over all that it does.
            useful = found.times.compute * 3 / 4 * machine.gpu.flops
            return Point(ranks, batch, found, useful / found.times.serial)
    return Point(ranks, 0, None)


def _forecast(shape: Transformer, placement: str, machine: Machine, batch: int, accumulation: int = 1) -> Forecast:
    """With checkpoints on the device, as the first two papers have them; ZeRO-Infinity moves them and divides layers."""
    job = Job(micro_batch=batch, accumulation=accumulation, recipe=recipe("fp16", "adamw"))
    placed = [PlacedRun(run, PLACEMENTS[placement]) for run in shape.runs]
    if placement.startswith("infinity"):
        return best_forecast(placement, placed, partial(transformer_activations, shape), machine, job)
    return forecast(placement, placed, transformer_activations(shape, job), machine, job)


def _told(point: Point) -> tuple[str, str]:
    if point.forecast is None:
        return "-", "does not fit"
    return str(point.micro_batch), f"{point.flops / 1e12:.1f}"


def _zero_scaling() -> Table:
    found = curve(PRESETS["zero-60b"], "stage3", (64, 128, 256, 400))
    first = found[0]
    rows = []
    for point in found:
        batch, each = _told(point)
        linear = first.total * point.ranks / first.ranks
        rows.append((str(point.ranks), batch, each, f"{point.total / 1e15:.2f}", f"{point.total / linear:.2f}"))
    return Table(
        "ZeRO, figure 3: 60B parameters on more and more V100, at stage 3 (the paper: Pos+g with 16-way model parallelism)",
        ("devices", "batch each", "TFLOP/s each", "PFLOP/s", "x linear"),
        tuple(rows),
        (f"The paper: {PAPER_SAYS['zero-scaling']}",),
    )


def _offload_scaling() -> Table:
    ranks = (1, 4, 16, 32, 64, 128)
    offload = curve(PRESETS["offload-10b"], "stage2-offload", ranks, samples=512)
    near = curve(PRESETS["offload-10b"], "stage2", ranks, samples=512)
    rows = [(str(far.ranks), *_told(far), *_told(close)) for far, close in zip(offload, near, strict=True)]
    return Table(
        "ZeRO-Offload, figure 11: 10B parameters, 512 samples a step, states on the host and on the device",
        ("devices", "batch each", "offload TFLOP/s each", "batch each", "stage 2 TFLOP/s each"),
        tuple(rows),
        (
            f"The paper: {PAPER_SAYS['offload-scaling']}",
            "Nothing overlaps here, and 512 samples on 128 devices are few: both fall behind what the paper measured there.",
        ),
    )


def _infinity_scaling() -> Table:
    rows = []
    for count, nodes in ((1e12, 1), (32e12, 32)):
        model = gpt_of_count(int(count))
        assert model.shape is not None
        machine = _machine(nodes * _PER_NODE)
        for placement in ("infinity-host", "infinity-disk-all"):
            found = _forecast(model.shape, placement, machine, 1)
            held = [f"{show_bytes(found.total(tier))} of {show_bytes(found.capacity[tier])}" for tier in Tier]
            rows.append((f"{model.numel / 1e12:.1f}T", str(nodes), placement, *held, "yes" if found.fits else "no"))
    return Table(
        "ZeRO-Infinity: a trillion parameters on one DGX-2 node, 32 trillion on 32",
        ("params", "nodes", "placement", "a device", "its part of the host", "its part of the disk", "fits"),
        tuple(rows),
        (f"The paper: {PAPER_SAYS['infinity-scaling']}",),
    )


CURVES: Mapping[str, Callable[[], Table]] = MappingProxyType(
    {"zero-scaling": _zero_scaling, "offload-scaling": _offload_scaling, "infinity-scaling": _infinity_scaling}
)
