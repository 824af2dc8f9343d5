"""Pacing: how long the steps of a plan take on a machine, one behind the other in a lane and side by side in several. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from naught.machine import Machine
from naught.placement import Kind, Tier
from naught.steps import Placements, Sizes, Step, Verb

__all__ = ["Bar", "Pace", "pace"]


class Bar(NamedTuple):
    """Something that keeps a lane busy."""

    lane: str
    what: str
    unit: str
    start_s: float
    stop_s: float


@dataclass(frozen=True)
class Pace:
    """When what happens in a step, and how long each lane is busy."""

    bars: tuple[Bar, ...]

    @property
    def seconds(self) -> float:
        return max((bar.stop_s for bar in self.bars), default=0.0)

    @property
    def busy(self) -> dict[str, float]:
        found: dict[str, float] = defaultdict(float)
        for bar in self.bars:
            found[bar.lane] += bar.stop_s - bar.start_s
        return dict(found)


def pace(
    steps: Sequence[Step], placements: Placements, sizes: Sizes, flops: Mapping[str, float], machine: Machine, *, recomputes: bool
) -> Pace:
    """Walk a plan. `flops` are those of a unit's forward; its backward has twice as many, and as many again if it computes its
    forward anew. Whatever is asked of a lane waits for what was asked of it before; a unit computes once its weights are there,
    and its gradients set out once they are made."""
    walk = _Walk()
    share = (machine.ranks - 1) / machine.ranks / machine.collective_bytes_s
    for verb, kind, unit in steps:
        size = sizes.get(unit)
        if size is None:
            continue
        if verb is Verb.GATHER:
            after = walk.asked
            if placements[unit].param.tier is not Tier.DEVICE:
                after = walk.do("link", "load", unit, size.weight_shard / machine.link_bytes_s, after=after)
            walk.do("network", "gather", unit, size.weights * share, after=after)
        elif verb is Verb.USE:
            times = 1 if kind is Kind.PARAM else 3 if recomputes else 2
            walk.compute("forward" if kind is Kind.PARAM else "backward", unit, times * flops.get(unit, 0.0) / machine.gpu.flops)
        elif verb is Verb.REDUCE:
            walk.do("network", "reduce", unit, size.grads * share, after=walk.free["compute"])
        elif verb is Verb.STORE:
            walk.do("link", "store", unit, size.grad_shard / machine.link_bytes_s, after=walk.ready[unit])
    return Pace(tuple(walk.bars))


class _Walk:
    """Where each lane is."""

    def __init__(self) -> None:
        self.bars: list[Bar] = []
        self.free: dict[str, float] = defaultdict(float)
        self.ready: dict[str, float] = {}  # when what was last brought for a unit is there
        self.asked = 0.0  # when the latest computation has begun: what is asked ahead is asked then

    def do(self, lane: str, what: str, unit: str, seconds: float, *, after: float) -> float:
        """When it is done."""
        start = max(self.free[lane], after)
        self.free[lane] = self.ready[unit] = start + seconds
        if seconds:
            self.bars.append(Bar(lane, what, unit, start, start + seconds))
        return start + seconds

    def compute(self, what: str, unit: str, seconds: float) -> None:
        start = max(self.free["compute"], self.ready.get(unit, 0.0))
        self.asked, self.free["compute"] = start, start + seconds
        if seconds:
            self.bars.append(Bar("compute", what, unit, start, start + seconds))
