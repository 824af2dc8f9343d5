"""Simulating: a language model of a shape, without contents, trained by an engine as one of many ranks that are not there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from naught.comm import World
from naught.shapes import Transformer
from naught.simulation import Simulated, simulate
from naught.trainer.gpt import Gpt

__all__ = ["Batch", "simulate_gpt", "suited"]

_VOCAB = 51_200  # of shapes that do not say, as those of the papers


class Batch(NamedTuple):
    """Samples in one forward of one rank, tokens of each, and whether blocks are computed again in the backward."""

    micro: int
    seq: int
    recomputes: bool


def simulate_gpt(shape: Transformer, config: Mapping[str, Any], world: World, batch: Batch) -> Simulated:
    with torch.device("meta"):
        ids = torch.zeros(batch.micro, batch.seq, dtype=torch.long)
        model = Gpt(suited(shape, batch))
    model.checkpointing = batch.recomputes
    return simulate(model, config, world, lambda engine: engine(ids, ids))


def suited(shape: Transformer, batch: Batch) -> Transformer:
    """A shape with all that a module needs: a vocabulary, and as many positions as a sample has tokens. Rotary ones turn pairs: a
    shape whose heads have none, as one that was made of a number of parameters may, has positions of its own."""
    odd = shape.q_width // shape.heads % 2
    positions = max(shape.positions, batch.seq) if shape.positions or odd else 0
    return replace(shape, vocab=shape.vocab or _VOCAB, positions=positions)
