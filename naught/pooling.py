"""Pooling: where the units of a model rest within limits, by the planner's own reckoning; and what to do if they do not fit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from naught.advice import Pooled, pool
from naught.errors import PlacementError
from naught.estimate import Forecast, forecast_with_most_staging
from naught.job import ActivationBytes, Checkpointing, Job
from naught.machine import Machine
from naught.placement import PLACEMENTS, Placement, Tier
from naught.quantity import show_bytes
from naught.shapes import Run
from naught.sizes import PlacedRun, resting_bytes

__all__ = ["Arrangement", "Limits", "berths_beside", "place_in_pool", "refuse_full_disk"]

_TILES = (2, 4, 8, 16, 32, 64)
_FEWER = "; fewer or smaller requests of the disk (aio.queue_depth, aio.block_size) need smaller buffers on the host"
_EARLY = (
    "set naught.update_in_backward, for one micro-batch a step, no clipping, no fp16, and an optimizer by name: then it would "
    "fit; or "
)
_ON_DISK = "name a folder for what has no room in naught.nvme_path (in a simulation, say how large a --disk there is)"


@dataclass(frozen=True)
class Limits:
    """What one rank may have: its machine, what its job keeps of each parameter, and device memory that is for activations."""

    machine: Machine
    job: Job
    activation_bytes: int
    tiles: int = 1  # into which layers are divided already

    @property
    def activations(self) -> ActivationBytes:
        """Most of it is for a loss, as that of a model of language is."""
        all_of_it = self.activation_bytes
        return ActivationBytes(all_of_it, 0, 0, "what the configuration leaves to them", forward_flops=1, loss=all_of_it)

    def with_gradients(self, *, wide: bool) -> Limits:
        return replace(self, job=replace(self.job, wide_gradients=wide))


class Arrangement(NamedTuple):
    """Where units rest, how many berths of staging leave them room, and whether gradients on the host have 32 bits."""

    placements: list[Placement]
    berths: int
    wide: bool


def place_in_pool(units: Sequence[Run], limits: Limits) -> Arrangement:
    """Use the device and the host as one memory: the states of each unit go to the nearest tier with room. The first ones of the
    forward stay on the device, where they are updated at once, and the host has time for the rest. Wide gradients are for where
    they push nothing away."""
    asked = limits.job.wide_gradients
    limits = limits.with_gradients(wide=bool(asked))
    placed, found = _pooled(units, limits)
    limits = replace(limits, machine=replace(limits.machine, berths=found.berths))
    if found.fits:
        wider = _forecast(placed, limits.with_gradients(wide=True))
        wide = wider.fits and wider.berths == found.berths if asked is None else asked
        return Arrangement([placement for run, placement in placed for _ in range(run.repeat)], found.berths, wide)
    early = replace(limits, job=replace(limits.job, update_in_backward=True))
    raise PlacementError(
        f"the model does not fit, wherever its units rest: with all tiers as one memory {_needs(found)}",
        where="naught.placement",
        fix=(_EARLY if _pooled(units, early).forecast.fits else "")
        + "use more ranks, a smaller model or batch, or larger limits"
        + (_FEWER if limits.machine.disk_bytes else f"; {_ON_DISK}"),
    )


def _pooled(units: Sequence[Run], limits: Limits) -> Pooled:
    job = replace(limits.job, checkpointing=Checkpointing.NONE)
    return pool(units, lambda _: limits.activations, limits.machine, job, automatic=False, tiles=False)


def refuse_full_disk(placed: Sequence[PlacedRun], job: Job, world: int, free: int | None, folder: str) -> None:
    """Before anything is written. `free` is what the ranks of a host have together, for one of them; None: nobody says."""
    needed = sum(resting_bytes(run, placement, world, job)[Tier.DISK] for run, placement in placed)
    if free is not None and needed > free:
        raise PlacementError(
            f"states of {show_bytes(needed)} a rank would go to {folder}, and {show_bytes(free)} a rank are free there",
            where="nvme_path",
            fix="make room on that disk, name a folder on another one, or let more states rest on the device or the host",
        )


def berths_beside(placed: Sequence[PlacedRun], limits: Limits) -> int:
    """How many berths of staging leave room for the states. What does not fit beside the fewest is refused before anything is
    allocated."""
    found = _forecast(placed, limits)
    if found.fits:
        return found.berths
    runs = [run for run, _ in placed]
    uniform = {name: [PlacedRun(run, place) for run in runs] for name, place in PLACEMENTS.items()}
    others = (name for name, rows in uniform.items() if "disk" not in name and _forecast(rows, limits).fits)
    nearest = next(others, None)
    tiles = next((tiles for tiles in _TILES if _forecast(placed, limits, tiles).fits), None)
    fix = 'set naught.placement to "auto", which uses all tiers as one memory'
    if nearest:
        fix = f"{nearest} would fit"
    elif tiles:
        fix = f"set naught.tiles to {tiles * limits.tiles}, which gathers layers in as many pieces"
    raise PlacementError(
        f"the plan does not fit: {_needs(found)}",
        where="naught.gpu_memory, naught.host_memory",
        fix=f"{fix}; or raise the limits",
    )


def _forecast(placed: Sequence[PlacedRun], limits: Limits, tiles: int = 1) -> Forecast:
    job = replace(limits.job, checkpointing=Checkpointing.NONE)
    return forecast_with_most_staging("run", placed, limits.activations, limits.machine, job, tiles=tiles)


def _needs(found: Forecast) -> str:
    """What each tier would hold, and may hold; and of what."""
    parts = []
    tiers = (Tier.DEVICE, Tier.HOST, *([Tier.DISK] if found.total(Tier.DISK) else []))
    for tier in sorted(tiers, key=lambda tier: found.total(tier) <= found.capacity[tier]):
        kinds = {category.value: nbytes for category, nbytes in found.memory[tier].items() if nbytes}
        detail = ", ".join(f"{name} {show_bytes(nbytes)}" for name, nbytes in kinds.items())
        detail += "; never all at once" if sum(kinds.values()) > found.total(tier) else ""
        most = f"the {show_bytes(found.capacity[tier])} that states may have"
        parts.append(f"the {tier} would hold {show_bytes(found.total(tier))} of {most}" + (f" ({detail})" if detail else ""))
    return "; ".join(parts)
