"""Estimate: the bytes, traffic and time of one placement of a model on a machine, before anything runs. Pure.

Model states are counted exactly. The working set comes from walking the plan that would run. Activations are the
papers' formulas for transformers or were traced for any other module (`naught.trace`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from types import MappingProxyType

from naught.job import ActivationBytes, Checkpointing, Job
from naught.layout import ALIGN_NUMEL, pad
from naught.machine import Machine
from naught.placement import Kind, Tier
from naught.rooms import ROOMS_ON_THE_WAY, room_bytes, shared_rooms, staging_bytes
from naught.sizes import PlacedRun, each_resting, tiled
from naught.traffic import Times, times_of, traffic_of
from naught.working_set import working_set

__all__ = ["Category", "Forecast", "forecast", "forecast_with_most_staging"]


class Category(StrEnum):
    PARAMETERS = "parameters"
    GRADIENTS = "gradients"
    OPTIMIZER = "optimizer"
    GATHERED = "gathered"
    ACTIVATIONS = "activations"
    CHECKPOINTS = "checkpoints"
    BUFFERS = "buffers"


_STATES = {Kind.PARAM: Category.PARAMETERS, Kind.GRAD: Category.GRADIENTS, Kind.OPTIM: Category.OPTIMIZER}


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
    berths: int  # of staging, at most; none where nothing travels
    tiles: int = 1
    never_together: int = 0  # of the device's, for gradients come as activations go

    def total(self, tier: Tier) -> int:
        """The most that is held at once."""
        return sum(self.memory[tier].values()) - (self.never_together if tier is Tier.DEVICE else 0)

    @property
    def lacks(self) -> dict[Tier, int]:
        """The bytes by which a tier is too small, for each one that is."""
        missing = {tier: self.total(tier) - self.capacity[tier] for tier in Tier}
        return {tier: nbytes for tier, nbytes in missing.items() if nbytes > 0}

    @property
    def fits(self) -> bool:
        return not self.lacks

    @property
    def efficiency(self) -> float:
        """ZeRO-Infinity's bound: the computing share of a step in which nothing overlaps."""
        return self.times.compute / self.times.serial


def forecast(
    name: str, placed: Sequence[PlacedRun], activations: ActivationBytes, machine: Machine, job: Job, *, tiles: int = 1
) -> Forecast:
    """The forecast of one placement, or of a mixture in which runs of units have placements of their own."""
    placed = [PlacedRun(tiled(run, tiles), placement) for run, placement in placed]
    memory = {tier: dict.fromkeys(Category, 0) for tier in Tier}
    for run, placement in placed:
        for kind, tier, nbytes in each_resting(run, placement, machine.ranks, job):
            memory[tier][_STATES[kind]] += nbytes
    work = working_set(placed, machine.ranks, job)
    memory[Tier.DEVICE][Category.GATHERED] += work.gathered
    memory[Tier.DEVICE][Category.BUFFERS] += work.device_buffers
    memory[Tier.HOST][Category.BUFFERS] += work.host_buffers
    berths = machine.berths if _travels(placed) else 0
    if not machine.unified:
        memory[Tier.DEVICE][Category.BUFFERS] += staging_bytes(_largest_part(placed, machine), berths)
    memory[Tier.HOST][Category.BUFFERS] += _rooms(placed, machine, job)
    if job.update_in_backward:
        memory[Tier.HOST][Category.BUFFERS] += _sum_rooms(placed, machine)
    kept = job.checkpointing is Checkpointing.NONE
    memory[Tier.DEVICE][Category.ACTIVATIONS] += activations.gradient + (activations.full if kept else activations.working)
    if not kept:
        memory[job.checkpointing.tier][Category.CHECKPOINTS] += activations.checkpoints
        if job.checkpointing.tier is Tier.DISK:
            memory[Tier.HOST][Category.BUFFERS] += min(activations.checkpoints, ROOMS_ON_THE_WAY * activations.checkpoint)
    if machine.unified:
        for category in Category:
            memory[Tier.DEVICE][category] += memory[Tier.HOST][category]
            memory[Tier.HOST][category] = 0
    cells = memory[Tier.DEVICE]
    going = cells[Category.ACTIVATIONS] + cells[Category.CHECKPOINTS]
    resting = cells[Category.GRADIENTS] if job.accumulation == 1 else 0  # else they are there from the first micro-batch on
    # Of three moments the one that holds most: a loss and no gradient yet; no loss and the first gradients; all gradients and the
    # first block.
    coming, first = resting + work.flats, working_set(placed, machine.ranks, replace(job, update_in_backward=True)).flats
    never = min(coming, max(0, coming - first) + min(activations.loss, going), max(0, going - activations.block))
    traffic = traffic_of(placed, activations, machine, job)
    return Forecast(
        name=name,
        memory=MappingProxyType({tier: MappingProxyType(cells) for tier, cells in memory.items()}),
        capacity=MappingProxyType({tier: machine.capacity(tier) for tier in Tier}),
        volume=MappingProxyType(traffic.volume),
        link_bytes=traffic.link,
        disk_bytes=traffic.disk,
        times=times_of(placed, traffic, activations.forward_flops, machine, job),
        checkpointing=job.checkpointing,
        berths=berths,
        tiles=tiles,
        never_together=never,
    )


def forecast_with_most_staging(
    name: str, placed: Sequence[PlacedRun], activations: ActivationBytes, machine: Machine, job: Job, *, tiles: int = 1
) -> Forecast:
    """The forecast with the most staging beside which a placement fits; if it fits beside none, with the least."""
    for lean in machine.with_less_staging() if _travels(placed) else [machine]:
        found = forecast(name, placed, activations, lean, job, tiles=tiles)
        if found.fits:
            break
    return found


def _travels(placed: Sequence[PlacedRun]) -> bool:
    return any(placement.travels for _, placement in placed)


def _largest_part(placed: Sequence[PlacedRun], machine: Machine) -> int:
    """Of a rank, in elements."""
    return max((pad(run.numel, machine.ranks, ALIGN_NUMEL) for run, _ in placed), default=0) // machine.ranks


def _sum_rooms(placed: Sequence[PlacedRun], machine: Machine) -> int:
    """On the host, for sums that wait only until their own unit is updated."""
    waiting = [run.flats_of_sums for run, placement in placed if placement.sums_rest is Tier.HOST]
    return shared_rooms(
        [pad(numel, machine.ranks, ALIGN_NUMEL) // machine.ranks for numel in numels] for numels in waiting
    ).nbytes


def _rooms(placed: Sequence[PlacedRun], machine: Machine, job: Job) -> int:
    """On the host, for tiles on their way between disk and update: masters, moments, gradients, and new weights."""
    updated = any(placement.optim.tier is Tier.DISK for _, placement in placed)
    sunk = any(placement.param.tier is Tier.DISK for _, placement in placed)
    moments = round(job.recipe.moments / 4)
    summed = any(placement.grad.tier is Tier.DISK for _, placement in placed)
    kinds = (1 + moments + sunk + summed) if updated else int(sunk)
    others = 1 + (updated and sunk)  # a load brings masters and weights of a tile to where they rest
    return room_bytes(_largest_part(placed, machine), kinds, machine.disk_threads, machine.disk_request_bytes, others)
