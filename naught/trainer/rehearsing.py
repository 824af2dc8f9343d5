"""Rehearsing: a language model of a shape, trained for a few steps by all ranks of a small run in this one process."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from naught.comm import rehearse
from naught.devices import free_host_bytes
from naught.engine import Engine
from naught.errors import UsageError
from naught.quantity import show_bytes
from naught.shapes import Transformer
from naught.start import initialize
from naught.trainer.gpt import Gpt
from naught.trainer.simulating import Batch, suited

__all__ = ["Rehearsal", "rehearse_gpt", "train_gpt"]

_SEED = 0


class Rehearsal(NamedTuple):
    """What one rank has seen: its own losses by micro-batch, the norms of the steps, what it has sent by collective and moved
    between its tiers, and a digest of the whole weights afterwards."""

    numel: int
    losses: list[float]
    norms: list[float]
    sent: dict[str, int]
    moved: dict[str, int]
    weights: str


def rehearse_gpt(shape: Transformer, config: Mapping[str, Any], ranks: int, batch: Batch, steps: int) -> list[Rehearsal]:
    """Rank by rank, with the numbers of as many processes."""
    with torch.device("meta"):
        numel = sum(param.numel() for param in Gpt(suited(shape, batch)).parameters())
    need, free = 4 * numel * (ranks + 3), free_host_bytes()  # each builds it, and its states are split at best
    if need > free:
        raise UsageError(
            f"{ranks} ranks of this model take {show_bytes(need)} at least, and this host has {show_bytes(free)}",
            fix="take a smaller model, or leave --real out: a simulation has no contents",
        )
    return rehearse(lambda _: train_gpt(shape, config, batch, steps), ranks=ranks)


def train_gpt(shape: Transformer, config: Mapping[str, Any], batch: Batch, steps: int) -> Rehearsal:
    """What each rank does, in a process of its own as well."""
    fitting = suited(shape, batch)
    torch.manual_seed(_SEED)
    model = Gpt(fitting)
    model.checkpointing = batch.recomputes
    engine = initialize(model=model, config=config)[0]
    losses, norms = [], []
    for step in range(steps):
        for micro in range(engine.gradient_accumulation_steps()):
            ids = _tokens(fitting.vocab, batch, seed=(step, micro, engine.global_rank)).to(engine.device)
            loss = engine(ids, ids)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        norms.append(float(engine.get_global_grad_norm() or 0.0))
    found = Rehearsal(
        numel=sum(param.numel() for param in model.parameters()),
        losses=losses,
        norms=norms,
        sent=_sent(engine),
        moved=dict(engine.report()["moved"]),
        weights=_digest(engine),
    )
    engine.destroy()
    return found


def _tokens(vocab: int, batch: Batch, *, seed: tuple[int, int, int]) -> Tensor:
    step, micro, rank = seed
    drawn = torch.Generator().manual_seed((step * 1000 + micro) * 1000 + rank)
    return torch.randint(vocab, (batch.micro, batch.seq), generator=drawn)


def _sent(engine: Engine) -> dict[str, int]:
    ledger = engine.schedule.group.ledger
    return {name: ledger.total(name) for name in dict.fromkeys(name for name, _, _ in ledger.sent)}


def _digest(engine: Engine) -> str:
    sha = hashlib.sha256()
    with engine.gathered():
        for param in engine.module.parameters():
            # A copy: numpy() would pin the storage, and a pinned flat cannot be freed.
            sha.update(param.detach().cpu().clone().view(-1).view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()
