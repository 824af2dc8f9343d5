"""Presets: models known by name, and a GPT of the papers' proportions for any number of parameters. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from naught.quantity import show_count
from naught.shapes import Model, Run, Transformer

__all__ = ["GPT2", "PRESETS", "gpt_of_count"]

GPT2 = Transformer(
    layers=12, hidden=768, heads=12, positions=1024, qkv_bias=True, out_bias=True, mlp_bias=True, norm_bias=True, tied=True
)
_LLAMA = Transformer(layers=32, hidden=4096, heads=32, ffn=11008, vocab=32000, gated=True)


def _paper(layers: int, hidden: int, heads: int) -> Transformer:
    """A model as the papers count it: 12 * layers * hidden^2, embeddings and vectors left out."""
    return Transformer(layers=layers, hidden=hidden, heads=heads, vocab=0, norm_free=True)


PRESETS: Mapping[str, Transformer] = MappingProxyType(
    {
        "gpt2": GPT2,
        "gpt2-medium": replace(GPT2, layers=24, hidden=1024, heads=16),
        "gpt2-large": replace(GPT2, layers=36, hidden=1280, heads=20),
        "gpt2-1.5b": replace(GPT2, layers=48, hidden=1600, heads=25),
        "llama-7b": _LLAMA,
        "llama-13b": replace(_LLAMA, layers=40, hidden=5120, heads=40, ffn=13824),
        "llama-30b": replace(_LLAMA, layers=60, hidden=6656, heads=52, ffn=17920),
        "llama-65b": replace(_LLAMA, layers=80, hidden=8192, heads=64, ffn=22016),
        "llama2-70b": replace(_LLAMA, layers=80, hidden=8192, heads=64, kv_heads=8, ffn=28672),
        "llama3-8b": replace(_LLAMA, kv_heads=8, ffn=14336, vocab=128256),
        "llama3-70b": replace(_LLAMA, layers=80, hidden=8192, heads=64, kv_heads=8, ffn=28672, vocab=128256),
        "llama3-405b": replace(_LLAMA, layers=126, hidden=16384, heads=128, kv_heads=8, ffn=53248, vocab=128256),
        "llama3.2-1b": replace(_LLAMA, layers=16, hidden=2048, kv_heads=8, ffn=8192, vocab=128256, tied=True),
        "mistral-7b": replace(_LLAMA, kv_heads=8, ffn=14336),
        "qwen2.5-7b": replace(_LLAMA, layers=28, hidden=3584, heads=28, kv_heads=4, ffn=18944, vocab=152064, qkv_bias=True),
        # ZeRO, table 4; the 40B and 60B rows with the hidden size that gives their names.
        "zero-1.5b": _paper(48, 1600, 16),
        "zero-8b": _paper(72, 3072, 24),
        "zero-40b": _paper(88, 6144, 32),
        "zero-60b": _paper(132, 6144, 32),
        "zero-80b": _paper(100, 8192, 64),
        "zero-100b": _paper(125, 8192, 64),
        "zero-120b": _paper(150, 8192, 64),
        "zero-140b": _paper(175, 8192, 64),
        "zero-170b": _paper(212, 8192, 64),
        # ZeRO-Offload, table 3.
        "offload-1b": _paper(20, 2048, 16),
        "offload-4b": _paper(64, 2304, 16),
        "offload-10b": _paper(50, 4096, 32),
        "offload-13b": _paper(65, 4096, 32),
        "offload-70b": _paper(69, 9216, 72),
        # ZeRO-Infinity, figure 2a and table 1.
        "infinity-0.1t": _paper(80, 10240, 128),
        "infinity-0.5t": _paper(100, 20480, 160),
        "infinity-1t": _paper(128, 25600, 256),
        "infinity-10t": _paper(195, 65536, 512),
        "infinity-20t": _paper(205, 90112, 1024),
        "infinity-100t": _paper(315, 163840, 1024),
    }
)


# Shapes of the papers, by which a bare count gets its hidden size: parameters, hidden.
_ANCHORS = (
    (1e6, 128),
    (124e6, 768),
    (1.5e9, 1600),
    (8e9, 3072),
    (13e9, 4096),
    (100e9, 8192),
    (1e12, 25600),
    (1e13, 65536),
    (1e14, 163840),
)


def gpt_of_count(numel: int) -> Model:
    """A GPT of this many parameters in equal blocks, with the proportions of the papers' models."""
    x = math.log(min(max(numel, _ANCHORS[0][0]), _ANCHORS[-1][0]))
    upper = next(at for at in range(1, len(_ANCHORS)) if x <= math.log(_ANCHORS[at][0]) + 1e-12)
    (low_n, low_h), (high_n, high_h) = _ANCHORS[upper - 1], _ANCHORS[upper]
    share = (x - math.log(low_n)) / (math.log(high_n) - math.log(low_n))
    hidden = max(64, round(low_h * (high_h / low_h) ** share / 64) * 64)
    layers = max(1, round(numel / (12 * hidden**2)))
    shape = _paper(layers, hidden, max(1, hidden // 128))
    note = f"only a count was given: planned as {layers} equal blocks of hidden size {hidden}, without embeddings"
    return Model(show_count(numel), (Run("block", -(-numel // layers), layers),), shape, note)
