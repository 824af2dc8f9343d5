"""Together: ranks that succeed or fail as one. What goes wrong on one of them is raised on all, as the same kind of error."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager

from naught.errors import ConfigError, NaughtError, UsageError

__all__ = ["Together", "heard", "told"]


class Together(ABC):
    """Ranks that can tell each other texts."""

    rank: int
    size: int

    @abstractmethod
    def exchange_texts(self, text: str) -> list[str]:
        """Every rank's text, in the order of the ranks."""

    def meet(self) -> None:
        """Wait for everybody."""
        self.exchange_texts("")

    @contextmanager
    def together(self) -> Iterator[None]:
        """What goes wrong inside on one rank goes wrong on all. No collectives inside."""
        try:
            yield
        except Exception as error:
            self.raise_together(error)
        else:
            self.raise_together(None)

    def raise_together(self, amiss: Exception | None) -> None:
        """Raise on every rank if something is amiss on any: a rank what it has found, the others what the first one has."""
        texts = self.exchange_texts("" if amiss is None else told(amiss))
        if amiss is not None:
            raise amiss
        for rank, text in enumerate(texts):
            if text:
                raise heard(rank, text)


def told(error: BaseException) -> str:
    notes = getattr(error, "__notes__", [])
    if isinstance(error, NaughtError) and not isinstance(error, ConfigError):
        return json.dumps([type(error).__name__, error.what, error.where, error.fix, notes])
    kind = "" if isinstance(error, NaughtError) else f"{type(error).__name__}: "
    return json.dumps([UsageError.__name__, f"{kind}{error}", "", "", notes])


def heard(rank: int, text: str) -> NaughtError:
    """A peer's error. Its kind is looked up among ours: a name that is sent is never imported."""
    name, what, where, fix, notes = json.loads(text)
    here = f"rank {rank}"
    place = where if here in where.split(", ") else ", ".join(filter(None, (where, here)))  # it may have been heard there before
    error = _kinds(NaughtError).get(name, UsageError)(what, where=place, fix=fix)
    for note in notes:
        error.add_note(note)
    return error


def _kinds(root: type[NaughtError]) -> dict[str, type[NaughtError]]:
    found = {root.__name__: root}
    for kind in root.__subclasses__():
        found |= _kinds(kind)
    return found
