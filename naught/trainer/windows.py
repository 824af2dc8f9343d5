"""Windows: token numbers as samples of one length. Each token but the first is predicted once; an end that fills no sample is
left out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from naught.errors import UsageError
from naught.trainer.tokens import Tokens

__all__ = ["Share", "Windows", "shares"]


class Windows(Dataset[Tensor]):
    """Rows of `seq` tokens; each begins with the last token of the one before, which it predicts from."""

    def __init__(self, tokens: Tokens, seq: int, *, what: str = "data") -> None:
        self.tokens, self.seq = tokens, seq
        if seq < 2:
            raise UsageError("a sample has at least 2 tokens: one that is known and one to predict", where="data.seq")
        if len(self) < 1:
            raise UsageError(
                f"the {what} has {tokens.size} tokens, too few for one sample of {seq}",
                where="data",
                fix="give more text, or a smaller data.seq",
            )

    def __len__(self) -> int:
        return (int(self.tokens.size) - 1) // (self.seq - 1)

    def __getitem__(self, index: int) -> Tensor:
        start = index * (self.seq - 1)
        return torch.from_numpy(self.tokens[start : start + self.seq].astype(np.int64))


class Share(NamedTuple):
    """A batch of one rank in an evaluation, and how many of its rows count: where a rank has none left it computes one that
    does not, so that all ranks take as many forwards."""

    rows: Tensor
    counted: int


def shares(windows: Windows, batch: int, *, rank: int, world: int, most: int) -> Iterator[Share]:
    """A rank's part of all rows, in order; at most so many batches, or (0) all."""
    count = -(-len(windows) // (batch * world))
    for turn in range(min(count, most) if most else count):
        first = (turn * world + rank) * batch
        mine = range(first, min(first + batch, len(windows)))
        yield Share(torch.stack([windows[index] for index in mine or range(1)]), len(mine))
