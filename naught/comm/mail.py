"""Mail: texts between ranks through their store, beside the order of collectives. For threads that work in the background."""

from __future__ import annotations

import json
import logging
import math
import sys
import threading
import time
from collections.abc import Sequence

import torch.distributed as dist

from naught.comm.standing import store_of_ranks
from naught.comm.together import Together
from naught.errors import StorageError

__all__ = ["Mail"]

_LOG = logging.getLogger("naught")
_LEAST_NAP_S, _LONGEST_NAP_S = 0.002, 0.1
_FAREWELL_S = 60.0  # for peers that have only to read what was said
_AFTER_A_FAILURE_S = 5.0  # that a script which has failed waits for peers that may have died


class Mail(Together):
    """Rank 0 collects what each says and tells all. Every rank uses the same name, and each name once."""

    def __init__(self, rank: int, size: int, *, name: str, patience_s: float) -> None:
        self.rank, self.size, self.patience_s = rank, size, patience_s
        self.prefix, self.rounds = f"naught/mail/{name}", 0
        # The store outlives the process group of a script that ends before its mail.
        self.store = store_of_ranks() if size > 1 else None

    def exchange_texts(self, text: str) -> list[str]:
        if self.store is None:
            return [text]
        try:
            return self._exchange(self.store, text)
        except RuntimeError as error:  # torch's errors of stores are some
            raise StorageError(
                f"the ranks' store is gone while a checkpoint is being saved: {error}", fix="look at the log of rank 0"
            ) from error

    def _exchange(self, store: dist.distributed_c10d.Store, text: str) -> list[str]:
        self.rounds += 1
        mine, whole = self._key(self.rank), self._key("all")
        if self.rank > 0:
            store.set(mine, text)
            self._wait([whole])
        else:
            others = [self._key(rank) for rank in range(1, self.size)]
            self._wait(others)
            said = [text, *(store.get(key).decode() for key in others)]
            store.set(whole, json.dumps(said))
            for key in others:
                store.delete_key(key)
        return list(json.loads(store.get(whole)))

    def meet(self) -> None:
        """Nobody waits: whoever writes letters goes on without hearing that they have arrived."""

    def farewell(self) -> None:
        """The last call: rank 0, whose process may hold the store, stays until the others have read their mail."""
        if self.store is None:
            return
        self.patience_s = min(self.patience_s, _FAREWELL_S)
        try:
            if self.rank > 0:
                self.store.set(f"{self.prefix}/farewell/{self.rank}", "")
            else:
                others = [f"{self.prefix}/farewell/{rank}" for rank in range(1, self.size)]
                self._wait(others)
                for key in (*others, *(f"{self.prefix}/{past + 1}/all" for past in range(self.rounds))):
                    self.store.delete_key(key)
        except (StorageError, RuntimeError) as error:
            _LOG.warning("a save is over, but not every rank may know: %s", error)

    def give_up(self) -> None:
        """A peer is gone, as another thread has found: wait for nobody any more."""
        self.patience_s = 0.0

    def _key(self, part: int | str) -> str:
        return f"{self.prefix}/{self.rounds}/{part}"

    def _wait(self, keys: Sequence[str]) -> None:
        """Look, and look again: a store that waits would keep other threads from it."""
        assert self.store is not None
        start, nap = time.monotonic(), _LEAST_NAP_S
        while not self.store.check(list(keys)):
            waited = time.monotonic() - start
            if waited > min(self.patience_s, _patience_of_the_script_s()):
                missing = [key.rpartition("/")[2] for key in keys if not self.store.check([key])]
                raise StorageError(
                    f"no word of a save from rank {', '.join('0' if name == 'all' else name for name in missing[:8])} "
                    f"for {waited:.0f} s",
                    fix="look at the log of that rank",
                )
            time.sleep(nap)
            nap = min(2 * nap, _LONGEST_NAP_S)


def _patience_of_the_script_s() -> float:
    """One that has ended well waits as long as any; the disks of others may be slower."""
    failed = not threading.main_thread().is_alive() and getattr(sys, "last_value", None) is not None
    return _AFTER_A_FAILURE_S if failed else math.inf
