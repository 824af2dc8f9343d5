"""Norms: those of single parameters' gradients, once all are summed over the ranks."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from naught.comm import Group
from naught.layout import intersect
from naught.unit import Unit

__all__ = ["norms_by_name"]


def norms_by_name(units: Iterable[Unit], group: Group, scale: float) -> dict[str, float]:
    """Every parameter's norm, without the scale of the loss. One exchange for all of them."""
    segments = [segment for unit in units for segment in unit.trained]
    names = [slot.name for segment in segments for slot in segment.layout.slots]
    squares: list[float] = []
    for segment in segments:
        total = None
        with group.noting(again=True):
            total = segment.grads.sum()
        for slot in segment.layout.slots:
            common = intersect(slot.span, segment.layout.shard(group.part))
            if total is None or common is None or not segment.counts:
                squares.append(0.0)
            else:
                begin = segment.states.owned.start
                squares.append(float(total[common.start - begin : common.stop - begin].double().square().sum()))
        segment.grads.let_copy_go()
    if not names:
        return {}
    group.look_for_faults(midway=True)
    sums = group.exchange(torch.tensor(squares, dtype=torch.float64)).sum(0).tolist()
    return {name: math.sqrt(total) / scale for name, total in zip(names, sums, strict=True)}
