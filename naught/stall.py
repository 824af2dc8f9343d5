"""Stall: where each rank is while none of them gets on, in words. Pure: it is told places and asks nobody."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from naught.comm.ledger import Call

__all__ = ["Place", "ranks_named", "story_of"]

_OF_UNITS = ("all-gather", "reduce-scatter")
_SAME_ORDER = "The ranks must run the same modules in the same order; look at"


class Place(NamedTuple):
    """Where a rank is. Two places of it that are equal are one: it has not got on between them."""

    waits: Call | None  # None: it is in no collective
    phase: str  # "backward of step 57"; nothing where it is in none
    past: str  # the phase that it has left
    latest: Call | None  # None: it has issued no collective
    entered_s: float | None = None  # its phase, by its own clock; None: it is in none

    @property
    def busy(self) -> bool:
        """Whether it is in the middle of something that ends by itself, if all is well."""
        return self.waits is not None or bool(self.phase)

    def to_text(self) -> str:
        return json.dumps(self)

    @staticmethod
    def from_text(text: str) -> Place:
        waits, phase, past, latest, entered_s = json.loads(text)
        return Place(waits and Call(*waits), phase, past, latest and Call(*latest), entered_s)


def story_of(seconds: float, places: Mapping[int, Place | None]) -> str:
    """What to log of ranks that have not got on for so long. None: the rank did not answer."""
    told: dict[_Clause, list[int]] = {}
    for rank, place in sorted(places.items()):
        told.setdefault(_clause(place), []).append(rank)
    clauses = [
        f"{ranks_named(ranks)} {clause.one if len(ranks) == 1 else clause.many}"
        for clause, ranks in sorted(told.items(), key=lambda item: (item[0].order, item[1]))
    ]
    text = "; ".join(clauses)
    return f"no progress for {seconds:g} s. {text[:1].upper()}{text[1:]}. {_advice(places)}"


class _Clause(NamedTuple):
    """What is said of ranks at one place: of one of them, and of many. Those who wait come first."""

    order: int
    one: str
    many: str


def _clause(place: Place | None) -> _Clause:
    if place is None:
        nothing = "nothing: {} may be dead or stopped"
        return _Clause(3, f"says {nothing.format('its process')}", f"say {nothing.format('their processes')}")
    if place.waits is not None:
        rest = f"in {_named(place.waits)} ({place.phase or _behind(place)})"
        return _Clause(0, f"waits {rest}", f"wait {rest}")
    if place.phase:
        rest = f"in the {place.phase}, after {_latest(place)}"
        return _Clause(1, f"is {rest}", f"are {rest}")
    rest = f"outside of forward, backward and step, {_behind(place)}, after {_latest(place)}"
    return _Clause(2, f"is {rest}", f"are {rest}")


def _behind(place: Place) -> str:
    return f"behind the {place.past}" if place.past else "before the first step"


def _latest(place: Place) -> str:
    call = place.latest
    return "no collective" if call is None else f"collective #{call.number} ({call.collective}{_for(call)})"


def _named(call: Call) -> str:
    return f"{call.collective} #{call.number}{_for(call)}"


def _for(call: Call) -> str:
    return f' for "{call.unit or "root"}"' if call.collective in _OF_UNITS else ""


def _advice(places: Mapping[int, Place | None]) -> str:
    silent = [rank for rank, place in places.items() if place is None]
    astray = [rank for rank, place in places.items() if place is not None and place.waits is None]
    calls = {place.waits for place in places.values() if place is not None and place.waits is not None}
    if not calls:
        return (
            "No rank waits in a collective: this may be a long computation, as where a first step compiles, or a device that is "
            "stuck; look at the stacks, or set naught.watchdog_s to more than a step takes."
        )
    if silent or astray:
        there = ranks_named(sorted(silent + astray))
        return f"{_SAME_ORDER} the log and the stack of {there}." if astray else f"Look at the log of {there}."
    if len(calls) > 1:
        return f"{_SAME_ORDER} the stacks of all."
    return "All wait in the same one: look at the network between them."


def ranks_named(ranks: Sequence[int]) -> str:
    """ "rank 3", "ranks 0 and 2", "ranks 0-5, 7 and 9": in order, neighbours together."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and runs[-1][-1] == rank - 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    names = [name for run in runs for name in ([f"{run[0]}-{run[-1]}"] if len(run) > 2 else map(str, run))]
    if len(ranks) == 1:
        return f"rank {names[0]}"
    return f"ranks {', '.join(names[:-1])} and {names[-1]}" if len(names) > 1 else f"ranks {names[0]}"
