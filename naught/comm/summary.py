"""Summary: a log of collectives, call by call or as a table of calls by size. Listens to ledgers; sends nothing itself."""

from __future__ import annotations

import itertools
import logging
from collections import Counter
from collections.abc import Iterable
from weakref import WeakValueDictionary

from naught.comm.ledger import Ledger
from naught.quantity import show_bytes
from naught.text import table

__all__ = ["CallLog", "listen", "log_summary"]

_LOG = logging.getLogger("naught")

_HEADER = ("collective", "message", "calls", "sent")

# What a name means once its case and punctuation are gone: all_gather_into_tensor and "all-gather" are one thing. A sum that
# all ranks get is made of two collectives here.
_MEANINGS = {
    "allgather": ("all-gather",),
    "reducescatter": ("reduce-scatter",),
    "allreduce": ("reduce-scatter", "all-gather"),
    "broadcast": ("broadcast",),
}

# In the order in which they were made. A log lives as long as the ledger that it listens to.
_LOGS: WeakValueDictionary[int, CallLog] = WeakValueDictionary()
_NUMBERS = itertools.count()


def log_summary(show_straggler: bool = False) -> str:
    """Log how often this rank has called each collective and what it has sent, of every engine whose comms_logger is enabled,
    and return the text. Only rank 0 keeps such a log: on other ranks the text is empty. Nobody is compared with others."""
    del show_straggler
    texts = [log.table() for log in list(_LOGS.values())]
    for text in texts:
        _LOG.info("collectives of this rank\n%s", text)
    return "\n\n".join(texts)


def listen(ledger: Ledger, *, ops: Iterable[str] | None, verbose: bool, debug: bool) -> CallLog:
    """From here on keep a log of a ledger's collectives, of these or (None) of all."""
    log = CallLog(None if ops is None else _wanted(ops), verbose=verbose, debug=debug)
    ledger.listener = log
    _LOGS[next(_NUMBERS)] = log
    return log


def _wanted(ops: Iterable[str]) -> frozenset[str]:
    """Our names of collectives that users name as we do, as torch does or as DeepSpeed does."""
    wanted: set[str] = set()
    for op in ops:
        plain = "".join(letter for letter in op.lower() if letter.isalpha())
        meant = [name for key, names in _MEANINGS.items() if key in plain for name in names]
        if not meant:
            _LOG.warning(
                'comms_logger.prof_ops: nothing that is sent is a "%s"; there are all-gather, reduce-scatter and broadcast', op
            )
        wanted |= set(meant)
    return frozenset(wanted)


class CallLog:
    """Counts calls by collective and message size, and logs each if it is verbose."""

    def __init__(self, wanted: frozenset[str] | None, *, verbose: bool, debug: bool) -> None:
        self.wanted, self.verbose, self.debug = wanted, verbose, debug
        self.calls: Counter[tuple[str, int]] = Counter()

    def __call__(self, collective: str, unit: str, phase: str, nbytes: int) -> None:
        if self.wanted is not None and collective not in self.wanted:
            return
        self.calls[collective, nbytes] += 1
        if self.verbose:
            caller = f" for {unit or 'root'}" if self.debug else ""
            _LOG.info("%s%s: %s in %s", collective, caller, show_bytes(nbytes), phase)

    def table(self) -> str:
        """Calls by collective, the smallest messages first. A message is what this rank sends in one call."""
        rows = [
            (collective, show_bytes(nbytes), str(calls), show_bytes(nbytes * calls))
            for (collective, nbytes), calls in sorted(self.calls.items())
        ]
        return table(_HEADER, rows)
