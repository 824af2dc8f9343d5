"""Advise: which placements of a model fit a machine, which is fastest, and how large a model each could hold. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from naught.estimate import (
    ActivationBytes,
    Category,
    Checkpointing,
    Forecast,
    Job,
    PlacedRun,
    forecast,
    transformer_activations,
)
from naught.layout import ALIGN_NUMEL
from naught.machine import Machine
from naught.placement import PLACEMENTS, Placement, Tier, place_stage
from naught.shapes import Model, Run, gpt_of_count

__all__ = ["POOLED", "Advice", "advise", "best_forecast", "largest_numel", "pool"]

POOLED = "pooled"
_MOST_TILES = 4096
_LARGEST_NUMEL = 10**16
_PRECISION = 1.005

# Measures activations under a job; a traced module ignores the job but for its checkpointing.
Activations = Callable[[Job], ActivationBytes]


@dataclass(frozen=True)
class Advice:
    """Every placement's forecast, the one to take, and the largest model that each placement could hold."""

    forecasts: tuple[Forecast, ...]
    pooled: tuple[PlacedRun, ...]
    largest: dict[str, int]

    @property
    def best(self) -> Forecast | None:
        """The fastest that fits; of equals the one that leaves most of the device free."""
        fitting = [row for row in self.forecasts if row.fits]
        return min(fitting, key=lambda row: (float(f"{row.times.serial:.3g}"), row.total(Tier.DEVICE)), default=None)


def advise(model: Model, activations: Activations | None, machine: Machine, job: Job, *, automatic: bool = True) -> Advice:
    """Forecast every named placement and the pool. `automatic` lets activation checkpoints move to the host."""
    measure = activations or _formula(model)
    rows = [
        best_forecast(name, [PlacedRun(run, placement) for run in model.runs], measure, machine, job, automatic=automatic)
        for name, placement in PLACEMENTS.items()
    ]
    pooled = pool(model.runs, measure, machine, job, automatic=automatic)
    rows.append(best_forecast(POOLED, pooled, measure, machine, job, automatic=automatic))
    largest = {row.name: largest_numel(row.name, machine, job, automatic=automatic) for row in rows}
    return Advice(tuple(rows), tuple(pooled), largest)


def _formula(model: Model) -> Activations:
    assert model.shape is not None, "a model without a shape comes with traced activations"
    return partial(transformer_activations, model.shape)


def best_forecast(
    name: str,
    placed: Sequence[PlacedRun],
    activations: Activations,
    machine: Machine,
    job: Job,
    *,
    automatic: bool = True,
) -> Forecast:
    """The forecast with the fewest tiles, and with checkpoints on the device if they may stay there, that fits;
    if none fits, the plainest one."""
    plainest: Forecast | None = None
    for trial in _jobs(job, automatic):
        measured = activations(trial)
        found = forecast(name, placed, measured, machine, trial)
        plainest = plainest or found
        tiles = _tiles_needed(found, placed)
        while not found.fits and tiles <= _MOST_TILES:
            found = forecast(name, placed, measured, machine, trial, tiles=tiles)
            tiles *= 2
        if found.fits:
            return found
    assert plainest is not None
    return plainest


def _jobs(job: Job, automatic: bool) -> Iterator[Job]:
    yield job
    if automatic and job.checkpointing is Checkpointing.BLOCK:
        yield replace(job, checkpointing=Checkpointing.HOST)


_UNIT_SIZED = {Tier.DEVICE: (Category.GATHERED, Category.BUFFERS), Tier.HOST: (Category.BUFFERS,), Tier.DISK: ()}


def _tiles_needed(found: Forecast, placed: Sequence[PlacedRun]) -> int:
    """The least power of two by which units must shrink; beyond the limit if they are not what does not fit."""
    if not any(placement.param.split for _, placement in placed):
        return _MOST_TILES + 1
    tiles = 2
    for tier, categories in _UNIT_SIZED.items():
        in_use = sum(found.memory[tier][category] for category in categories)
        room = found.capacity[tier] - (found.total(tier) - in_use)
        if room <= 0 < found.total(tier):
            return _MOST_TILES + 1
        while in_use / tiles > room and tiles <= _MOST_TILES:
            tiles *= 2
    return tiles


def largest_numel(name: str, machine: Machine, job: Job, *, automatic: bool = True) -> int:
    """The largest GPT of the papers' proportions that a placement holds, to half a percent; 0 if none."""

    def fits(numel: int) -> bool:
        model = gpt_of_count(numel)
        measure = _formula(model)
        if name == POOLED:
            placed = pool(model.runs, measure, machine, job, automatic=automatic)
        else:
            placed = [PlacedRun(run, PLACEMENTS[name]) for run in model.runs]
        return best_forecast(name, placed, measure, machine, job, automatic=automatic).fits

    low, high = 0, 1 << 20
    while high < _LARGEST_NUMEL and fits(high):
        low, high = high, high * 4
    if not low:
        return 0
    while high / low > _PRECISION:
        middle = int((low * high) ** 0.5)
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


# In the pool each unit takes the first of these for which there is room: parameters, gradients, optimizer state.
_POOL = tuple(
    place_stage(3, param=param, grad=grad, optim=optim)
    for param, grad, optim in (
        (Tier.DEVICE, Tier.DEVICE, Tier.DEVICE),
        (Tier.DEVICE, Tier.HOST, Tier.HOST),
        (Tier.HOST, Tier.HOST, Tier.HOST),
        (Tier.DEVICE, Tier.HOST, Tier.DISK),
        (Tier.HOST, Tier.HOST, Tier.DISK),
        (Tier.DISK, Tier.HOST, Tier.DISK),
        (Tier.DISK, Tier.DISK, Tier.DISK),
    )
)


def pool(runs: Sequence[Run], activations: Activations, machine: Machine, job: Job, *, automatic: bool = True) -> list[PlacedRun]:
    """Use the device, the host and the disk as one memory: each unit's states go to the nearest tier with room.

    More states on the device mean less work for the CPU; more weights on the device mean less traffic. Both ends
    are tried, and the faster one that fits is taken.
    """
    best: tuple[float, list[PlacedRun]] | None = None
    room = _room(runs, activations, machine, job, automatic)
    for keep_weights in (True, False):
        placed = _fill(runs, dict(room), machine.ranks, job, keep_weights=keep_weights)
        found = best_forecast(POOLED, placed, activations, machine, job, automatic=automatic)
        if found.fits and (best is None or found.times.serial < best[0]):
            best = found.times.serial, placed
    return best[1] if best else [PlacedRun(run, _POOL[-1]) for run in runs]


def _room(runs: Sequence[Run], activations: Activations, machine: Machine, job: Job, automatic: bool) -> dict[Tier, int]:
    """What a tier has left for states at rest once activations and the units in use have theirs."""
    elsewhere = [PlacedRun(run, _POOL[2]) for run in runs]
    empty = [PlacedRun(Run("nothing", 0), _POOL[0])]
    plain = best_forecast(POOLED, empty, activations, machine, job, automatic=automatic)
    trial = replace(job, checkpointing=plain.checkpointing)
    measured = activations(trial)
    at_rest = (Category.PARAMETERS, Category.GRADIENTS, Category.OPTIMIZER)

    def left(tiles: int) -> dict[Tier, int]:
        found = forecast(POOLED, elsewhere, measured, machine, trial, tiles=tiles)
        # States read from the disk pass through the host twice over: the same staging as the weights', six times as wide.
        staged = forecast(POOLED, [PlacedRun(run, _POOL[-1]) for run in runs], measured, machine, trial, tiles=tiles)
        return {
            tier: machine.capacity(tier)
            - max(sum(b for category, b in row.memory[tier].items() if category not in at_rest) for row in (found, staged))
            for tier in Tier
        }

    tiles = 1
    while (room := left(tiles))[Tier.DEVICE] < machine.capacity(Tier.DEVICE) // 2 and tiles < _MOST_TILES:
        tiles *= 2
    return room


def _fill(runs: Sequence[Run], room: dict[Tier, int], world: int, job: Job, *, keep_weights: bool) -> list[PlacedRun]:
    placed: list[PlacedRun] = []
    numel = sum(run.numel * run.repeat for run in runs)
    for run in runs:
        left = run.repeat
        for placement in _POOL:
            need = _needs(run, placement, world, job)
            count = left
            for tier, nbytes in need.items():
                free = room[tier]
                if keep_weights and placement == _POOL[0]:
                    # Leave room on the device for the weights of all units that keep their states elsewhere.
                    weights = -(-run.numel // world) * job.recipe.weight
                    free -= numel // world * job.recipe.weight
                    nbytes -= weights
                if nbytes > 0:
                    count = min(count, max(0, free) // nbytes)
            if count:
                placed.append(PlacedRun(run._replace(repeat=count), placement))
                left -= count
                numel -= run.numel * count
                for tier, nbytes in need.items():
                    room[tier] -= nbytes * count
        if left:
            placed.append(PlacedRun(run._replace(repeat=left), _POOL[-1]))
    return placed


def _needs(run: Run, placement: Placement, world: int, job: Job) -> dict[Tier, int]:
    trained = -(-(run.numel - run.frozen) // world) + ALIGN_NUMEL
    weights = -(-run.numel // world) + 2 * ALIGN_NUMEL
    needs: dict[Tier, int] = {}
    for place, nbytes in (
        (placement.param, weights * job.recipe.weight),
        (placement.grad, trained * job.kept_grad),
        (placement.optim, trained * job.recipe.state),
    ):
        needs[place.tier] = needs.get(place.tier, 0) + nbytes
    return needs
