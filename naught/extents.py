"""Extents: stretches of a file that nobody needs any more, for whoever needs some next. Pure."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import deque

from naught.layout import Span

__all__ = ["Extents"]


class Extents:
    """What is spare, in order, none of it meeting another. It comes back whenever, and in whichever thread, somebody lets go."""

    def __init__(self) -> None:
        self.spare: list[Span] = []
        self.returned: deque[Span] = deque()  # not joined with the others yet: this needs no lock, which its thread may have
        self.lock = threading.Lock()

    def take(self, nbytes: int) -> int | None:
        """Where there is room for so many, in the smallest stretch that is large enough; None: nowhere."""
        with self.lock:
            while self.returned:
                self._join(self.returned.popleft())
            fitting = [span for span in self.spare if span.numel >= nbytes]
            if not fitting:
                return None
            found = min(fitting, key=lambda span: span.numel)
            place = self.spare.index(found)
            left = Span(found.start + nbytes, found.stop)
            self.spare[place : place + 1] = [left] if left.numel else []
            return found.start

    def give_back(self, at: int, nbytes: int) -> None:
        self.returned.append(Span(at, at + nbytes))

    def _join(self, span: Span) -> None:
        """Make it one with what it meets."""
        place = bisect_left(self.spare, span)
        first = place - 1 if place and self.spare[place - 1].stop == span.start else place
        last = place + 1 if place < len(self.spare) and self.spare[place].start == span.stop else place
        met = [*self.spare[first:last], span]
        self.spare[first:last] = [Span(min(one.start for one in met), max(one.stop for one in met))]
