"""Estimate: the bytes, traffic and time of one placement of a model on a machine, before anything runs. Pure.

Model states are counted exactly. The working set comes from walking the plan that would run. Activations are the
papers' formulas for transformers (`transformer_activations`) or were traced for any other module (`naught.trace`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from itertools import pairwise
from types import MappingProxyType
from typing import NamedTuple

from naught.errors import UsageError
from naught.formulas import Recipe, block_activation_bytes, checkpoint_bytes, full_activation_bytes, recipe
from naught.holding import Buffer, simulate
from naught.layout import ALIGN_NUMEL, pad
from naught.machine import Machine
from naught.moving import Budgets
from naught.placement import Kind, Placement, Tier
from naught.plan import compile_plan
from naught.shapes import Run, Transformer
from naught.steps import Event, Moment, Pass, UnitBytes

__all__ = [
    "ActivationBytes",
    "Category",
    "Checkpointing",
    "Forecast",
    "Job",
    "PlacedRun",
    "Times",
    "forecast",
    "resting_bytes",
    "transformer_activations",
    "whole_working_set",
]


_MIXED_ADAM = recipe()


class Checkpointing(StrEnum):
    """What is kept of a block's activations between forward and backward."""

    NONE = "none"  # everything
    BLOCK = "block"  # its input, on the device
    HOST = "host"  # its input, on the host


@dataclass(frozen=True)
class Job:
    """One step of training on one rank."""

    micro_batch: int = 1
    seq: int = 1024
    accumulation: int = 1
    recipe: Recipe = _MIXED_ADAM
    checkpointing: Checkpointing = Checkpointing.BLOCK
    fused_attention: bool = True
    summed_grad: int = 4

    def __post_init__(self) -> None:
        if min(self.micro_batch, self.seq, self.accumulation) < 1:
            raise UsageError("micro-batch, sequence length and accumulation are at least 1")

    @property
    def kept_grad(self) -> int:
        """Bytes of a gradient that waits for the update: 32-bit when micro-batches are summed, unless told otherwise."""
        return self.summed_grad if self.accumulation > 1 else self.recipe.grad


class ActivationBytes(NamedTuple):
    """Activations of one micro-batch: all of them, those alive while one block is recomputed, and the checkpoints.

    `forward_flops` is what the forward computes; None is two for each parameter and token.
    """

    full: int
    working: int
    checkpoints: int
    source: str
    forward_flops: int | None = None


def transformer_activations(shape: Transformer, job: Job) -> ActivationBytes:
    """The papers' formulas, plus the logits in their own and in 32-bit precision, which the papers leave out.

    Without checkpoints the larger of the two papers' formulas counts; a real block keeps more than either.
    """
    wide = job.recipe.weight // 2
    tokens = job.micro_batch * job.seq
    block = wide * block_activation_bytes(
        shape.hidden, shape.heads, batch=job.micro_batch, seq=job.seq, fused_attention=job.fused_attention
    )
    logits = tokens * shape.vocab * (job.recipe.weight + 4)
    checkpoints = wide * checkpoint_bytes(shape.layers, shape.hidden, batch=job.micro_batch, seq=job.seq)
    everything = max(
        shape.layers * block,
        wide * full_activation_bytes(shape.layers, shape.hidden, batch=job.micro_batch, seq=job.seq),
    )
    scores = "without" if job.fused_attention else "with"
    source = f"ZeRO-Infinity's formula ({scores} attention scores) and the logits"
    if job.checkpointing is Checkpointing.NONE:
        source = "the papers' formulas and the logits: a lower bound, as gated layers keep up to twice as much"
    return ActivationBytes(everything + logits, block + logits, checkpoints, source)


class Category(StrEnum):
    PARAMETERS = "parameters"
    GRADIENTS = "gradients"
    OPTIMIZER = "optimizer"
    GATHERED = "gathered"
    ACTIVATIONS = "activations"
    CHECKPOINTS = "checkpoints"
    BUFFERS = "buffers"


class PlacedRun(NamedTuple):
    run: Run
    placement: Placement


@dataclass(frozen=True)
class Times:
    """Seconds that each resource is busy in one step."""

    compute: float
    network: float
    link: float
    update: float
    disk: float

    @property
    def serial(self) -> float:
        """A step in which nothing overlaps: the papers' bound from above."""
        return self.compute + self.network + self.link + self.update + self.disk

    @property
    def overlapped(self) -> float:
        """A step in which everything overlaps: no schedule is faster."""
        return max(self.compute, self.network, self.link, self.update, self.disk)


@dataclass(frozen=True)
class Forecast:
    """What one rank will hold and move. `tiles` is how many pieces a block is split into so that it fits."""

    name: str
    memory: Mapping[Tier, Mapping[Category, int]]
    capacity: Mapping[Tier, int]
    volume: Mapping[str, int]
    link_bytes: int
    disk_bytes: int
    times: Times
    checkpointing: Checkpointing
    tiles: int = 1

    def total(self, tier: Tier) -> int:
        return sum(self.memory[tier].values())

    @property
    def fits(self) -> bool:
        return all(self.total(tier) <= self.capacity[tier] for tier in Tier)

    @property
    def efficiency(self) -> float:
        """ZeRO-Infinity's bound: the computing share of a step in which nothing overlaps."""
        return self.times.compute / self.times.serial


def forecast(
    name: str, placed: Sequence[PlacedRun], activations: ActivationBytes, machine: Machine, job: Job, *, tiles: int = 1
) -> Forecast:
    """The forecast of one placement, or of a mixture in which runs of units have placements of their own."""
    placed = [PlacedRun(_tiled(run, tiles), placement) for run, placement in placed]
    memory = {tier: dict.fromkeys(Category, 0) for tier in Tier}
    for run, placement in placed:
        for kind, category in _STATES.items():
            memory[placement.of(kind).tier][category] += _resting(kind, run, placement, machine.ranks, job)
    work = _working_set(placed, machine.ranks, job)
    memory[Tier.DEVICE][Category.GATHERED] += work.gathered
    memory[Tier.DEVICE][Category.BUFFERS] += work.device_buffers
    memory[Tier.HOST][Category.BUFFERS] += work.host_buffers
    kept = job.checkpointing is Checkpointing.NONE
    memory[Tier.DEVICE][Category.ACTIVATIONS] += activations.full if kept else activations.working
    if not kept:
        tier = Tier.HOST if job.checkpointing is Checkpointing.HOST else Tier.DEVICE
        memory[tier][Category.CHECKPOINTS] += activations.checkpoints
    if machine.unified:
        for category in Category:
            memory[Tier.DEVICE][category] += memory[Tier.HOST][category]
            memory[Tier.HOST][category] = 0
    traffic = _traffic(placed, activations, machine.ranks, job)
    return Forecast(
        name=name,
        memory=MappingProxyType({tier: MappingProxyType(cells) for tier, cells in memory.items()}),
        capacity=MappingProxyType({tier: machine.capacity(tier) for tier in Tier}),
        volume=MappingProxyType(traffic.volume),
        link_bytes=traffic.link,
        disk_bytes=traffic.disk,
        times=_times(placed, traffic, activations.forward_flops, machine, job),
        checkpointing=job.checkpointing,
        tiles=tiles,
    )


_STATES = {Kind.PARAM: Category.PARAMETERS, Kind.GRAD: Category.GRADIENTS, Kind.OPTIM: Category.OPTIMIZER}


def resting_bytes(run: Run, placement: Placement, world: int, job: Job) -> dict[Tier, int]:
    """What a run's states take on each tier between their uses."""
    totals = dict.fromkeys(Tier, 0)
    for kind in Kind:
        totals[placement.of(kind).tier] += _resting(kind, run, placement, world, job)
    return totals


def _resting(kind: Kind, run: Run, placement: Placement, world: int, job: Job) -> int:
    size = _unit_bytes(run, placement, world, job)
    whole, shard = {
        Kind.PARAM: (size.weights, size.weight_shard),
        Kind.GRAD: (size.grads, size.grad_shard),
        Kind.OPTIM: (size.state_shard, size.state_shard),
    }[kind]
    return run.repeat * (shard if placement.of(kind).split else whole)


def _tiled(run: Run, tiles: int) -> Run:
    if run.outer:  # in use throughout: its tiles would be as well
        return run
    frozen, trained = -(-run.frozen // tiles), -(-(run.numel - run.frozen) // tiles)
    return run._replace(numel=frozen + trained, repeat=run.repeat * tiles, frozen=frozen)


def _unit_bytes(run: Run, placement: Placement, world: int, job: Job) -> UnitBytes:
    """A unit's trained and frozen parameters are two flats; the frozen one has neither gradients nor states."""
    trained = pad(run.numel - run.frozen, world, ALIGN_NUMEL)
    weights = trained + pad(run.frozen, world, ALIGN_NUMEL)
    return UnitBytes(
        weights=weights * job.recipe.weight,
        weight_shard=weights // world * job.recipe.weight,
        grads=trained * (job.recipe.grad if placement.grad.split else job.kept_grad),
        grad_shard=trained // world * job.kept_grad,
        state_shard=trained // (world if placement.optim.split else 1) * _state(placement, job.recipe),
        trained=trained > 0,
    )


def _state(placement: Placement, recipe: Recipe) -> int:
    """Bytes of optimizer state for a parameter; an update off the device needs a master there, also of 32-bit weights."""
    needs_copy = recipe.master == 0 and placement.optim.tier is not Tier.DEVICE and placement.param.tier is Tier.DEVICE
    return recipe.state + (recipe.weight if needs_copy else 0)


class _Work(NamedTuple):
    gathered: int
    device_buffers: int
    host_buffers: int


def _working_set(placed: Sequence[PlacedRun], world: int, job: Job) -> _Work:
    """The same as for whole rows, of which only as many units are looked at as fetching ahead can reach."""
    largest = max(run.numel for run, _ in placed)

    def reach(run: Run) -> int:
        # Budgets hold two units of the largest size; before and behind them lies one unit more.
        return run.repeat if run.outer else min(run.repeat, 3 + 2 * largest // max(1, run.numel))

    return whole_working_set(tuple(PlacedRun(run._replace(repeat=reach(run)), place) for run, place in placed), world, job)


@lru_cache(maxsize=4096)
def whole_working_set(placed: tuple[PlacedRun, ...], world: int, job: Job) -> _Work:
    """What the plan of one step holds beyond the states at rest, with one unit fetched ahead on every hop."""
    placements: dict[str, Placement] = {}
    sizes: dict[str, UnitBytes] = {}
    outer: list[str] = []
    for at, (run, placement) in enumerate(placed):
        size = _unit_bytes(run, placement, world, job)
        for unit in range(run.repeat):
            placements[f"{at}.{unit}"] = placement
            sizes[f"{at}.{unit}"] = size
            outer += [f"{at}.{unit}"] if run.outer else []
    inner = [unit for unit in sizes if unit not in outer]
    budgets = _one_ahead([sizes[unit] for unit in outer], [sizes[unit] for unit in inner])
    plan = compile_plan(_one_pass(outer, inner), placements, sizes, budgets=budgets, which=Pass())
    peaks = simulate(plan.steps, placements, sizes)
    staging = peaks.buffers[Buffer.LOADED_WEIGHTS] + peaks.buffers[Buffer.LOADED_GRADS] + peaks.buffers[Buffer.SCRATCH]
    return _Work(max(0, peaks.passing[Tier.DEVICE] - staging), staging, peaks.passing[Tier.HOST])


def _one_pass(outer: Sequence[str], inner: Sequence[str]) -> list[Event]:
    """Forward and backward through the inner units, with the outer ones in use throughout."""

    def around(opens: Moment, closes: Moment, units: Sequence[str]) -> list[Event]:
        within = [Event(moment, unit) for unit in units for moment in (opens, closes)]
        return [*(Event(opens, unit) for unit in outer), *within, *(Event(closes, unit) for unit in outer)]

    return around(Moment.ENTER, Moment.EXIT, inner) + around(Moment.GRAD, Moment.DONE, inner[::-1])


def _one_ahead(outer: Sequence[UnitBytes], inner: Sequence[UnitBytes]) -> Budgets:
    """Room for the outer units, the one in use and the next."""

    def pair(nbytes: Callable[[UnitBytes], int]) -> int:
        return max((nbytes(a) + nbytes(b) for a, b in pairwise(inner)), default=0)

    weights = pair(lambda size: size.weights)
    return Budgets(
        ahead_bytes=weights,
        live_bytes=weights + sum(size.weights for size in outer),
        load_bytes=pair(lambda size: size.weight_shard),
        read_weight_bytes=pair(lambda size: size.weight_shard),
        read_state_bytes=pair(lambda size: size.state_shard),
        overlap_reduce=True,
    )


class _Traffic(NamedTuple):
    volume: dict[str, int]
    link: int
    disk: int


def _traffic(placed: Sequence[PlacedRun], activations: ActivationBytes, world: int, job: Job) -> _Traffic:
    """Bytes of one step and rank: through collectives, between host and device, to and from the disk."""
    gathered = reduced = link = disk = 0
    passes, wire = job.accumulation, job.recipe.grad
    last = max((at for at, (run, _) in enumerate(placed) if not run.outer), default=-1)
    for at, (run, placement) in enumerate(placed):
        size = _unit_bytes(run, placement, world, job)
        trained = pad(run.numel - run.frozen, world, ALIGN_NUMEL)
        reduces = (passes if placement.grad.split else 1) * run.repeat
        reduced += trained * wire * reduces
        if placement.param.split:
            # The last unit of the forward is the first of the backward, as an outer one is: the plan keeps it.
            kept = passes * (run.repeat if run.outer else int(at == last))
            gathers = 2 * passes * run.repeat - kept
            gathered += size.weights * gathers
            link += size.weight_shard * gathers * (placement.param.tier is not Tier.DEVICE)
            disk += size.weight_shard * gathers * (placement.param.tier is Tier.DISK)
            disk += trained // world * job.recipe.weight * run.repeat * (placement.param.tier is Tier.DISK)
        else:
            # Whole weights are stale after an update elsewhere; after one on every rank it is the gradients that travel.
            gathered += trained * (job.recipe.weight if placement.optim.split else wire) * run.repeat
        on_device = placement.optim.tier is Tier.DEVICE
        if placement.grad.tier is not Tier.DEVICE:
            link += trained // world * wire * reduces
        if on_device != (placement.grad.tier is Tier.DEVICE):
            link += trained // world * wire * run.repeat
        if on_device != (placement.param.tier is Tier.DEVICE):
            link += trained // world * job.recipe.weight * run.repeat
        if placement.grad.tier is Tier.DISK:
            disk += 2 * size.grad_shard * reduces  # each micro-batch but the first is added to what is there
        if placement.optim.tier is Tier.DISK:
            disk += 2 * size.state_shard * run.repeat
    if job.checkpointing is Checkpointing.HOST:
        link += 2 * activations.checkpoints * passes
    volume = {"all-gather": gathered * (world - 1) // world, "reduce-scatter": reduced * (world - 1) // world}
    return _Traffic(volume, link, disk)


_DEVICE_UPDATE_NUMEL_S = 50e9  # a fused AdamW on device memory; never what decides


def _times(placed: Sequence[PlacedRun], traffic: _Traffic, forward_flops: int | None, machine: Machine, job: Job) -> Times:
    if forward_flops is None:
        forward_flops = 2 * job.micro_batch * job.seq * sum(run.numel * run.repeat for run, _ in placed)
    forwards = 3 if job.checkpointing is Checkpointing.NONE else 4  # a backward is two forwards; and the recompute
    on_host = on_device = 0.0
    for run, placement in placed:
        share = (run.numel - run.frozen) * run.repeat / (machine.ranks if placement.optim.split else 1)
        if placement.optim.tier is Tier.DEVICE:
            on_device += share
        else:
            on_host += share
    return Times(
        compute=forwards * forward_flops * job.accumulation / machine.gpu.flops,
        network=sum(traffic.volume.values()) / machine.collective_bytes_s,
        link=traffic.link / machine.link_bytes_s,
        update=on_device / _DEVICE_UPDATE_NUMEL_S + on_host * machine.local_ranks / machine.update_numel_s,
        disk=traffic.disk * machine.local_ranks / machine.disk_bytes_s,
    )
