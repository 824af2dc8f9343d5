"""Papers: the tables of the ZeRO papers, computed by the formulas that the planner uses. Pure.

Each table is rows of text beside what the paper printed, so that a reader sees where they part and why.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from decimal import ROUND_DOWN, ROUND_HALF_UP, Decimal
from types import MappingProxyType
from typing import NamedTuple

from naught.formulas import (
    arithmetic_intensity,
    block_activation_bytes,
    checkpoint_bytes,
    efficiency,
    recipe,
    state_bytes,
)
from naught.placement import PLACEMENTS, Placement
from naught.presets import PRESETS

__all__ = ["TABLES", "Table"]

_STAGES = ("stage1", "stage2", "stage3")
_ADAM = recipe("fp16", "adamw")
_GB = 10**9


class Table(NamedTuple):
    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()


def _gigabytes(numel: float, placement: Placement, world: int) -> float:
    return state_bytes(numel, placement, world, _ADAM) / _GB


def _cell(gigabytes: float) -> str:
    """As the ZeRO paper prints: whole numbers from 100 on, cut off; fewer digits below, rounded half up."""
    value = Decimal(str(gigabytes))
    if value >= 100:
        return str(value.quantize(Decimal(1), ROUND_DOWN))
    places = Decimal("0.01") if value < 2 else Decimal("0.1")
    return f"{value.quantize(places, ROUND_HALF_UP).normalize():f}"


def _zero_table1() -> Table:
    models = {"7.5B": 7.5e9, "128B": 128e9, "1T": 1e12}
    header = ("DP", *(f"{model} {stage}" for model in models for stage in ("Pos", "Pos+g", "Pos+g+p")))
    rows = tuple(
        (str(world), *(_cell(_gigabytes(numel, PLACEMENTS[stage], world)) for numel in models.values() for stage in _STAGES))
        for world in (1, 4, 16, 64, 256, 1024)
    )
    return Table("ZeRO, table 1: model states per device in GB", header, rows)


def _zero_table2() -> Table:
    """The paper multiplies its one-decimal figure for one slice by the degree of model parallelism."""
    bases = [32 * _GB / state_bytes(1, PLACEMENTS[stage], 64, _ADAM) / _GB for stage in ("stage0", *_STAGES)]
    rows = []
    for degree in (1, 2, 4, 8, 16):
        sizes = [Decimal(str(base)).quantize(Decimal("0.1"), ROUND_HALF_UP) * degree for base in bases]
        rows.append((str(degree), str(64 * degree), *(_billions(size) for size in sizes)))
    return Table(
        "ZeRO, table 2: largest model in theory, 32 GB devices, 64-way data parallel",
        ("MP", "GPUs", "baseline", "Pos", "Pos+g", "Pos+g+p"),
        tuple(rows),
        ("The paper measured 62 to 65% of the baseline column and about 82% of the Pos column.",),
    )


def _billions(billions: Decimal) -> str:
    if billions >= 500:
        return f"{(billions / 1000).quantize(Decimal('0.1'), ROUND_HALF_UP).normalize():f}T"
    return f"{billions.normalize():f}B"


def _zero_figure1() -> Table:
    names = ("baseline", "Pos", "Pos+g", "Pos+g+p")
    rows = []
    for name, stage in zip(names, ("stage0", *_STAGES), strict=True):
        gigabytes = Decimal(str(_gigabytes(7.5e9, PLACEMENTS[stage], 64)))
        rows.append((name, f"{gigabytes.quantize(Decimal('0.1'), ROUND_HALF_UP).normalize():f}"))
    return Table("ZeRO, figure 1: 7.5B parameters on 64 devices, GB of model states each", ("scheme", "GB"), tuple(rows))


class _Combination(NamedTuple):
    name: str
    stage: str
    activations: str
    measured: str


_COMBINATIONS = (
    _Combination("C1", "stage1", "whole", "40B"),
    _Combination("C2", "stage1", "partitioned", "60B"),
    _Combination("C3", "stage2", "whole", "not stated"),
    _Combination("C4", "stage2", "partitioned", "140B"),
    _Combination("C5", "stage2", "partitioned, on the host", "150B"),
)
_PAPER_NAMES = {"stage1": "Pos", "stage2": "Pos+g"}
_SLICES = 16  # degree of model parallelism
_DEVICES = 400
_BATCH, _SEQ = 16, 1024


def _zero_c1_c5() -> Table:
    """The largest of the paper's layer counts that fits: model states of one slice plus its checkpoints."""
    rows = []
    for name, stage, activations, measured in _COMBINATIONS:
        hidden, layers = 8192, 0
        while _slice_bytes(layers + 1, hidden, stage, activations) <= 32 * _GB:
            layers += 1
        rows.append(
            (name, _PAPER_NAMES[stage], f"CB + MD, checkpoints {activations}", f"{12 * layers * hidden**2 / 1e9:.0f}B", measured)
        )
    return Table(
        "ZeRO, C1 to C5: largest model with 16-way model parallelism on 400 devices of 32 GB",
        ("config", "ZeRO-DP", "ZeRO-R", "formulas", "paper"),
        tuple(rows),
        (
            f"Hidden size 8192, batch {_BATCH} of {_SEQ} tokens on each group of 16, a checkpoint and one block's activations.",
            "The formulas know no fragmentation and no workspace, so they are above what the paper measured.",
        ),
    )


def _slice_bytes(layers: int, hidden: int, stage: str, activations: str) -> float:
    states = state_bytes(12 * layers * hidden**2 / _SLICES, PLACEMENTS[stage], _DEVICES // _SLICES, _ADAM)
    checkpoints = checkpoint_bytes(layers, hidden, batch=_BATCH, seq=_SEQ)
    kept = {"whole": checkpoints, "partitioned": checkpoints / _SLICES, "partitioned, on the host": 0.0}[activations]
    return states + kept + block_activation_bytes(hidden, 64, batch=_BATCH, seq=_SEQ) / _SLICES


def _hundredths(value: float) -> str:
    return str(Decimal(value).quantize(Decimal("0.01"), ROUND_HALF_UP))


_TIB, _GIB = 2**40, 2**30
_FIGURE2 = {
    "infinity-0.1t": ("1.83", "2.03", "0.05", "1.95", "1.63"),
    "infinity-0.5t": ("9.16", "3.91", "0.12", "6.25", "2.50"),
    "infinity-1t": ("18.31", "7.13", "0.20", "9.77", "3.56"),
    "infinity-10t": ("182.81", "24.38", "0.76", "64.00", "8.00"),
    "infinity-100t": ("1845.70", "88.59", "3.08", "400.00", "18.00"),
}


def _infinity_figure2() -> Table:
    """Fills as the paper does: 20 bytes a parameter, 64 sequences a node for activations, 32 for checkpoints, 4 a GPU."""
    rows = []
    for name, printed in _FIGURE2.items():
        shape = PRESETS[name]
        layers, hidden, heads = shape.layers, shape.hidden, shape.heads
        ours = (
            240 * layers * hidden**2 / _TIB,
            layers * block_activation_bytes(hidden, heads, batch=64, seq=1024) / _TIB,
            checkpoint_bytes(layers, hidden, batch=32, seq=1024) / _TIB,
            16 * hidden**2 / _GIB,
            block_activation_bytes(hidden, heads, batch=4, seq=1024) / _GIB,
        )
        rows.append((f"{12 * layers * hidden**2 / 1e12:.2f}T", *map(_hundredths, ours), " / ".join(printed)))
    return Table(
        "ZeRO-Infinity, figure 2a: memory of very large models",
        ("params", "states TiB", "activations TiB/node", "checkpoints TiB/node", "MSWM GiB", "AWM GiB", "printed in the paper"),
        tuple(rows),
        ("The paper prints 1.95 for the working memory (MSWM) of the first row; its own formula, 16 hd^2, gives 1.56.",),
    )


class _Check(NamedTuple):
    data: str
    gigabytes_s: float
    batch: int
    hidden: int
    says: str


_CHECKS = (
    _Check("params and grads", 70, 1, 0, "70 GB/s gives over 50% at batch 1"),
    _Check("optimizer states", 280, 1, 0, "four times that gives the same"),
    _Check("optimizer states", 1500, 2, 0, "1.5 TB/s gives about 90% at batch 2"),
    _Check("activation checkpoints", 2, 1, 2048, "2 GB/s gives over 50% at hidden 2K"),
    _Check("activation checkpoints", 1, 1, 8192, "1 GB/s is enough above 8K"),
    _Check("activation checkpoints", 3, 1, 8192, "3 GB/s gives over 80% at 8K"),
)


def _infinity_bandwidth() -> Table:
    rows = []
    for data, gigabytes_s, batch, hidden, says in _CHECKS:
        intensity = arithmetic_intensity(data, batch=batch, seq=1024, hidden=hidden)
        share = efficiency(intensity, bytes_s=gigabytes_s * 1e9, flops=70e12)
        rows.append((data, f"{gigabytes_s:g}", str(batch), str(hidden or "-"), f"{intensity:g}", f"{share:.1%}", says))
    return Table(
        "ZeRO-Infinity, section 4: efficiency without overlap, 70 TFLOP/s a device, 1024 tokens",
        ("data", "GB/s", "batch", "hidden", "ops/byte", "efficiency", "the paper says"),
        tuple(rows),
    )


TABLES: Mapping[str, Callable[[], Table]] = MappingProxyType(
    {
        "zero-table1": _zero_table1,
        "zero-table2": _zero_table2,
        "zero-figure1": _zero_figure1,
        "zero-c1-c5": _zero_c1_c5,
        "infinity-figure2": _infinity_figure2,
        "infinity-bandwidth": _infinity_bandwidth,
    }
)
