"""Uses: which units a pass is at work with, by what the hooks have said of it so far. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from naught.steps import Event, Moment, Step, Verb

__all__ = ["Uses"]


@dataclass
class Uses:
    """Counts forwards and backwards of units."""

    entered: Counter[str] = field(default_factory=Counter)  # forwards that have begun
    depth: Counter[str] = field(default_factory=Counter)  # and not ended
    awaited: Counter[str] = field(default_factory=Counter)  # forwards whose backward has not ended
    backward: set[str] = field(default_factory=set)  # units between grad and done
    seen_backward: bool = False

    def note(self, event: Event) -> None:
        moment, name = event
        if moment is Moment.ENTER:
            self.entered[name] += 1
            self.depth[name] += 1
            if not self.seen_backward:  # else it computes again
                self.awaited[name] += 1
        elif moment is Moment.EXIT:
            self.depth[name] -= 1
        elif moment is Moment.GRAD:
            self.seen_backward = True
            self.backward.add(name)
        else:
            self.backward.discard(name)
            self.awaited[name] -= 1

    def is_in_use(self, name: str) -> bool:
        """Whether a unit is between enter and exit, or between grad and done."""
        return self.depth[name] > 0 or name in self.backward

    def may_make_more(self, name: str) -> bool:
        """Whether gradients of a unit are still to come, by what its forwards have told: whether the loss is computed of all that
        they have made nobody knows."""
        return name in self.backward or self.awaited[name] > 0

    def would_miss(self, steps: Iterable[Step]) -> bool:
        """Whether steps would release or reduce a unit that is still at work."""
        return any(step.verb in (Verb.RELEASE, Verb.REDUCE) and self.is_in_use(step.unit) for step in steps)
