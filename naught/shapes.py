"""Shapes: a transformer as far as its parameters and activations depend on it, counted without building anything. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

__all__ = ["Model", "Run", "Transformer"]


class Run(NamedTuple):
    """A row of units of one size, in the order of the forward pass.

    `frozen` of a unit's elements are never trained. An `outer` unit is in use around all the others: the root, which
    holds what is tied. `sums` has the elements of each of a unit's flats of gradients;
    without it there is one, of all that is trained.
    """

    name: str
    numel: int
    repeat: int = 1
    frozen: int = 0
    outer: bool = False
    sums: tuple[int, ...] = ()

    @property
    def flats_of_sums(self) -> tuple[int, ...]:
        trained = self.numel - self.frozen
        return self.sums or ((trained,) if trained else ())


@dataclass(frozen=True)
class Transformer:
    """A decoder-only transformer, as far as its parameters and activations depend on it."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int = 0  # 0: as many as heads
    head_dim: int = 0  # 0: hidden / heads
    ffn: int = 0  # 0: four times hidden
    vocab: int = 50257
    positions: int = 0  # rows of a learned position table
    gated: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    head_bias: bool = False
    norm_bias: bool = False
    norms: int = 2  # in a block; each of `hidden` weights
    qk_norm: bool = False
    embedding_norm: bool = False
    norm_free: bool = False  # the papers count matrices alone
    tied: bool = False

    @property
    def q_width(self) -> int:
        return self.heads * (self.head_dim or self.hidden // self.heads)

    @property
    def kv_width(self) -> int:
        return (self.kv_heads or self.heads) * (self.head_dim or self.hidden // self.heads)

    @property
    def ffn_width(self) -> int:
        return self.ffn or 4 * self.hidden

    @property
    def norm_numel(self) -> int:
        return 0 if self.norm_free else self.hidden * (2 if self.norm_bias else 1)

    @property
    def block_numel(self) -> int:
        qkv = self.q_width + 2 * self.kv_width
        attention = self.hidden * qkv + self.q_width * self.hidden
        attention += qkv * self.qkv_bias + self.hidden * self.out_bias
        attention += 2 * (self.head_dim or self.hidden // self.heads) * self.qk_norm
        ups = 2 if self.gated else 1
        mlp = (ups + 1) * self.hidden * self.ffn_width + (ups * self.ffn_width + self.hidden) * self.mlp_bias
        return attention + mlp + self.norms * self.norm_numel

    @property
    def runs(self) -> tuple[Run, ...]:
        embedding = (self.vocab + self.positions) * self.hidden + self.norm_numel * self.embedding_norm
        head = self.vocab * self.hidden * (not self.tied) + self.vocab * self.head_bias + self.norm_numel
        blocks = Run("block", self.block_numel, self.layers)
        if self.tied:
            return (Run("embedding and head", embedding + head, outer=True), blocks)
        return tuple(run for run in (Run("embedding", embedding), blocks, Run("head", head)) if run.numel)


@dataclass(frozen=True)
class Model:
    """What the planner knows of a model: the sizes of its units, and its shape where it is a transformer."""

    name: str
    runs: tuple[Run, ...]
    shape: Transformer | None
    note: str = ""

    @property
    def numel(self) -> int:
        return sum(run.numel * run.repeat for run in self.runs)
