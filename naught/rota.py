"""Rota: a crew for what has no contents. Everything is done at once, each piece as if by the next of so many threads: what each
would need is counted, and the count is the same every time."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future

import torch
from torch import Tensor

__all__ = ["Rota"]

_NOBODY = -1  # none of the crew: whoever asks it


class Rota:
    """So many who take turns."""

    def __init__(self, size: int) -> None:
        self.size, self.next, self.now = size, 0, _NOBODY

    def worker(self) -> int:
        """Whose turn it is."""
        return self.now

    def ask(self, pieces: int, do: Callable[[int], None]) -> Future[None]:
        over: Future[None] = Future()
        before = self.now
        try:
            for piece in range(pieces):
                self.now, self.next = self.next, (self.next + 1) % self.size
                do(piece)
        except BaseException as error:  # whoever waits for the job is told
            over.set_exception(error)
            return over
        finally:
            self.now = before
        over.set_result(None)
        return over

    def scratch(self, numel: int) -> Tensor:
        return torch.empty(numel, device="meta")

    def stop(self) -> None:
        """All is done that was asked."""
