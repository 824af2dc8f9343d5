"""GPT: a decoder-only transformer of any shape that the planner can count, in plain PyTorch. Knows nothing of ranks.

Called as Hugging Face's models are: with token numbers alone it gives logits, with labels the mean loss of predicting
each token from those before it.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from naught.shapes import Transformer

__all__ = ["Attention", "Block", "Gpt", "Mlp"]

_STD = 0.02
_NOTHING = -100
_ROTARY_BASE = 10_000.0


class Gpt(nn.Module):
    """Embeddings, blocks and a head, with as many parameters as its shape says."""

    def __init__(self, shape: Transformer) -> None:
        super().__init__()
        self.shape = shape
        self.checkpointing = False  # whether the backward computes each block again
        self.tokens = nn.Embedding(shape.vocab, shape.hidden)
        self.positions = nn.Embedding(shape.positions, shape.hidden) if shape.positions else None
        self.embedding_norm = _norm(shape) if shape.embedding_norm else None
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = _norm(shape)
        self.head = nn.Linear(shape.hidden, shape.vocab, bias=shape.head_bias)
        if shape.tied:
            self.head.weight = self.tokens.weight
        self.apply(_start)
        for block in self.blocks:
            assert isinstance(block, Block)
            block.calm(shape.layers)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Tensor:
        at = torch.arange(input_ids.shape[1], device=input_ids.device)
        x = self.tokens(input_ids)
        if self.positions is not None:
            x = x + self.positions(at)
        if self.embedding_norm is not None:
            x = self.embedding_norm(x)
        turns = None if self.positions is not None else _turns(at, self.shape, x.dtype)
        for block in self.blocks:
            if self.checkpointing and torch.is_grad_enabled():
                x = checkpoint(block, x, turns, use_reentrant=False)
            else:
                x = block(x, turns)
        logits: Tensor = self.head(self.norm(x))
        if labels is None:
            return logits
        # The last token of a row has nothing to predict. To leave it out here is cheaper than to cut it off the logits.
        targets = F.pad(labels[:, 1:], (0, 1), value=_NOTHING)
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=_NOTHING)


class Block(nn.Module):
    """Attention and a feed-forward layer, each behind a norm and beside a way around it."""

    def __init__(self, shape: Transformer) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = _norm(shape), _norm(shape) if shape.norms > 1 else None
        # Two norms more, where a shape has them, stand behind what each part adds.
        self.after = nn.ModuleList(_norm(shape) for _ in range(max(0, shape.norms - 2)))
        self.attention, self.mlp = Attention(shape), Mlp(shape)

    def forward(self, x: Tensor, turns: Tensor | None) -> Tensor:
        normed = self.attention_norm(x)
        mixed = self.attention(normed, turns)
        if self.mlp_norm is None:  # both parts read the same
            return x + mixed + self.mlp(normed)  # type: ignore[no-any-return]  # torch's modules return Any
        x = x + (self.after[0](mixed) if self.after else mixed)
        added = self.mlp(self.mlp_norm(x))
        return x + (self.after[1](added) if len(self.after) > 1 else added)  # type: ignore[no-any-return]

    @torch.no_grad()
    def calm(self, layers: int) -> None:
        """What many layers add up starts smaller."""
        for linear in (self.attention.out, self.mlp.down):
            linear.weight.div_(math.sqrt(2 * layers))


class Attention(nn.Module):
    """Causal attention; several heads of queries may share one of keys and values."""

    def __init__(self, shape: Transformer) -> None:
        super().__init__()
        self.width = shape.q_width // shape.heads
        self.query = nn.Linear(shape.hidden, shape.q_width, bias=shape.qkv_bias)
        self.key = nn.Linear(shape.hidden, shape.kv_width, bias=shape.qkv_bias)
        self.value = nn.Linear(shape.hidden, shape.kv_width, bias=shape.qkv_bias)
        self.out = nn.Linear(shape.q_width, shape.hidden, bias=shape.out_bias)
        self.query_norm = nn.RMSNorm(self.width) if shape.qk_norm else None
        self.key_norm = nn.RMSNorm(self.width) if shape.qk_norm else None

    def forward(self, x: Tensor, turns: Tensor | None) -> Tensor:
        query, key, value = (linear(x).unflatten(-1, (-1, self.width)) for linear in (self.query, self.key, self.value))
        if self.query_norm is not None and self.key_norm is not None:
            query, key = self.query_norm(query), self.key_norm(key)
        query, key, value = (part.transpose(1, 2) for part in (query, key, value))
        if turns is not None:
            query, key = _turned(query, turns), _turned(key, turns)
        shared = key.shape[1] != query.shape[1]
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=shared)
        return self.out(mixed.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]  # torch's modules return Any


class Mlp(nn.Module):
    """Up, through a nonlinearity, and down; or gated by a second way up."""

    def __init__(self, shape: Transformer) -> None:
        super().__init__()
        self.gate = nn.Linear(shape.hidden, shape.ffn_width, bias=shape.mlp_bias) if shape.gated else None
        self.up = nn.Linear(shape.hidden, shape.ffn_width, bias=shape.mlp_bias)
        self.down = nn.Linear(shape.ffn_width, shape.hidden, bias=shape.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        raised = self.up(x)
        active = F.gelu(raised, approximate="tanh") if self.gate is None else F.silu(self.gate(x)) * raised
        return self.down(active)  # type: ignore[no-any-return]


def _norm(shape: Transformer) -> nn.Module:
    if shape.norm_bias or shape.norm_free:
        return nn.LayerNorm(shape.hidden, elementwise_affine=not shape.norm_free)
    return nn.RMSNorm(shape.hidden)


def _turns(at: Tensor, shape: Transformer, dtype: torch.dtype) -> Tensor:
    """Cosines and sines of rotary positions, one row for each."""
    width = shape.q_width // shape.heads
    rates = _ROTARY_BASE ** -(torch.arange(0, width, 2, device=at.device) / width)
    angles = at[:, None] * rates
    return torch.stack([angles.cos(), angles.sin()]).to(dtype)


def _turned(x: Tensor, turns: Tensor) -> Tensor:
    cos, sin = turns
    left, right = x.chunk(2, dim=-1)
    return torch.cat([left * cos - right * sin, left * sin + right * cos], dim=-1)


@torch.no_grad()
def _start(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        module.weight.normal_(0.0, _STD)
    if isinstance(module, nn.Linear) and module.bias is not None:
        module.bias.zero_()
