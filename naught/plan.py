"""Plan: the list of steps that one pass of training issues, the same on every rank. Pure; imports no torch.

A record of what the model did is expanded into steps by each unit's placement (`expansion.py`), and steps are then moved
while budgets allow (`moving.py`). Every event leaves one anchor in the list (`use` or `leave`), up to which the list is
issued when the event happens again. What the list holds is known by walking it (`holding.py`), so what is predicted is
what runs.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from naught.expansion import expand
from naught.moving import Budgets, hoist, keep, sink
from naught.steps import Event, Pass, Placements, Sizes, Step, Verb

__all__ = ["Plan", "compile_plan"]


@dataclass(frozen=True)
class Plan:
    steps: tuple[Step, ...]

    @cached_property
    def digest(self) -> str:
        """Equal for equal plans and for no others; ranks compare it after recording."""
        text = json.dumps([list(step) for step in self.steps], separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()


def compile_plan(events: Sequence[Event], placements: Placements, sizes: Sizes, *, budgets: Budgets, which: Pass) -> Plan:
    """Turn the record of one micro-batch into the plan that every later one follows."""
    steps = expand(events, placements, sizes, which)
    steps = keep(steps, placements, sizes, budgets)
    for verb in (Verb.READ, Verb.LOAD, Verb.GATHER):
        steps = hoist(steps, verb, placements, sizes, budgets)
    return Plan(tuple(sink(steps) if budgets.overlap_reduce else steps))
