"""Watchdog: a thread that notices when a rank does not get on, has every rank say where it is, and logs it once. It ends
nothing, keeps nothing alive, and leaves the order of collectives alone."""

from __future__ import annotations

import faulthandler
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from naught.comm import Group
from naught.comm.board import Board
from naught.devices import Mark
from naught.errors import StorageError
from naught.quantity import show_seconds
from naught.stall import Place, story_of
from naught.watch import Watch

__all__ = ["Watchdog"]

_LOG = logging.getLogger("naught")
_SHORTEST_NAP_S, _LONGEST_NAP_S = 0.1, 5.0
_LEAST_SILENCE_S = 3.0  # after which a rank is said to say nothing
_FAREWELL_S = 1.0  # that the end of an engine waits for the thread
_ERRORS = 2  # the system's number of the stream: Python's own may be somebody's buffer


class Watchdog:
    """Knows in which phase its rank is. Once started it looks whether all ranks get on, as long as they are many, can
    stall, and `patience_s` is not 0."""

    def __init__(self, group: Group, watch: Watch, patience_s: float) -> None:
        self.group, self.watch, self.patience_s = group, watch, patience_s
        self.step = 1  # under way, or next
        self.phase = self.past = ""  # the one that the engine is in, and the one that it has left
        self.left: Mark | None = None  # where the watch was when the engine left that
        self.rests = False  # nothing is to be noticed for a while
        self.sentry: _Sentry | None = None  # None: nobody looks

    def start(self) -> None:
        if self.group.size > 1 and self.group.stalls and self.patience_s > 0:
            self.sentry = _Sentry(self.group, self.patience_s, self.place)
            self.sentry.start()

    def stop(self) -> None:
        """Also at the end of a script: from here on the store is left alone."""
        if self.sentry is not None:
            self.sentry.stop()

    @contextmanager
    def within(self, phase: str, step: int) -> Iterator[None]:
        """The engine is in a phase of a step meanwhile."""
        self.step = step
        outer, self.phase = self.phase, f"{'update' if phase == 'step' else phase} of step {self.step}"
        try:
            yield
        finally:
            self.past, self.phase, self.left = self.phase, outer, self.watch.began

    @contextmanager
    def resting(self) -> Iterator[None]:
        """What is done meanwhile may take as long as a disk takes, and tells of its errors itself."""
        before, self.rests = self.rests, True
        try:
            yield
        finally:
            self.rests = before

    def place(self) -> Place:
        """Where this rank is now. A phase also begins where a user calls the model or a backward by himself; it is only known
        to be over where the engine has left it."""
        ledger, began, phase = self.watch.ledger, self.watch.began, self.phase
        if self.rests:
            return Place(None, "", self.past, ledger.latest)
        if not phase and began is not None and began is not self.left:
            phase = f"{ledger.phase} of step {self.step}"
        return Place(ledger.inside, phase, self.past, ledger.latest, None if began is None else began.seconds)


class _Sentry(threading.Thread):
    """Looks every few seconds whether its own rank gets on, and whether another one asks.

    A round of questions has a number, which all ranks count alike: whoever asks pins up where it is and then the question,
    and everybody answers with a note. Of those who have asked at the same time the lowest rank tells.
    """

    def __init__(self, group: Group, patience_s: float, where: Callable[[], Place]) -> None:
        super().__init__(name="naught-watchdog", daemon=True)
        self.rank, self.size, self.where = group.rank, group.size, where
        # Of a rank that waits for others, and of one that computes: if that was too long once, it is slow, and may be so again.
        self.patience_s = {True: patience_s, False: patience_s}
        self.board = Board(f"watchdog/{group.number}")
        self.nap_s = min(patience_s / 4, _LONGEST_NAP_S)
        self.over, self.ended = threading.Event(), False
        self.round = 0
        self.stalled = _Stalled(where(), time.monotonic(), patience_s)

    def run(self) -> None:
        try:
            while self._nap(self.nap_s):
                self._look(self.where(), time.monotonic())
        except StorageError as error:
            _LOG.debug("the watchdog ends: %s", error)

    def stop(self) -> None:
        self.ended = True
        if threading.current_thread() is not self:  # a collection of garbage that ends an engine may be in this very thread
            self.over.set()
            if self.is_alive():
                self.join(_FAREWELL_S)

    def _nap(self, seconds: float) -> bool:
        """Whether there is still something to look at afterwards."""
        return not self.over.wait(seconds) and not self.ended and self.board.is_open()

    def _look(self, place: Place, now: float) -> None:
        if place != self.stalled.place:
            if self.stalled.told:
                _LOG.warning("progress again, after %s", show_seconds(now - self.stalled.since_s))
            self.stalled = _Stalled(place, now, self.patience_s[place.waits is not None])
        asked = self.board.read(f"{self.round}/asked") is not None
        if asked or (place.busy and now - self.stalled.since_s >= self.stalled.patience_s):
            self._say(place, asks=not asked)

    def _say(self, place: Place, *, asks: bool) -> None:
        _write_stacks(self.rank)
        number, self.round, seconds = self.round, self.round + 1, self.stalled.patience_s
        if place.busy:
            self.stalled.patience_s = 2 * seconds
            self.patience_s[False] = self.patience_s[False] if place.waits else 2 * seconds
        note = f"{int(asks)} {place.to_text()}"
        self.board.pin(f"{number}/{self.rank}", note)
        if asks:
            self.board.pin(f"{number}/asked", "")
            self.stalled.told = self._tell(number, {self.rank: note}, seconds)

    def _tell(self, number: int, notes: dict[int, str], seconds: float) -> bool:
        """Wait for the notes of all, and log them unless that is for another rank to do."""
        end_s = time.monotonic() + max(2 * self.nap_s, _LEAST_SILENCE_S)
        while len(notes) < self.size and time.monotonic() < end_s:
            if not self._nap(min(self.nap_s, _SHORTEST_NAP_S)):
                return False
            found = {rank: self.board.read(f"{number}/{rank}") for rank in range(self.size) if rank not in notes}
            notes |= {rank: note for rank, note in found.items() if note is not None}
        tells = self.rank == min(rank for rank, note in notes.items() if note.startswith("1"))
        if tells:
            places = {rank: Place.from_text(note.partition(" ")[2]) for rank, note in notes.items()}
            _LOG.warning("%s", story_of(seconds, {rank: places.get(rank) for rank in range(self.size)}))
        return tells


@dataclass
class _Stalled:
    """Where a rank has been since when, after how long that is too long, and whether this rank has told of it."""

    place: Place
    since_s: float
    patience_s: float
    told: bool = False


def _write_stacks(rank: int) -> None:
    with suppress(OSError):  # nobody listens
        os.write(_ERRORS, f"naught: no progress; the stacks of rank {rank}:\n".encode())
    faulthandler.dump_traceback(_ERRORS)
