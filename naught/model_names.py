"""Model names: what people call a model, turned into one: a preset, gpt:layers=..., a count, or a config.json. Pure.

A module that is none of these is described from Python instead (`naught.plan_for`).
"""

from __future__ import annotations

from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from naught.errors import ModelError, NaughtError
from naught.hugging_face import read_shape
from naught.presets import GPT2, PRESETS, gpt_of_count
from naught.quantity import parse_count
from naught.shapes import Model, Transformer

__all__ = ["parse_model"]


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
        return _model(str(path), read_shape(path))
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
    return replace(GPT2, **given)


def _positive(key: str, value: str, text: str, *, least: int) -> int:
    try:
        number = parse_count(value, what=key)
    except NaughtError:
        number = -1
    if number < least or number >= 2**40:
        raise ModelError(f'{key}={value} in "{text[:200]}" must be a whole number from {least}')
    return number
