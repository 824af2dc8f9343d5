"""Costs: a listing of what each module of a model holds and computes, from counts by name. Counts nothing itself."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import NamedTuple

from torch import nn

from naught.config.observation import FlopsProfiler
from naught.quantity import show_count
from naught.text import table

__all__ = ["Cost", "costs_of", "listing"]

_HEADER = ("module", "class", "parameters", "FLOPs", "share")
# A backward computes the gradients of a product's two factors, each as much work as the product.
_BACKWARD = 2


class Cost(NamedTuple):
    """A module, what it holds and what it computes, those inside of it included."""

    name: str
    kind: str
    depth: int
    numel: int
    flops: int


def costs_of(module: nn.Module, totals: Mapping[str, int]) -> list[Cost]:
    """The cost of every module, each before those inside of it. Torch names modules from the class of the outermost on."""
    outermost = type(module).__name__
    counted: defaultdict[nn.Module, int] = defaultdict(int)
    for name, inner in module.named_modules(remove_duplicate=False):  # torch knows a shared module by any of its names
        counted[inner] += totals.get(f"{outermost}.{name}" if name else outermost, 0)

    def flops(inner: nn.Module) -> int:
        """A list of modules is never called itself: it costs what its members cost."""
        return counted[inner] or sum(flops(child) for child in inner.children())

    return [
        Cost(
            name,
            type(inner).__name__,
            depth=name.count(".") + 1 if name else 0,
            numel=sum(param.numel() for param in inner.parameters()),
            flops=flops(inner),
        )
        for name, inner in module.named_modules()
    ]


def listing(costs: list[Cost], settings: FlopsProfiler, *, flops: int) -> str:
    """The whole forward, then the kinds of modules that compute the most on each level, then, if wanted, every module."""
    step_flops = flops * (1 + _BACKWARD + settings.recompute_fwd_factor)
    whole = [
        ("parameters", show_count(costs[0].numel)),
        ("MACs of the forward", show_count(flops / 2)),
        ("FLOPs of the forward", show_count(flops)),
        ("FLOPs of forward, backward and recompute", show_count(step_flops)),
    ]
    shown = [cost for cost in costs if settings.module_depth < 0 or cost.depth <= settings.module_depth]
    parts = [table(("operations of one micro-batch", ""), whole), table(_HEADER, _heaviest(shown, settings.top_modules, flops))]
    if settings.detailed:
        parts.append(table(_HEADER, [_row("  " * cost.depth + (cost.name or "root"), cost, flops) for cost in shown]))
    return "\n\n".join(parts)


def _heaviest(costs: list[Cost], most: int, flops: int) -> list[tuple[str, ...]]:
    """On each level the classes whose modules compute the most together; of those that compute the same, the larger."""
    levels: defaultdict[int, defaultdict[str, list[Cost]]] = defaultdict(lambda: defaultdict(list))
    for cost in costs:
        levels[cost.depth][cost.kind].append(cost)
    rows = []
    for depth, kinds in sorted(levels.items()):
        sums = [
            (len(alike), Cost("", kind, depth, sum(cost.numel for cost in alike), sum(cost.flops for cost in alike)))
            for kind, alike in kinds.items()
        ]
        sums.sort(key=lambda pair: (-pair[1].flops, -pair[1].numel))
        rows += [_row(f"level {depth}: {count} of", cost, flops) for count, cost in sums[:most]]
    return rows


def _row(title: str, cost: Cost, flops: int) -> tuple[str, ...]:
    share = f"{cost.flops / flops:.1%}" if flops else "-"
    return title, cost.kind, show_count(cost.numel), show_count(cost.flops), share
