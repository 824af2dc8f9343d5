"""Beside: an update of a segment on the host that runs beside everything else, and new weights that follow it up."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future

from torch import Tensor

from naught.ferry import Arrival, Ferry
from naught.host_crew import Crew
from naught.rounding import Rounds

__all__ = ["Beside", "Delivered"]


class Beside:
    """What is under way of one segment, if anything is."""

    def __init__(self, crew: Crew, ferry: Ferry, rounds: Rounds) -> None:
        self.crew, self.ferry, self.rounds = crew, ferry, rounds
        self.updating: Future[None] | None = None  # an update that may not be over
        self.coming: Arrival | Delivered | None = None  # new weights that may still be on their way to where they rest
        self.behind = False  # weights do not follow the last update yet

    def update(self, pieces: int, do: Callable[[int], None]) -> Future[None]:
        """Have it updated, piece by piece, once the last update is over and what it has left has been copied away."""
        last, coming = self.updating, self.coming
        if not pieces and last is not None:  # nothing to add to what is under way
            return last

        def do_in_turn(piece: int) -> None:
            if last is not None:
                last.result()
            if coming is not None:
                coming.leave_source()
            do(piece)

        self.updating = self.crew.ask(pieces, do_in_turn)
        return self.updating

    def wait(self) -> None:
        """Until no update is under way, and nobody reads its result any more: the thread that has ended an update brings up new
        weights afterwards. One that failed is never over."""
        if self.updating is not None:
            self.updating.result()
            self.updating = None
        if self.coming is not None:
            self.coming.wait_here()

    def forget_failure(self) -> bool:
        """Have an update that has failed be over, once it is, for whoever replaces what it has left; whether there was one."""
        if self.updating is None or self.updating.exception() is None:
            return False
        self.updating = self.coming = None
        return True

    def bring(self, masters: Tensor, into: Tensor) -> Arrival:
        """Weights as the update leaves them."""
        return Arrival(self.ferry, masters, into, self.updating, self.rounds)

    def arrive(self) -> None:
        """From here on the device finds new weights where they rest."""
        if self.coming is not None:
            self.coming.wait()
            self.coming = None


class Delivered:
    """Weights that an update itself brings to where they rest, a tile at a time."""

    def __init__(self, updated: Future[None]) -> None:
        self.updated = updated

    def wait_here(self) -> None:
        self.updated.result()

    def leave_source(self) -> None:
        self.updated.result()

    def wait(self) -> None:
        self.updated.result()
