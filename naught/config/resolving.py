"""Resolving: a recipe from a file, from what the command line changes and from defaults, and where each value came from."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple

from naught.config import keys
from naught.config.check import check
from naught.config.read import Document, dotted, read
from naught.config.recipe import Recipe
from naught.config.schema import Config
from naught.config.yaml_text import is_yaml, read_yaml
from naught.errors import ConfigError, UsageError

__all__ = ["Override", "Resolved", "engine_document", "parse_override", "resolve"]

# Without a file this is where a recipe starts; what a file leaves out is filled in below.
_START = {"zero_optimization": {"stage": 3}}
_MICRO_BATCH = 16
_PARAMS = {"lr": 3e-3, "betas": [0.9, 0.95], "weight_decay": 0.1}
_OPTIMIZER = {"type": "AdamW", "params": _PARAMS}
_SHORT = {
    "model": "model.name",
    "data": "data.path",
    "stage": "zero_optimization.stage",
    "lr": "optimizer.params.lr",
    "micro_batch": "train_micro_batch_size_per_gpu",
    "accumulation": "gradient_accumulation_steps",
}
_OURS = ("model", "data", "train")


class Override(NamedTuple):
    """A key that the command line sets, and how it was said there."""

    path: str
    value: Any
    origin: str


@dataclass(frozen=True)
class Resolved:
    """A recipe, what was given of it (the rest was derived or is a default), and the origin of each value that is not a
    default, by path."""

    recipe: Recipe
    given: Mapping[str, Any]
    origins: Mapping[str, str]


def parse_override(text: str) -> Override:
    """`train.steps=200`: a path, or the last name of one, and JSON or plain text."""
    name, sign, value = text.partition("=")
    if not sign or not name:
        near = f', or "{text}=..."' if text in _known() else ""
        near += "; a configuration's file comes before the first key" if text.endswith((".json", ".yaml", ".yml")) else ""
        raise UsageError(f'"{text[:80]}" sets no key', fix=f"write key=value, such as train.steps=200{near}")
    try:
        parsed = json.loads(value)
    except ValueError:
        parsed = value
    return Override(_path(name.strip()), parsed, f"{name}= on the command line")


def _known() -> dict[str, str]:
    """Names that need no path: the short ones, and those of our own blocks."""
    ours = {entry.path.rpartition(".")[2]: entry.path for entry in keys.entries(Recipe) if entry.path.partition(".")[0] in _OURS}
    return {name: path for name, path in ours.items() if name not in keys.fields(Recipe)} | _SHORT


def _path(name: str) -> str:
    if "." in name or (name in keys.fields(Recipe) and name not in _SHORT):
        return name
    known = _known()
    if name not in known:
        near = get_close_matches(name, [*known, *keys.fields(Recipe)], n=1)
        raise UsageError(
            f'no key "{name[:80]}"' + (f"; did you mean {near[0]}?" if near else ""),
            fix="see docs/training.md for the keys of naught train, and naught config explain for all others",
        )
    return known[name]


def resolve(source: Path | Mapping[str, Any] | None, overrides: Sequence[Override]) -> Resolved:
    """The recipe, or one ConfigError with all that is wrong with it."""
    document = _document(source)
    origins = {dotted(spot): f"{document.source} line {line}" for spot, line in document.lines.items()}
    if source is None:
        origins |= {leaf: "the demo" for block, value in _START.items() for leaf in _leaves(block, value)}
    for path, value, origin in overrides:
        _put(document.values, path, value)
        origins[path] = origin
    given = json.loads(json.dumps(document.values))
    for path, value in _left_out(document.values):
        _put(document.values, path, value)
        origins |= {leaf: "derived" for leaf in _leaves(path, value) if leaf not in origins}
    report = check(document, Recipe)
    if report.problems:
        raise ConfigError(report.source, report.problems)
    assert isinstance(report.config, Recipe)
    return Resolved(report.config, given, origins)


def _document(source: Path | Mapping[str, Any] | None) -> Document:
    if source is None:
        return Document("the command line", json.loads(json.dumps(_START)))
    document = read_yaml(source) if isinstance(source, Path) and is_yaml(source) else read(source)
    if isinstance(document.values.get("model"), str):  # the short form, in a file too
        document.values["model"] = {"name": document.values["model"]}
    if isinstance(document.values.get("data"), str):
        document.values["data"] = {"path": document.values["data"]}
    return document


def _put(values: dict[str, Any], path: str, value: Any) -> None:
    *blocks, name = path.split(".")
    for block in blocks:
        inner = values.setdefault(block, {})
        if not isinstance(inner, dict):
            raise UsageError(f"{path} cannot be set: {block} is not an object there")
        values = inner
    values[name] = value


def _left_out(values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """What a run needs and nobody has given: a batch, an optimizer, a schedule of its rate."""
    if not any(key in values for key in ("train_batch_size", "train_micro_batch_size_per_gpu")):
        yield "train_micro_batch_size_per_gpu", _MICRO_BATCH
    optimizer = values.get("optimizer")
    if optimizer is None:
        yield "optimizer", _OPTIMIZER
    elif isinstance(optimizer, dict) and "type" not in optimizer and isinstance(optimizer.get("params", {}), dict):
        yield "optimizer", _OPTIMIZER | optimizer | {"params": {**_PARAMS, **optimizer.get("params", {})}}
    if "scheduler" not in values:
        train = values.get("train")
        steps = train.get("steps") if isinstance(train, dict) else None
        steps = steps if isinstance(steps, int) and steps > 0 else Recipe().train.steps
        schedule = {
            "total_num_steps": max(2, steps),
            "warmup_num_steps": max(2, steps // 20),
            "warmup_min_ratio": 0.1,
            "cos_min_ratio": 0.1,
        }
        yield "scheduler", {"type": "WarmupCosineLR", "params": schedule}


def _leaves(path: str, value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _leaves(f"{path}.{name}", inner)
    else:
        yield path


def engine_document(recipe: Recipe) -> dict[str, Any]:
    """The part of a recipe that is the engine's configuration, as a DeepSpeed JSON."""
    document: dict[str, Any] = recipe.model_dump(mode="json", exclude_unset=True)
    return {name: value for name, value in document.items() if name in Config.model_fields}
