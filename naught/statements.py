"""Statements: what the papers say of more and more devices, as lines of this planner beside figures of theirs. Pure.

A figure stands here only if a paper gives it, and says how far it was checked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType

from naught.pictures import Figure, Line, Picture, Row, Scales, Spot, Statement, Stretch
from naught.presets import PRESETS
from naught.scaling import PAPER_SAYS, Point, bandwidth, curve, largest_model

__all__ = ["STATEMENTS"]

_READ = "read in the paper"
_TOLD = "by an account of the paper"
_RECALLED = "from memory, not checked"


# --- ZeRO: more than linear -------------------------------------------------------------------------------------------

_SERIAL, _OVERLAPPED = "ours, nothing overlaps", "ours, everything overlaps"
_LINEAR = "linear"


def _zero() -> Statement:
    points = curve(PRESETS["zero-60b"], "stage3", tuple(range(64, 401, 16)))
    first, last = points[0], points[-1]
    total, each = _line(_SERIAL, points, _total), _line(_SERIAL, points, _each)
    devices = (0, 64, 128, 256, 400)
    pictures = (
        Picture(
            "zero-total",
            "60B parameters: all devices together",
            Scales(devices, "PFLOP/s", _in_peta, log_devices=False, log_values=False),
            (total, _linear(total)),
            (Figure(_SERIAL, Spot(400, 15e15), "15 PFLOP/s, mean of 8B to 100B", "left"),),
        ),
        Picture(
            "zero-each",
            "60B parameters: each device",
            Scales(devices, "TFLOP/s", _in_tera, log_devices=False, log_values=False),
            (each, _line(_OVERLAPPED, points, _most, kind="most"), _flat(each)),
            (Figure(_SERIAL, Spot(400, 38e12), "over 38 at 100B", "left", at_least=True),),
        ),
    )
    more, speed = last.ranks / first.ranks, last.total / first.total
    ours = (
        f"{more:.2f} times the devices have {speed:.2f} times the speed, with batches of {last.micro_batch} instead of "
        f"{first.micro_batch}; at stage 3, where the paper had Pos+g and 16-way model parallelism."
    )
    rows = (
        Row("60B from 64 to 400", "faster than linear", f"{speed / more:.2f} times linear", _READ),
        Row("all of 400", "15 PFLOP/s, mean of 8B to 100B", f"{_in_peta(last.total)} PFLOP/s at 60B", _READ),
        Row("each of 400", "over 38 TFLOP/s at 100B", f"{_bounds(last)} at 60B", _READ),
    )
    return Statement("ZeRO: more than linear", PAPER_SAYS["zero-scaling"], ours, pictures, rows)


def _line(name: str, points: Iterable[Point], value: Callable[[Point], float], *, kind: str = "ours") -> Line:
    """Where a model does not fit there is no spot."""
    return Line(name, tuple(Spot(point.ranks, value(point)) for point in points if point.forecast), kind)


def _total(point: Point) -> float:
    return point.total


def _each(point: Point) -> float:
    return point.flops


def _most(point: Point) -> float:
    return point.most_flops


def _linear(line: Line) -> Line:
    """As many times its first value as there are devices."""
    start = line.spots[0]
    return Line(_LINEAR, tuple(Spot(at, start.value * at / start.devices) for at, _ in line.spots), "reference")


def _flat(line: Line) -> Line:
    """Linear growth, seen from one device."""
    return Line(_LINEAR, tuple(Spot(at, line.spots[0].value) for at, _ in line.spots), "reference")


def _in_peta(flops: float) -> str:
    return f"{flops / 1e15:.3g}"


def _in_tera(flops: float) -> str:
    return f"{flops / 1e12:.3g}"


def _bounds(point: Point) -> str:
    return f"{_in_tera(point.flops)} to {_in_tera(point.most_flops)} TFLOP/s"


# --- ZeRO-Offload: nearly linear, and overtaken -----------------------------------------------------------------------

_OFFLOAD, _STAGE2 = "ours, offload", "ours, stage 2"


def _offload() -> Statement:
    ranks = (1, 2, 4, 8, 16, 32, 64, 128)
    far, near = (curve(PRESETS["offload-10b"], name, ranks, samples=512) for name in ("stage2-offload", "stage2"))
    fits = _first(ranks, [point.forecast is not None for point in near])
    ahead = _first(ranks, [close.flops > point.flops for point, close in zip(far, near, strict=True)])
    total, each = (_line(_OFFLOAD, far, value) for value in (_total, _each))
    faster = Stretch(64, 128, "the paper: stage 2 is faster")
    alone, many = far[0], far[-1]
    pictures = (
        Picture(
            "offload-total",
            "10B parameters: all devices together",
            Scales(ranks, "PFLOP/s", _in_peta),
            (total, _line(_STAGE2, near, _total), _linear(total)),
            (
                Figure(_OFFLOAD, Spot(1, 40e12), "40 TFLOP/s", "right"),
                Figure(_OFFLOAD, Spot(128, 128 * 30e12), "over 30 each", "under", at_least=True),
            ),
            faster,
        ),
        Picture(
            "offload-each",
            "10B parameters: each device",
            Scales(ranks, "TFLOP/s", _in_tera, log_values=False),
            (
                each,
                _line(_STAGE2, near, _each),
                _line("ours, offload, everything overlaps", far, _most, kind="most"),
                _flat(each),
            ),
            (
                Figure(_OFFLOAD, Spot(1, 40e12), "40", "right"),
                Figure(_OFFLOAD, Spot(128, 30e12), "over 30", "above", at_least=True),
            ),
            faster,
        ),
    )
    ours = (
        f"stage 2 fits from {fits} devices on and is faster from {ahead} on; each device has {_bounds(alone)} alone and "
        f"{_bounds(many)} among 128, where 512 samples are few. The lower bound is a step in which nothing overlaps."
    )
    rows = (
        Row("one device", "40 TFLOP/s", _bounds(alone), _TOLD),
        Row("each of 128", "over 30 TFLOP/s, nearly linear", _bounds(many), _TOLD),
        Row("stage 2 fits", "from 32 devices on", f"from {fits} devices on", _RECALLED),
        Row("stage 2 is faster", "at 64 to 128 devices", f"from {ahead} devices on", _RECALLED),
    )
    return Statement("ZeRO-Offload: nearly linear, until stage 2 fits", PAPER_SAYS["offload-scaling"], ours, pictures, rows)


def _first(ranks: Sequence[int], holds: Sequence[bool]) -> int:
    return next(count for count, so in zip(ranks, holds, strict=True) if so)


# --- ZeRO-Infinity: size and bandwidth --------------------------------------------------------------------------------

_NODE = 16
_ON_DISK, _ON_HOST, _ON_DEVICE = "ours, all on NVMe", "ours, all in CPU memory", "ours, all on the GPU (stage 3)"
_HOST, _DISK = "ours, CPU memory", "ours, NVMe"


def _infinity() -> Statement:
    sizes, rates = _sizes(), _rates()
    disk, host, device = (_named(sizes, name) for name in (_ON_DISK, _ON_HOST, _ON_DEVICE))
    memory, drives = _named(rates, _HOST), _named(rates, _DISK)
    ours = (
        f"with one sample a device there is room for {_count(disk.at(_NODE))} on one node and {_count(disk.at(512))} on 32, "
        f"and for {_count(host.at(_NODE))} and {_count(host.at(512))} without NVMe; bandwidth grows as nodes do "
        "(that of one node is the paper's)."
    )
    rows = (
        Row("all on NVMe, one node", "1T", f"room for {_count(disk.at(_NODE))}", _TOLD),
        Row("all on NVMe, 32 nodes", "32T", f"room for {_count(disk.at(512))}", _TOLD),
        Row("all in CPU memory, one node", "almost 100B", f"room for {_count(host.at(_NODE))}", _RECALLED),
        Row("stage 3, one node", "20B", f"room for {_count(device.at(_NODE))}", _RECALLED),
        Row("bandwidth of one link to the CPU", "about 12 GB/s", _speed(memory.at(1)), _RECALLED),
        Row("CPU bandwidth, one node", "about 48 GB/s", _speed(memory.at(_NODE)), _RECALLED),
        Row("NVMe bandwidth, one node", "about 25 GB/s", _speed(drives.at(_NODE)), _RECALLED),
        Row("CPU bandwidth, 64 nodes", "over 3 TB/s", _speed(memory.at(1024)), _RECALLED),
        Row("NVMe bandwidth, 64 nodes", "over 1.5 TB/s", _speed(drives.at(1024)), _RECALLED),
    )
    return Statement("ZeRO-Infinity: 32T on 512 GPUs, 1T on one node", PAPER_SAYS["infinity-scaling"], ours, (sizes, rates), rows)


def _sizes() -> Picture:
    """Counted in whole nodes: a part of one has all of its memory and disks."""
    ranks = (16, 32, 64, 128, 256, 512)
    held = {_ON_DISK: "infinity-disk-all", _ON_HOST: "infinity-host", _ON_DEVICE: "stage3"}
    disk, host, device = (
        Line(name, tuple(Spot(count, largest_model(placement, count)) for count in ranks)) for name, placement in held.items()
    )
    figures = (
        Figure(_ON_DISK, Spot(_NODE, 1e12), "1T", "below"),
        Figure(_ON_DISK, Spot(512, 32e12), "32T", "below"),
        Figure(_ON_HOST, Spot(_NODE, 100e9), "almost 100B", "above"),
        Figure(_ON_DEVICE, Spot(_NODE, 20e9), "20B", "right"),
    )
    scales = Scales(ranks, "parameters", _count)
    return Picture("infinity-size", "The largest model", scales, (disk, host, device, _linear(disk)), figures)


def _rates() -> Picture:
    ranks = tuple(2**power for power in range(11))
    memory, drives = (
        Line(name, tuple(Spot(count, getattr(bandwidth(count), tier)) for count in ranks))
        for name, tier in ((_HOST, "host"), (_DISK, "disk"))
    )
    one = Line("one link, as where one rank owns and broadcasts", tuple(Spot(at, memory.at(1)) for at in ranks), "reference")
    figures = (
        Figure(_HOST, Spot(1, 12e9), "about 12 GB/s", "below"),
        Figure(_HOST, Spot(_NODE, 48e9), "about 48 GB/s", "above"),
        Figure(_DISK, Spot(_NODE, 25e9), "about 25 GB/s", "below"),
        Figure(_HOST, Spot(1024, 3e12), "over 3 TB/s", "above", at_least=True),
        Figure(_DISK, Spot(1024, 1.5e12), "over 1.5 TB/s", "under", at_least=True),
    )
    scales = Scales((1, 4, 16, 64, 256, 1024), "bytes a second", _speed)
    lines = (memory, drives, _linear(Line(_HOST, memory.spots[4:])), one)
    return Picture("infinity-bandwidth", "Bandwidth of all nodes together", scales, lines, figures)


def _named(picture: Picture, name: str) -> Line:
    return next(line for line in picture.lines if line.name == name)


def _count(numel: float) -> str:
    return f"{numel / 1e12:.3g}T" if numel >= 1e12 else f"{numel / 1e9:.3g}B"


def _speed(bytes_s: float) -> str:
    return f"{bytes_s / 1e12:.3g} TB/s" if bytes_s >= 1e12 else f"{bytes_s / 1e9:.3g} GB/s"


STATEMENTS: Mapping[str, Callable[[], Statement]] = MappingProxyType(
    {"zero-scaling": _zero, "offload-scaling": _offload, "infinity-scaling": _infinity}
)
