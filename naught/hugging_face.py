"""Hugging Face: the shape that a model's config.json describes. Pure; nothing of that library is imported."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from naught.errors import ModelError
from naught.shapes import Transformer

__all__ = ["read_shape", "transformer_from_hf"]


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


def read_shape(path: Path) -> Transformer:
    """The shape in a config.json, or in the one of a folder."""
    return transformer_from_hf(_read_json(path / "config.json" if path.is_dir() else path))


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
