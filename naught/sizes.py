"""Sizes: the bytes of a model's units on one rank, under a placement and a job. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from naught.job import Job
from naught.layout import ALIGN_NUMEL, pad
from naught.placement import Kind, Placement, Tier
from naught.shapes import Run
from naught.steps import UnitBytes

__all__ = ["PlacedRun", "each_resting", "resting_bytes", "resting_of", "tiled", "trained_numel", "unit_bytes"]


class PlacedRun(NamedTuple):
    run: Run
    placement: Placement


def resting_bytes(run: Run, placement: Placement, world: int, job: Job) -> dict[Tier, int]:
    """What a run's states take on each tier between their uses."""
    totals = dict.fromkeys(Tier, 0)
    for _, tier, nbytes in each_resting(run, placement, world, job):
        totals[tier] += nbytes
    return totals


def each_resting(run: Run, placement: Placement, world: int, job: Job) -> Iterator[tuple[Kind, Tier, int]]:
    """What of it rests where. Sums of gradients that rest on the device wait for an update elsewhere on the host."""
    for kind in Kind:
        yield kind, placement.of(kind).tier, resting_of(kind, run, placement, world, job)
    if placement.sums_rest is not placement.grad.tier and not job.update_in_backward:
        yield Kind.GRAD, placement.sums_rest, run.repeat * unit_bytes(run, placement, world, job).grad_shard


def resting_of(kind: Kind, run: Run, placement: Placement, world: int, job: Job) -> int:
    size = unit_bytes(run, placement, world, job)
    if kind is Kind.PARAM and placement.param.tier is Tier.HOST and placement.optim.tier is Tier.HOST:
        # What is trained is made of its masters there each time: the host keeps nothing twice.
        return run.repeat * (pad(run.frozen, world, ALIGN_NUMEL) // world * job.recipe.weight)
    if kind is Kind.GRAD and job.update_in_backward and placement.sums_rest is not Tier.DISK:
        return 0
    if kind is Kind.GRAD and placement.sums_leave and not placement.grad.split and job.accumulation == 1:
        return 0  # nothing is added to whole gradients: each unit's leave their flat as they are reduced
    whole, shard = {
        Kind.PARAM: (size.weights, size.weight_shard),
        Kind.GRAD: (size.grads, size.grad_shard),
        Kind.OPTIM: (size.state_shard, size.state_shard),
    }[kind]
    return run.repeat * (shard if placement.of(kind).split else whole)


def tiled(run: Run, tiles: int) -> Run:
    if run.outer:  # in use throughout: its tiles would be as well
        return run
    frozen, trained = -(-run.frozen // tiles), -(-(run.numel - run.frozen) // tiles)
    sums = tuple(-(-numel // tiles) for numel in run.sums)
    return run._replace(numel=frozen + trained, repeat=run.repeat * tiles, frozen=frozen, sums=sums)


def unit_bytes(run: Run, placement: Placement, world: int, job: Job) -> UnitBytes:
    """A unit's trained and frozen parameters are two flats; the frozen one has neither gradients nor states."""
    trained = trained_numel(run, world)
    weights = trained + pad(run.frozen, world, ALIGN_NUMEL)
    return UnitBytes(
        weights=weights * job.recipe.weight,
        weight_shard=weights // world * job.recipe.weight,
        grads=trained * (job.recipe.grad if placement.grad.split else job.kept_grad),
        grad_shard=trained // world * (job.kept_host_grad if placement.sums_rest is Tier.HOST else job.kept_grad),
        state_shard=int(trained // (world if placement.optim.split else 1) * _state(placement, job)),
        trained=trained > 0,
    )


_MASTER = 4


def _state(placement: Placement, job: Job) -> float:
    """Bytes of optimizer state for a parameter; an update off the device needs a whole master there, also of 32-bit weights."""
    recipe = job.recipe
    if placement.optim.tier is Tier.HOST:
        return recipe.moments + _MASTER
    if recipe.master == 2 and not (placement.param.tier is placement.optim.tier is Tier.DEVICE):
        return recipe.moments + _MASTER  # weights and rests are a master only side by side
    sunk = recipe.master == 0 and Tier.DISK in (placement.optim.tier, placement.param.tier)  # nothing is updated there
    return recipe.state + (_MASTER if sunk else 0)


def trained_numel(run: Run, world: int) -> int:
    """Elements of a unit's trained flat, its padding included."""
    return pad(run.numel - run.frozen, world, ALIGN_NUMEL)
