"""Shapes: transformer models known by name, by a short text, by a count or by a Hugging Face config.json.

Pure: counts parameters without building anything. A module that is not one of these families is described from
Python instead (`naught.plan_for`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from naught.errors import ModelError, NaughtError
from naught.quantity import parse_count, show_count

__all__ = ["PRESETS", "Model", "Run", "Transformer", "gpt_of_count", "parse_model", "transformer_from_hf"]


class Run(NamedTuple):
    """A row of units of one size, in the order of the forward pass.

    `frozen` of a unit's elements are never trained. An `outer` unit is in use around all the others: the root, which
    holds what is tied.
    """

    name: str
    numel: int
    repeat: int = 1
    frozen: int = 0
    outer: bool = False


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


_GPT2 = Transformer(
    layers=12, hidden=768, heads=12, positions=1024, qkv_bias=True, out_bias=True, mlp_bias=True, norm_bias=True, tied=True
)
_LLAMA = Transformer(layers=32, hidden=4096, heads=32, ffn=11008, vocab=32000, gated=True)


def _paper(layers: int, hidden: int, heads: int) -> Transformer:
    """A model as the papers count it: 12 * layers * hidden^2, embeddings and vectors left out."""
    return Transformer(layers=layers, hidden=hidden, heads=heads, vocab=0, norm_free=True)


PRESETS: Mapping[str, Transformer] = MappingProxyType(
    {
        "gpt2": _GPT2,
        "gpt2-medium": replace(_GPT2, layers=24, hidden=1024, heads=16),
        "gpt2-large": replace(_GPT2, layers=36, hidden=1280, heads=20),
        "gpt2-1.5b": replace(_GPT2, layers=48, hidden=1600, heads=25),
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


def parse_model(text: str) -> Model:
    """A model from a preset's name, gpt:layers=..., a count such as 7.5B, or a config.json or its folder."""
    if text.lower() in PRESETS:
        return _model(text.lower(), PRESETS[text.lower()])
    if text.startswith("gpt:"):
        return _model(text, _parse_gpt(text))
    path = Path(text)
    try:
        found = path.exists()
    except OSError:  # a name too long to be a path is not one
        found = False
    if found:
        return _model(str(path), transformer_from_hf(_read_json(path / "config.json" if path.is_dir() else path)))
    try:
        numel = parse_count(text, what="model")
    except NaughtError:
        raise _unknown_model(text) from None
    if numel < 1:
        raise ModelError(f'model "{text}" has no parameters')
    return gpt_of_count(numel)


def _unknown_model(text: str) -> ModelError:
    near = get_close_matches(text.lower(), PRESETS, n=1)
    return ModelError(
        f'no model "{text[:200]}"' + (f"; did you mean {near[0]}?" if near else ""),
        fix="give a preset (naught plan --models lists them), gpt:layers=48,hidden=1600,heads=25, a count such as 7.5B, "
        "or the path of a Hugging Face config.json",
    )


def _model(name: str, shape: Transformer) -> Model:
    return Model(name, shape.runs, shape)


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


_GPT_KEYS = ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "positions", "tied")


def _parse_gpt(text: str) -> Transformer:
    given: dict[str, Any] = {}
    for item in filter(None, text.removeprefix("gpt:").split(",")):
        key, _, value = (part.strip() for part in item.partition("="))
        if key not in _GPT_KEYS:
            near = get_close_matches(key, _GPT_KEYS, n=1)
            guess = f"; did you mean {near[0]}?" if near else ""
            raise ModelError(f'unknown key "{key}" in "{text[:200]}"{guess}', fix=f"the keys are {', '.join(_GPT_KEYS)}")
        if key in given:
            raise ModelError(f'key "{key}" stands twice in "{text[:200]}"')
        given[key] = _positive(key, value, text, least=0 if key in ("vocab", "positions", "tied") else 1)
    for key in ("layers", "hidden"):
        if key not in given:
            raise ModelError(f'"{text[:200]}" does not say {key}', fix="write gpt:layers=48,hidden=1600,heads=25")
    given.setdefault("heads", max(1, given["hidden"] // 64))
    given["tied"] = bool(given.get("tied", 1))
    if given["hidden"] % given["heads"] or given["heads"] % given.get("kv_heads", given["heads"]):
        raise ModelError(f'in "{text[:200]}" heads must divide hidden, and kv_heads must divide heads')
    return replace(_GPT2, **given)


def _positive(key: str, value: str, text: str, *, least: int) -> int:
    try:
        number = parse_count(value, what=key)
    except NaughtError:
        number = -1
    if number < least or number >= 2**40:
        raise ModelError(f'{key}={value} in "{text[:200]}" must be a whole number from {least}')
    return number


class _Family(NamedTuple):
    """How a Hugging Face model type differs: fixed traits, and which config keys carry which of ours."""

    traits: Mapping[str, Any]
    keys: Mapping[str, str]  # ours -> theirs, old and new names parted by |
    tied: bool
    offset: int = 0  # rows that the position table has beyond the config's number


_MODERN = {
    "layers": "num_hidden_layers",
    "hidden": "hidden_size",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "ffn": "intermediate_size",
    "vocab": "vocab_size",
}
_OLD = {"layers": "n_layer", "hidden": "n_embd", "heads": "n_head", "ffn": "n_inner", "vocab": "vocab_size"}
_BLOOM = {"layers": "n_layer", "hidden": "hidden_size|n_embed", "heads": "n_head|num_attention_heads", "vocab": "vocab_size"}
_BIASED = {"qkv_bias": True, "out_bias": True, "mlp_bias": True, "norm_bias": True}
_GATED = {"gated": True}
_FAMILIES: Mapping[str, _Family] = MappingProxyType(
    {
        "gpt2": _Family(_BIASED, _OLD | {"positions": "n_positions"}, tied=True),
        "gptj": _Family({"mlp_bias": True, "norm_bias": True, "norms": 1, "head_bias": True}, _OLD, tied=False),
        "gpt_neox": _Family(_BIASED, _MODERN, tied=False),
        "opt": _Family(_BIASED, _MODERN | {"ffn": "ffn_dim", "positions": "max_position_embeddings"}, tied=True, offset=2),
        "bloom": _Family(_BIASED | {"embedding_norm": True}, _BLOOM, tied=True),
        "llama": _Family(
            _GATED, _MODERN | {"qkv_bias": "attention_bias", "out_bias": "attention_bias", "mlp_bias": "mlp_bias"}, tied=False
        ),
        "mistral": _Family(_GATED, _MODERN, tied=False),
        "qwen2": _Family(_GATED | {"qkv_bias": True}, _MODERN, tied=False),
        "qwen3": _Family(_GATED | {"qk_norm": True}, _MODERN, tied=False),
        "gemma": _Family(_GATED, _MODERN, tied=True),
        "gemma2": _Family(_GATED | {"norms": 4}, _MODERN, tied=True),
        "phi": _Family(_BIASED | {"norms": 1, "head_bias": True}, _MODERN, tied=False),
        "phi3": _Family(_GATED, _MODERN, tied=False),
        "starcoder2": _Family(_BIASED, _MODERN, tied=True),
    }
)
_REQUIRED = ("layers", "hidden", "heads", "vocab")


def _read_json(path: Path) -> Mapping[str, Any]:
    try:
        if path.stat().st_size > 2**20:
            raise ModelError(f'"{path}" is larger than 1 MiB: not a model configuration')
        loaded = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f'"{path}" cannot be read as a model configuration: {error}') from error
    if not isinstance(loaded, dict):
        raise ModelError(f'"{path}" is not a JSON object')
    return loaded


def transformer_from_hf(config: Mapping[str, Any]) -> Transformer:
    """The shape that a Hugging Face configuration describes."""
    if "model_type" not in config:
        raise ModelError("the configuration has no model_type", fix="give a Hugging Face config.json of a language model")
    family = _FAMILIES.get(config["model_type"]) if isinstance(config["model_type"], str) else None
    if family is None:
        raise ModelError(
            f"model type {str(config['model_type'])[:80]!r} is not one that the planner can count",
            fix=f"known types: {', '.join(_FAMILIES)}; for any other, build the module on meta and call naught.plan_for",
        )
    given: dict[str, Any] = dict(family.traits)
    for ours, theirs in family.keys.items():
        value = next((config[name] for name in theirs.split("|") if config.get(name) is not None), None)
        if value is None:
            if ours in _REQUIRED:
                raise ModelError(f"the configuration does not say {theirs.replace('|', ' or ')}")
            continue
        wanted = bool if ours.endswith("_bias") else int
        if type(value) is not wanted or (wanted is int and not 0 < value < 2**40):
            raise ModelError(f"{theirs} must be a {'positive whole number' if wanted is int else 'boolean'}, is {value!r:.80}")
        given[ours] = value
    if "positions" in given:
        given["positions"] += family.offset
    tied = config.get("tie_word_embeddings")
    if tied is not None and type(tied) is not bool:
        raise ModelError(f"tie_word_embeddings must be a boolean, is {tied!r:.80}")
    shape = Transformer(**given, tied=family.tied if tied is None else tied)
    if (not shape.head_dim and shape.hidden % shape.heads) or shape.heads % (shape.kv_heads or shape.heads):
        raise ModelError(
            f"hidden size {shape.hidden}, {shape.heads} heads and {shape.kv_heads or shape.heads} key-value heads do not divide"
        )
    if config.get("word_embed_proj_dim", shape.hidden) != shape.hidden:
        raise ModelError("word_embed_proj_dim is not hidden_size", fix="build the module on meta and call naught.plan_for")
    return shape
