"""Loans: a unit may *borrow* another, whose parameters it uses outside of that one's own module. Both come and go together: what
is said of the borrower is then said of the other too.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from naught.steps import Moment

__all__ = ["Hearer", "Loans"]


class Hearer(Protocol):
    """Whoever is told what happens to units."""

    def happened(self, moment: Moment, unit: str) -> None: ...

    def in_backward(self, unit: str) -> bool: ...


class Loans:
    """Says what happens to units, and to those that they have borrowed. `calls` counts the forwards of each that still want a
    backward, and will tell when it is over; `unreached` those whose backward has not begun."""

    def __init__(self, hearer: Hearer, units: Iterable[str]) -> None:
        self.hearer = hearer
        self.calls: dict[str, int] = dict.fromkeys(units, 0)
        self.unreached: dict[str, int] = dict.fromkeys(units, 0)
        self.borrowed: dict[str, list[str]] = {}

    def forget(self) -> None:
        """A pass is over, one way or another; who borrows what is known from now on."""
        self.calls = dict.fromkeys(self.calls, 0)
        self.unreached = dict.fromkeys(self.unreached, 0)

    def borrow(self, borrower: str, unit: str) -> None:
        """A unit whose forward is running uses this one."""
        self.borrowed.setdefault(borrower, []).append(unit)
        self.hearer.happened(Moment.ENTER, unit)

    def expect(self, borrower: str, unit: str) -> None:
        """A unit will use this one, as its user has said."""
        if borrower != unit and unit not in self.borrowed.setdefault(borrower, []):
            self.borrowed[borrower].append(unit)

    def say(self, moment: Moment, unit: str) -> None:
        self.hearer.happened(moment, unit)
        for other in self.borrowed.get(unit, ()) if self.borrowed else ():
            if moment is Moment.GRAD:
                self.say_grad(other)
            elif moment is Moment.DONE:
                self.say_done(other)
            else:
                self.hearer.happened(moment, other)

    def say_grad(self, unit: str) -> None:
        """Unless its backward has begun already."""
        if not self.hearer.in_backward(unit):
            self.say(Moment.GRAD, unit)

    def say_done(self, unit: str) -> None:
        """Unless another call of it, or somebody who borrows it, is still to come. If nothing tells, the pass's end does."""
        over = self.calls[unit] <= 0 and self.unreached[unit] <= 0
        if over and self.hearer.in_backward(unit) and not self._is_lent(unit):
            self.say(Moment.DONE, unit)

    def _is_lent(self, unit: str) -> bool:
        return bool(self.borrowed) and any(
            unit in others and self.hearer.in_backward(borrower) for borrower, others in self.borrowed.items()
        )
