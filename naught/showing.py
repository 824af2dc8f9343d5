"""Show: advice as tables for people and as plain data for machines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from naught.advice import Advice
from naught.estimate import Category, Forecast
from naught.placement import Tier
from naught.quantity import show_bytes, show_count, show_seconds
from naught.text import table

__all__ = [
    "MEMORY_HEADER",
    "TIME_HEADER",
    "as_data",
    "forecast_data",
    "lacking",
    "memory_rows",
    "show",
    "span",
    "time_rows",
    "verdict",
]

MEMORY_HEADER = ("placement", "tier", *(category.value for category in Category), "total", "of", "fits")
TIME_HEADER = (
    "placement",
    "all-gather",
    "reduce-scatter",
    "host link",
    "disk",
    "no overlap",
    "likely",
    "full overlap",
    "efficiency",
    "largest",
    "fits",
)


def show(advice: Advice) -> str:
    """Both tables and the recommendation, as plain text."""
    return "\n\n".join(
        [table(MEMORY_HEADER, memory_rows(advice.forecasts)), table(TIME_HEADER, time_rows(advice)), verdict(advice)]
    )


def memory_rows(forecasts: Sequence[Forecast]) -> list[tuple[str, ...]]:
    """A line for each tier that a placement uses."""
    rows = []
    for row in forecasts:
        used = [tier for tier in Tier if row.total(tier) or tier is Tier.DEVICE]
        for tier in used:
            cells = (show_bytes(row.memory[tier][category]) if row.memory[tier][category] else "-" for category in Category)
            fits = "yes" if row.total(tier) <= row.capacity[tier] else "no"
            name = row.name if tier is Tier.DEVICE else ""
            rows.append((name, tier.value, *cells, show_bytes(row.total(tier)), show_bytes(row.capacity[tier]), fits))
    return rows


def time_rows(advice: Advice) -> list[tuple[str, ...]]:
    return [
        (
            row.name,
            show_bytes(row.volume["all-gather"]),
            show_bytes(row.volume["reduce-scatter"]),
            show_bytes(row.link_bytes),
            show_bytes(row.disk_bytes),
            show_seconds(row.times.serial),
            show_seconds(row.times.likely),
            show_seconds(row.times.overlapped),
            f"{row.efficiency:.0%}",
            show_count(advice.largest[row.name]) if advice.largest[row.name] else "none",
            "yes" if row.fits else "no",
        )
        for row in advice.forecasts
    ]


def verdict(advice: Advice) -> str:
    best = advice.best
    if best is None:
        near, most = advice.nearest, max(advice.largest.values())
        holds = (
            f"the largest GPT of the papers' proportions that fits here has {show_count(most)}" if most else "no model fits here"
        )
        return f"nothing fits: {near.name} lacks {lacking(near)}. Use more ranks, or more memory ({holds})"
    needs = _needs(best)
    return f"recommended: {best.name}" + (f" ({needs})" if needs else "") + f", {span(best)}"


def lacking(row: Forecast) -> str:
    """What there is too little of where a placement does not fit."""
    return " and ".join(f"{show_bytes(nbytes)} of {_NAMES[tier]}" for tier, nbytes in row.lacks.items())


_NAMES = {Tier.DEVICE: "device memory", Tier.HOST: "host memory", Tier.DISK: "disk"}


def span(row: Forecast) -> str:
    """What a step likely takes, and the bounds of that."""
    low, likely, high = map(show_seconds, (row.times.overlapped, row.times.likely, row.times.serial))
    return f"likely {likely} a step ({low} to {high})"


_AWAY = {Tier.HOST: "in host memory", Tier.DISK: "on disk"}


def _needs(row: Forecast) -> str:
    needs = []
    if row.checkpointing.tier is not Tier.DEVICE:
        needs.append(f"activation checkpoints {_AWAY[row.checkpointing.tier]}")
    if row.tiles > 1:
        needs.append(f"blocks split into {row.tiles} tiles")
    return " and ".join(needs)


def as_data(advice: Advice) -> dict[str, Any]:
    """Everything the tables say, in bytes and seconds."""
    return {
        "recommended": advice.best.name if advice.best else None,
        "placements": [forecast_data(row) | {"largest_numel": advice.largest[row.name]} for row in advice.forecasts],
        "pooled": [
            {
                "unit": run.name,
                "numel": run.numel,
                "repeat": run.repeat,
                "placement": {"param": str(p.param.tier), "grad": str(p.grad.tier), "optim": str(p.optim.tier)},
            }
            for run, p in advice.pooled
        ],
    }


def forecast_data(row: Forecast) -> dict[str, Any]:
    return {
        "name": row.name,
        "fits": row.fits,
        "bytes": {tier.value: {category.value: nbytes for category, nbytes in row.memory[tier].items()} for tier in Tier},
        "total_bytes": {tier.value: row.total(tier) for tier in Tier},
        "capacity_bytes": {tier.value: row.capacity[tier] for tier in Tier},
        "volume_bytes": dict(row.volume),
        "link_bytes": row.link_bytes,
        "disk_bytes": row.disk_bytes,
        "seconds": {
            "compute": row.times.compute,
            "network": row.times.network,
            "link": row.times.link,
            "update": row.times.update,
            "disk": row.times.disk,
            "link_in_turn": row.times.link_in_turn,
            "behind_update": row.times.behind_update,
            "behind_backward": row.times.behind_backward,
            "no_overlap": row.times.serial,
            "likely": row.times.likely,
            "full_overlap": row.times.overlapped,
        },
        "efficiency": row.efficiency,
        "checkpointing": row.checkpointing.value,
        "tiles": row.tiles,
    }
