"""Turns: ranks as threads of one process, of which one runs at a time. A turn ends where a rank waits for something that is not
there yet, so a debugger that stops one stops all. Nobody waits for a time: where no rank can go on, all hear of it at once."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from naught.comm.together import heard, told
from naught.errors import NaughtError, ScheduleError, UsageError
from naught.running import Rank, become

__all__ = ["Turns"]

Result = TypeVar("Result")
Keep = Callable[[], Callable[[], None]]  # look how things are, and return what makes them so again

_FAREWELL_S = 5.0  # for ranks that run while somebody interrupts them all
# Ranks that do little but wait for each other pass the interpreter on among themselves, and another thread that wants it, such as
# the one that hears of an interrupt, may never have it: after so many turns nobody has it for a moment.
_TURNS_BETWEEN_PAUSES, _PAUSE_S = 64, 1e-4


class _Wait(NamedTuple):
    is_over: Callable[[], bool]
    where: str


@dataclass(eq=False)
class _Player:
    """A rank, and how things were when its last turn ended."""

    rank: Rank
    restore: Callable[[], None]
    turn: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    waits: _Wait | None = None  # None: it runs, has not begun, or has ended
    ended: bool = False
    error: BaseException | None = None  # None: it has not failed

    def can_go_on(self) -> bool:
        return not self.ended and (self.waits is None or self.waits.is_over())


class Turns:
    """Every rank has its turn in their order. Only the one that has it calls anything here."""

    def __init__(self, keep: Keep, fix: str) -> None:
        self.keep, self.fix = keep, fix
        self.players: list[_Player] = []
        self.fault: Callable[[], NaughtError] | None = None  # what ends all of them; None: nothing yet
        self.first: _Player | None = None  # that has failed
        self.all_over = threading.Semaphore(0)
        self.taken = 0  # turns

    def run(self, ranks: Sequence[Rank], play: Callable[[int], Result]) -> list[Result]:
        """What each rank returns. If one fails all do, and its error is raised here."""
        self.players = [_Player(rank, self.keep()) for rank in ranks]
        results: dict[int, Result] = {}
        threads = [
            threading.Thread(target=self._live, args=(player, play, results), name=f"rank {player.rank.rank}", daemon=True)
            for player in self.players
        ]
        restore = self.keep()
        try:
            for thread in threads:
                thread.start()
            self._hand_to(self.players[0])
            self.all_over.acquire()
        except BaseException:
            self.fault = _interrupted
            for thread in threads:
                thread.join(_FAREWELL_S / len(threads))
            raise
        finally:
            become(None)
            restore()
        if self.fault is not None:
            raise self._cause() or self.fault()
        return [results[rank] for rank in range(len(self.players))]

    def wait(self, rank: int, is_over: Callable[[], bool], where: str) -> None:
        """Let others go on until something is there. Raises if one of them has failed, or if nobody can go on."""
        me = self.players[rank]
        if not is_over():
            me.waits = _Wait(is_over, where)
            self._pass_on(me)
            me.waits = None
        if self.fault is _interrupted or not is_over():
            assert self.fault is not None, "else it would not have its turn"
            raise self.fault()

    def _live(self, player: _Player, play: Callable[[int], Result], results: dict[int, Result]) -> None:
        player.turn.acquire()
        try:
            results[player.rank.rank] = play(player.rank.rank)
        except BaseException as error:
            self._fail(player, error)
        player.ended = True
        self._pass_on(player)

    def _fail(self, player: _Player, error: BaseException) -> None:
        player.error, text = error, told(error)
        self.first = self.first or player
        self.fault = self.fault or (lambda: heard(player.rank.rank, text))

    def _pass_on(self, player: _Player) -> None:
        """Let the next one that can go on do so, and come back when it is this one's turn again, unless it has ended."""
        if all(other.ended for other in self.players):
            self.all_over.release()
            return
        following = next((other for other in self._behind(player) if self._may_go_on(other)), None)
        if following is None:
            self._get_stuck()
            following = next(other for other in self._behind(player) if not other.ended)
        if following is player:
            return
        player.restore = self.keep()
        self.taken += 1
        if self.taken % _TURNS_BETWEEN_PAUSES == 0:
            time.sleep(_PAUSE_S)
        self._hand_to(following)
        if not player.ended:
            player.turn.acquire()

    def _behind(self, player: _Player) -> Iterator[_Player]:
        """The others in their order, and then itself."""
        at = self.players.index(player) + 1
        yield from (*self.players[at:], *self.players[:at])

    def _may_go_on(self, player: _Player) -> bool:
        return player.can_go_on() or (self.fault is not None and not player.ended)  # to hear of it

    def _hand_to(self, player: _Player) -> None:
        become(player.rank)
        player.restore()
        player.turn.release()

    def _get_stuck(self) -> None:
        """Everybody waits for somebody."""
        places = (
            f"rank {player.rank.rank} {'has ended' if player.waits is None else f'waits in {player.waits.where}'}"
            for player in self.players
        )
        text = f"the ranks wait for each other: {'; '.join(places)}"
        self.fault = lambda: ScheduleError(text, fix=self.fix)

    def _cause(self) -> BaseException | None:
        """The error of the rank that has failed first; or, if another has told it of that, that one's. None: nobody has failed
        before all were stuck."""
        if self.first is None:
            return None
        where = self.first.error.where if isinstance(self.first.error, NaughtError) else ""
        tellers = (player for player in self.players if player.error is not None and where.endswith(f"rank {player.rank.rank}"))
        return next(tellers, self.first).error


def _interrupted() -> NaughtError:
    return UsageError("all ranks of this process were interrupted")
