"""Working set: what the plan of one step holds beyond the states at rest, found by walking the plan that would run. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

from naught.holding import Buffer, read_room_bytes, simulate
from naught.job import Job
from naught.moving import Budgets
from naught.placement import Placement, Tier
from naught.plan import compile_plan
from naught.shapes import Run
from naught.sizes import PlacedRun, unit_bytes
from naught.steps import Event, Moment, Pass, UnitBytes

__all__ = ["Work", "whole_working_set", "working_set"]


class Work(NamedTuple):
    """`flats` is what of the gathered only a backward holds."""

    gathered: int
    device_buffers: int
    host_buffers: int
    flats: int


def working_set(placed: Sequence[PlacedRun], world: int, job: Job) -> Work:
    """The same as for whole rows, of which only as many units are looked at as fetching ahead can reach."""
    largest = max(run.numel for run, _ in placed)

    def reach(run: Run) -> int:
        # Budgets hold two units of the largest size; before and behind them lies one unit more.
        return run.repeat if run.outer else min(run.repeat, 3 + 2 * largest // max(1, run.numel))

    return whole_working_set(tuple(PlacedRun(run._replace(repeat=reach(run)), place) for run, place in placed), world, job)


@lru_cache(maxsize=4096)
def whole_working_set(placed: tuple[PlacedRun, ...], world: int, job: Job) -> Work:
    """What the plan of one step holds beyond the states at rest, with one unit fetched ahead on every hop."""
    placements: dict[str, Placement] = {}
    sizes: dict[str, UnitBytes] = {}
    outer: list[str] = []
    for at, (run, placement) in enumerate(placed):
        size = unit_bytes(run, placement, world, job)
        if world == 1 and placement.param.tier is Tier.DEVICE:
            size = replace(size, weights=0)  # its flat is its shard: a gather brings nothing
        for unit in range(run.repeat):
            placements[f"{at}.{unit}"] = placement
            sizes[f"{at}.{unit}"] = size
            outer += [f"{at}.{unit}"] if run.outer else []
    inner = [unit for unit in sizes if unit not in outer]
    budgets = _one_ahead([sizes[unit] for unit in outer], [sizes[unit] for unit in inner], world)
    plan = compile_plan(_one_pass(outer, inner), placements, sizes, budgets=budgets, which=Pass(early=job.update_in_backward))
    peaks = simulate(plan.steps, placements, sizes)
    staging = peaks.buffers[Buffer.LOADED_GRADS] + peaks.buffers[Buffer.SCRATCH]
    # Where whole gradients are collected, the latest is there twice for a moment.
    twice = max((size.grads for unit, size in sizes.items() if size.trained and not placements[unit].sums_leave), default=0)
    # Gradients that are gone before the next unit's are on their way, too; on the host they are in rooms of a constant size.
    on_device = (peaks.tiers if job.update_in_backward else peaks.passing)[Tier.DEVICE]
    kinds = (Buffer.GRAD_FLATS, Buffer.WHOLE_GRADS, Buffer.OWNED_GRADS) if job.update_in_backward else (Buffer.GRAD_FLATS,)
    gathered = max(0, on_device - staging) + twice
    on_host = peaks.passing[Tier.HOST] + read_room_bytes(plan.steps, sizes)
    return Work(gathered, staging, on_host, min(gathered, sum(peaks.buffers[kind] for kind in kinds) + twice))


def _one_pass(outer: Sequence[str], inner: Sequence[str]) -> list[Event]:
    """Forward and backward through the inner units, with the outer ones in use throughout."""

    def around(opens: Moment, closes: Moment, units: Sequence[str]) -> list[Event]:
        within = [Event(moment, unit) for unit in units for moment in (opens, closes)]
        return [*(Event(opens, unit) for unit in outer), *within, *(Event(closes, unit) for unit in outer)]

    return around(Moment.ENTER, Moment.EXIT, inner) + around(Moment.GRAD, Moment.DONE, inner[::-1])


def _one_ahead(outer: Sequence[UnitBytes], inner: Sequence[UnitBytes], world: int) -> Budgets:
    """Room for two of the largest ahead of their use, as the engine has it, and for the states of the one in use and the next."""

    def pair(nbytes: Callable[[UnitBytes], int]) -> int:
        return max((nbytes(a) + nbytes(b) for a, b in pairwise(inner)), default=0)

    return Budgets(
        ahead_bytes=2 * max((size.weights for size in inner), default=0),
        live_bytes=sum(size.weights for size in [*outer, *inner]),
        load_bytes=pair(lambda size: size.weight_shard),
        read_weight_bytes=2 * max((size.weight_shard for size in [*outer, *inner]), default=0),
        read_state_bytes=pair(lambda size: size.state_shard),
        overlap_reduce=world > 1,
    )
