"""Evaluating: the mean loss of the validation data, over all ranks."""

from __future__ import annotations

import torch

from naught.engine import Engine
from naught.trainer.models import loss_of
from naught.trainer.windows import Windows, shares

__all__ = ["evaluate"]


def evaluate(engine: Engine, windows: Windows, *, batches: int) -> float:
    """The loss in nats a token: of so many batches of each rank, or (0) of all the data. All ranks must call."""
    group, batch = engine.schedule.group, engine.train_micro_batch_size_per_gpu()
    total, counted = 0.0, 0
    engine.eval()
    with torch.no_grad():
        for rows, count in shares(windows, batch, rank=group.rank, world=group.size, most=batches):
            ids = rows.to(engine.device)
            loss = loss_of(engine(input_ids=ids, labels=ids))
            total, counted = total + float(loss) * count, counted + count
    engine.train()
    sums = group.exchange(torch.tensor([total, counted], dtype=torch.float64)).sum(dim=0)
    return float(sums[0] / sums[1])
