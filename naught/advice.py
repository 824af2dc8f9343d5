"""Advise: which placements of a model fit a machine, which is fastest, and how large a model each could hold. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import NamedTuple

from naught.estimate import Category, Forecast, forecast, forecast_with_most_staging
from naught.job import ActivationBytes, Checkpointing, Job, transformer_activations
from naught.machine import Machine
from naught.placement import PLACEMENTS, Kind, Tier, place_stage
from naught.presets import gpt_of_count
from naught.shapes import Model, Run
from naught.sizes import PlacedRun, resting_bytes, resting_of

__all__ = ["POOLED", "Advice", "Pooled", "advise", "best_forecast", "largest_numel", "pool"]

POOLED = "pooled"
_MOST_TILES = 4096
_PRECISION = 1.005
_TRIES = 4
# How much longer a step may be by what more staging pushes away: it saves about as much, of which no forecast knows.
_WORTH_STAGING = 1.05

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
        """The likely fastest that fits; of equals the one that is faster if everything overlaps, then the one that leaves most
        of the device free."""
        fitting = [row for row in self.forecasts if row.fits]
        return min(fitting, key=lambda row: (*_slowness(row), row.total(Tier.DEVICE)), default=None)

    @property
    def nearest(self) -> Forecast:
        """The one that lacks least."""
        return min(self.forecasts, key=_lacking)


def _lacking(row: Forecast) -> int:
    return sum(row.lacks.values())


def _slowness(row: Forecast) -> tuple[float, float]:
    """To sort by: how long a step likely takes, and of equals, how long if everything overlaps; three digits of either."""
    return float(f"{row.times.likely:.3g}"), float(f"{row.times.overlapped:.3g}")


def advise(model: Model, activations: Activations | None, machine: Machine, job: Job, *, automatic: bool = True) -> Advice:
    """Forecast every named placement and the pool. `automatic` lets activation checkpoints move to the host."""
    measure = activations or _formula(model)
    rows = [
        best_forecast(name, [PlacedRun(run, placement) for run in model.runs], measure, machine, job, automatic=automatic)
        for name, placement in PLACEMENTS.items()
    ]
    small = _small(job)
    placed, narrow = pool(model.runs, measure, machine, small, automatic=automatic)
    rows.append(narrow)
    if job.wide_gradients is None:  # as `place_in_pool` has it: where they push nothing away
        beside = replace(machine, berths=narrow.berths)
        wide = best_forecast(POOLED, placed, measure, beside, replace(job, wide_gradients=True), automatic=automatic)
        if wide.fits and (wide.tiles, wide.checkpointing) == (narrow.tiles, narrow.checkpointing):
            rows[-1] = wide
    largest = {row.name: largest_numel(row.name, machine, job, automatic=automatic) for row in rows}
    return Advice(tuple(rows), tuple(placed), largest)


def _small(job: Job) -> Job:
    """What a pool places has gradients that are no wider on the host than they are summed, unless that is asked for: what counts
    is how much it holds."""
    return replace(job, wide_gradients=bool(job.wide_gradients))


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
    """The forecast with the most staging, the fewest tiles, and with checkpoints on the device if they may stay there, that
    fits; if none fits, the plainest one."""
    plainest: Forecast | None = None
    for trial in _jobs(job, automatic):
        measured = activations(trial)
        found = forecast_with_most_staging(name, placed, measured, machine, trial)
        plainest = plainest or found
        tiles = _tiles_needed(found, placed)
        while not found.fits and tiles <= _MOST_TILES:
            found = forecast_with_most_staging(name, placed, measured, machine, trial, tiles=tiles)
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
    job = _small(job) if name == POOLED else job

    def fits(numel: int) -> bool:
        model = gpt_of_count(numel)
        measure = _formula(model)
        if name == POOLED:
            return pool(model.runs, measure, machine, job, automatic=automatic).forecast.fits
        placed = _uniform(numel, name)
        return _states_fit(placed, machine, job) and best_forecast(name, placed, measure, machine, job, automatic=automatic).fits

    # No placement keeps less than a parameter's states, once; what else it holds is mostly small beside them.
    most = sum(machine.capacity(tier) for tier in Tier) * machine.ranks // int(job.recipe.weight + job.recipe.state) + 1
    if name != POOLED:
        most = _bisect(lambda numel: _states_fit(_uniform(numel, name), machine, job), 1, most)[1]
    for share in (0.98, 0.9, 0.5):
        if fits(int(most * share)):
            return _bisect(fits, int(most * share), most)[0]
    return _bisect(fits, 1 << 16, most // 2 + 1)[0] if fits(1 << 16) else 0


def _uniform(numel: int, name: str) -> list[PlacedRun]:
    return [PlacedRun(run, PLACEMENTS[name]) for run in gpt_of_count(numel).runs]


def _bisect(holds: Callable[[int], bool], low: int, high: int) -> tuple[int, int]:
    """Narrow down where something stops to hold, given that it does at the low end."""
    while high / low > _PRECISION and high - low > 1:
        middle = max(low + 1, int((low * high) ** 0.5))
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low, high


def _states_fit(placed: Sequence[PlacedRun], machine: Machine, job: Job) -> bool:
    """Whether the states at rest have room: quick to tell, and without it nothing else matters."""
    totals = dict.fromkeys(Tier, 0)
    for run, placement in placed:
        for tier, nbytes in resting_bytes(run, placement, machine.ranks, job).items():
            totals[Tier.DEVICE if machine.unified and tier is Tier.HOST else tier] += nbytes
    return all(totals[tier] <= machine.capacity(tier) for tier in Tier)


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
_ON_HOST = _POOL[2]


class Pooled(NamedTuple):
    """Where each run of units rests, and what that holds and takes; the forecast has the staging beside it."""

    placed: list[PlacedRun]
    forecast: Forecast


def pool(
    runs: Sequence[Run], activations: Activations, machine: Machine, job: Job, *, automatic: bool = True, tiles: bool = True
) -> Pooled:
    """Use the device, the host and the disk as one memory: each unit's states go to the nearest tier with room, beside as much
    staging as pushes none of them too far away. Without `tiles` units are gathered as they are."""
    tried = [_pool_beside(lean, runs, activations, job, automatic=automatic, tiles=tiles) for lean in machine.with_less_staging()]
    fitting = [found for found in tried if found.forecast.fits]
    if not fitting:
        return min(tried, key=lambda found: _lacking(found.forecast))
    least = min(found.forecast.times.likely for found in fitting)
    return next(found for found in fitting if found.forecast.times.likely <= least * _WORTH_STAGING)


def _pool_beside(
    machine: Machine, runs: Sequence[Run], activations: Activations, job: Job, *, automatic: bool, tiles: bool
) -> Pooled:
    """More states on the device mean less work for the CPU; more weights on the device, and more gradients on the host, mean
    less traffic. Both ends are tried, and so is one placement for all; the fastest that fits is taken, or what lacks least."""
    room = _room(runs, activations, machine, job, automatic=automatic, tiled=tiles)
    untiled = partial(forecast, POOLED, activations=activations(job), machine=machine, job=job)
    tiled = partial(best_forecast, POOLED, activations=activations, machine=machine, job=job, automatic=automatic)
    measure = tiled if tiles else untiled
    kept = [dict(zip(_KEPT, keep, strict=True)) for keep in product((True, False), repeat=len(_KEPT))]
    filled = [_fill_up(runs, room, machine.ranks, job, untiled, keep) for keep in kept]
    uniform = [[PlacedRun(run, placement) for run in runs] for placement in _POOL]
    found = [Pooled(placed, measure(placed)) for placed in (*filled, *uniform) if _states_fit(placed, machine, job)]
    fitting = [each for each in found if each.forecast.fits]
    if fitting:
        return min(fitting, key=lambda each: _slowness(each.forecast))
    return min(found or [Pooled(placed, untiled(placed)) for placed in filled], key=lambda each: _lacking(each.forecast))


def _room(
    runs: Sequence[Run], activations: Activations, machine: Machine, job: Job, *, automatic: bool, tiled: bool
) -> dict[Tier, int]:
    """What a tier has left for states at rest once activations and the units in use have theirs."""
    empty = [PlacedRun(Run("nothing", 0), _POOL[0])]
    plain = best_forecast(POOLED, empty, activations, machine, job, automatic=automatic)
    trial = replace(job, checkpointing=plain.checkpointing)
    measured = activations(trial)
    at_rest = (Category.PARAMETERS, Category.GRADIENTS, Category.OPTIMIZER)

    def passing(tier: Tier, tiles: int) -> int:
        """States that rest on disk pass through the host, and so do sums of what rests there, in other rooms: the most counts."""
        rows = [
            forecast(POOLED, [PlacedRun(run, placement) for run in runs], measured, machine, trial, tiles=tiles)
            for placement in ((_ON_HOST, *_POOL[-2:]) if machine.capacity(Tier.DISK) else (_ON_HOST,))
        ]
        return max(sum(nbytes for category, nbytes in row.memory[tier].items() if category not in at_rest) for row in rows)

    # Tiles small enough that the units in use leave half of the device.
    tiles = 1
    while tiled and passing(Tier.DEVICE, 1) / tiles > machine.capacity(Tier.DEVICE) / 2 and tiles < _MOST_TILES:
        tiles *= 2
    return {tier: machine.capacity(tier) - passing(tier, tiles) for tier in Tier}


def _fill_up(
    runs: Sequence[Run],
    room: Mapping[Tier, int],
    world: int,
    job: Job,
    measure: Callable[[Sequence[PlacedRun]], Forecast],
    keep: Mapping[Tier, bool],
) -> list[PlacedRun]:
    """Fill the device as far as its forecast allows: what rests there and what passes are not there at the same time."""
    device = room[Tier.DEVICE]
    tried: list[tuple[bool, int, list[PlacedRun]]] = []  # whether it is too much, what it leaves, and how
    for _ in range(_TRIES):
        placed = _fill(runs, {**room, Tier.DEVICE: device}, world, job, keep)
        found = measure(placed)
        left = found.capacity[Tier.DEVICE] - found.total(Tier.DEVICE)
        tried.append((left < 0, abs(left), placed))
        device += left
    return min(tried, key=lambda row: row[:2])[2]


# What a tier may leave room for, of all units, before it takes any states in.
_KEPT = {Tier.DEVICE: Kind.PARAM, Tier.HOST: Kind.GRAD}


def _fill(runs: Sequence[Run], room: dict[Tier, int], world: int, job: Job, keep: Mapping[Tier, bool]) -> list[PlacedRun]:
    """Give each unit the first placement for which there is room, and the farthest that there is where no tier has any. A tier
    that is to keep room for something does."""
    placed: list[PlacedRun] = []
    farthest = _POOL[-1] if room[Tier.DISK] > 0 else _ON_HOST
    kept = {run: {tier: _kept(tier, run, world, job) if keep[tier] else 0 for tier in _KEPT} for run in runs}
    to_come = {tier: sum(kept[run][tier] * run.repeat for run in runs) for tier in _KEPT}
    for run in runs:
        left = run.repeat
        for placement in _POOL:
            need = resting_bytes(run._replace(repeat=1), placement, world, job)
            fitting = {tier: room[tier] // nbytes for tier, nbytes in need.items() if nbytes}
            for tier in to_come:
                if need[tier] > kept[run][tier]:
                    fitting[tier] = (room[tier] - to_come[tier]) // (need[tier] - kept[run][tier])
            count = max(0, min([left, *fitting.values()]))
            if count:
                placed.append(PlacedRun(run._replace(repeat=count), placement))
                left -= count
                for tier, nbytes in need.items():
                    room[tier] -= nbytes * count
                for tier in _KEPT:
                    to_come[tier] -= kept[run][tier] * count
        if left:
            placed.append(PlacedRun(run._replace(repeat=left), farthest))
            for tier in _KEPT:
                to_come[tier] -= kept[run][tier] * left
    return placed


def _kept(tier: Tier, run: Run, world: int, job: Job) -> int:
    """What a unit has of what a tier keeps room for."""
    there = next(placement for placement in _POOL if placement.of(_KEPT[tier]).tier is tier and placement.optim.tier is not tier)
    return resting_of(_KEPT[tier], run._replace(repeat=1), there, world, job)
