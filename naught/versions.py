"""Versions: how often parameters had been written to when the engine last knew what they hold."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

__all__ = ["Versions"]


class Versions:
    """As autograd counts them: also through views, but not through `.data`."""

    def __init__(self, params: Sequence[nn.Parameter]) -> None:
        self.params = params
        self.counts: list[int] = []
        self.renew()

    def renew(self) -> None:
        """What the parameters hold now is known."""
        self.counts = [param._version for param in self.params]

    def first_written(self) -> int | None:
        """Which parameter somebody has written to since, the first one; None: nobody has to any."""
        pairs = enumerate(zip(self.counts, self.params, strict=True))
        return next((at for at, (count, param) in pairs if param._version != count), None)
