"""Estimate: the bytes, traffic and time of one placement of a model on a machine, before anything runs. Pure.

Model states are counted exactly. The working set comes from walking the plan that would run. Activations are the
papers' formulas for transformers (`transformer_activations`) or were traced for any other module (`naught.trace`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import lru_cache
from itertools import pairwise
from types import MappingProxyType
from typing import NamedTuple

from naught.errors import UsageError
from naught.formulas import Recipe, block_activation_bytes, checkpoint_bytes, recipe
from naught.layout import ALIGN_NUMEL, pad
from naught.machine import Machine
from naught.placement import Placement, Tier
from naught.plan import Budgets, Event, Moment, UnitBytes, compile_plan, simulate
from naught.shapes import Run, Transformer

__all__ = [
    "ActivationBytes",
    "Category",
    "Checkpointing",
    "Forecast",
    "Job",
    "PlacedRun",
    "Times",
    "forecast",
    "transformer_activations",
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

    def __post_init__(self) -> None:
        if min(self.micro_batch, self.seq, self.accumulation) < 1:
            raise UsageError("micro-batch, sequence length and accumulation are at least 1")

    @property
    def tokens(self) -> int:
        return self.micro_batch * self.seq * self.accumulation

    @property
    def kept_grad(self) -> int:
        """Bytes of a gradient that waits for the update: 32-bit when micro-batches are summed."""
        return 4 if self.accumulation > 1 else self.recipe.grad


class ActivationBytes(NamedTuple):
    """Activations of one micro-batch: all of them, those alive while one block is recomputed, and the checkpoints."""

    full: int
    working: int
    checkpoints: int
    source: str


def transformer_activations(shape: Transformer, job: Job) -> ActivationBytes:
    """ZeRO-Infinity's formulas, plus the logits in their own and in 32-bit precision, which the paper leaves out."""
    wide = job.recipe.weight // 2
    tokens = job.micro_batch * job.seq
    block = wide * block_activation_bytes(
        shape.hidden, shape.heads, batch=job.micro_batch, seq=job.seq, fused_attention=job.fused_attention
    )
    logits = tokens * shape.vocab * (job.recipe.weight + 4)
    checkpoints = wide * checkpoint_bytes(shape.layers, shape.hidden, batch=job.micro_batch, seq=job.seq)
    scores = "without" if job.fused_attention else "with"
    source = f"ZeRO-Infinity's formula ({scores} attention scores) and the logits"
    return ActivationBytes(shape.layers * block + logits, block + logits, checkpoints, source)


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
        size = _unit_bytes(run, placement, machine.ranks, job)
        whole_grads = size.grads if not placement.grad.split else size.grad_shard
        weights = size.weight_shard if placement.param.split else size.weights
        memory[placement.param.tier][Category.PARAMETERS] += weights * run.repeat
        memory[placement.grad.tier][Category.GRADIENTS] += whole_grads * run.repeat
        memory[placement.optim.tier][Category.OPTIMIZER] += size.state_shard * run.repeat
    work = _working_set(tuple(_representatives(placed)), machine.ranks, job)
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
        times=_times(placed, traffic, machine, job),
        checkpointing=job.checkpointing,
        tiles=tiles,
    )


def _tiled(run: Run, tiles: int) -> Run:
    return run._replace(numel=-(-run.numel // tiles), repeat=run.repeat * tiles, frozen=run.frozen // tiles)


def _unit_bytes(run: Run, placement: Placement, world: int, job: Job) -> UnitBytes:
    """A unit's trained and frozen parameters are two flats; the frozen one has neither gradients nor states."""
    trained = pad(run.numel - run.frozen, world, ALIGN_NUMEL)
    weights = trained + pad(run.frozen, world, ALIGN_NUMEL)
    return UnitBytes(
        weights=weights * job.recipe.weight,
        weight_shard=weights // world * job.recipe.weight,
        grads=trained * (job.recipe.grad if placement.grad.split else job.kept_grad),
        grad_shard=trained // world * job.kept_grad,
        state_shard=trained // (world if placement.optim.split else 1) * job.recipe.state,
    )


def _representatives(placed: Sequence[PlacedRun]) -> list[PlacedRun]:
    """The same model with long runs cut to three units: the working set only depends on neighbours."""
    return [PlacedRun(run._replace(repeat=min(run.repeat, 3)), placement) for run, placement in placed]


class _Work(NamedTuple):
    gathered: int
    device_buffers: int
    host_buffers: int


@lru_cache(maxsize=4096)
def _working_set(placed: tuple[PlacedRun, ...], world: int, job: Job) -> _Work:
    """What the plan of one step holds beyond the states at rest, with one unit fetched ahead on every hop."""
    placements: dict[str, Placement] = {}
    sizes: dict[str, UnitBytes] = {}
    outer: list[str] = []
    for at, (run, placement) in enumerate(placed):
        size = _unit_bytes(run, placement, world, job)
        # Gradients that rest where they are made are counted at rest, not as a buffer of the plan.
        resting = placement.grad.tier is Tier.DEVICE
        size = replace(
            size,
            grads=size.grads if placement.grad.split else 0,
            grad_shard=0 if resting else size.grad_shard,
        )
        for unit in range(run.repeat):
            placements[f"{at}.{unit}"] = placement
            sizes[f"{at}.{unit}"] = size
            outer += [f"{at}.{unit}"] if run.outer else []
    inner = [unit for unit in sizes if unit not in outer]
    budgets = _one_ahead([sizes[unit] for unit in outer], [sizes[unit] for unit in inner])
    plan = compile_plan(_one_pass(outer, inner), placements, sizes, budgets=budgets)
    peaks = simulate(plan.steps, placements, sizes)
    staged = [peaks.buffers[name] for name in ("read weights", "read states", "read gradients")]
    stored = peaks.buffers["stored gradients"] if any(p.grad.tier is Tier.DISK for p in placements.values()) else 0
    staging = peaks.buffers["loaded weights"] + peaks.buffers["reduce scratch"]
    return _Work(max(0, peaks.tiers[Tier.DEVICE] - staging), staging, sum(staged) + stored)


def _one_pass(outer: Sequence[str], inner: Sequence[str]) -> list[Event]:
    """Forward and backward through the inner units, with the outer ones in use throughout."""

    def around(opens: Moment, closes: Moment, units: Sequence[str]) -> list[Event]:
        within = [Event(moment, unit) for unit in units for moment in (opens, closes)]
        return [*(Event(opens, unit) for unit in outer), *within, *(Event(closes, unit) for unit in outer)]

    return around(Moment.ENTER, Moment.EXIT, inner) + around(Moment.GRAD, Moment.DONE, inner[::-1])


def _one_ahead(outer: Sequence[UnitBytes], inner: Sequence[UnitBytes]) -> Budgets:
    """Room for the outer units, the one in use and the next."""
    most = {
        field: sum(getattr(size, field) for size in outer)
        + max([getattr(a, field) + getattr(b, field) for a, b in pairwise(inner)], default=0)
        for field in ("weights", "weight_shard", "state_shard")
    }
    return Budgets(most["weights"], most["weight_shard"], max(most["state_shard"], most["weight_shard"]))


class _Traffic(NamedTuple):
    volume: dict[str, int]
    link: int
    disk: int


def _traffic(placed: Sequence[PlacedRun], activations: ActivationBytes, world: int, job: Job) -> _Traffic:
    """Bytes of one step and rank: through collectives, between host and device, to and from the disk."""
    gathered = reduced = link = disk = 0
    passes, wire = job.accumulation, job.recipe.grad
    last = len(placed) - 1
    for at, (run, placement) in enumerate(placed):
        size = _unit_bytes(run, placement, world, job)
        trained = pad(run.numel - run.frozen, world, ALIGN_NUMEL)
        reduces = (passes if placement.grad.split else 1) * run.repeat
        reduced += trained * wire * reduces
        if placement.param.split:
            # The last unit of the forward is the first of the backward, as an outer one is: the plan keeps it.
            kept = passes * (1 if at == last else run.repeat * run.outer)
            gathers = 2 * passes * run.repeat - kept
            gathered += size.weights * gathers
            link += size.weight_shard * gathers * (placement.param.tier is not Tier.DEVICE)
            disk += size.weight_shard * (gathers + run.repeat) * (placement.param.tier is Tier.DISK)
        else:
            # Whole weights are stale after an update elsewhere; after one on every rank it is the gradients that travel.
            gathered += trained * (job.recipe.weight if placement.optim.split else wire) * run.repeat
        if placement.optim.tier is not Tier.DEVICE:
            link += trained // world * wire * reduces
            link += trained // world * job.recipe.weight * run.repeat * (placement.param.tier is Tier.DEVICE)
        if placement.grad.tier is Tier.DISK:
            disk += size.grad_shard * (reduces + run.repeat)
        if placement.optim.tier is Tier.DISK:
            disk += 2 * size.state_shard * run.repeat
    if job.checkpointing is Checkpointing.HOST:
        link += 2 * activations.checkpoints * passes
    volume = {"all-gather": gathered * (world - 1) // world, "reduce-scatter": reduced * (world - 1) // world}
    return _Traffic(volume, link, disk)


_DEVICE_UPDATE_NUMEL_S = 50e9  # a fused AdamW on device memory; never what decides


def _times(placed: Sequence[PlacedRun], traffic: _Traffic, machine: Machine, job: Job) -> Times:
    numel = sum(run.numel * run.repeat for run, _ in placed)
    passes = 3 if job.checkpointing is Checkpointing.NONE else 4  # forward, backward twice, and the recompute
    on_host = on_device = 0.0
    for run, placement in placed:
        share = (run.numel - run.frozen) * run.repeat / (machine.ranks if placement.optim.split else 1)
        if placement.optim.tier is Tier.DEVICE:
            on_device += share
        else:
            on_host += share
    return Times(
        compute=2 * passes * job.tokens * numel / machine.gpu.flops,
        network=sum(traffic.volume.values()) / machine.network_bytes_s,
        link=traffic.link / machine.link_bytes_s,
        update=on_device / _DEVICE_UPDATE_NUMEL_S + on_host * machine.local_ranks / machine.update_numel_s,
        disk=traffic.disk * machine.local_ranks / machine.disk_bytes_s,
    )
