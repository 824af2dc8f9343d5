"""`naught config`: check, explain, schema and init."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any

from naught.cli.files import write_new
from naught.config import Config, Effect, check, derive_batch, keys
from naught.config.old_names import OLD_NAMES
from naught.config.read import read
from naught.config.recipe import Recipe
from naught.config.refused import REFUSED
from naught.config.schema_json import json_schema
from naught.config.starters import starter
from naught.config.types import SAME
from naught.errors import ConfigError, UsageError

__all__ = ["run_config"]


def run_config(options: argparse.Namespace) -> int:
    actions = {"check": _check, "explain": _explain, "schema": _schema, "init": _init}
    return actions[options.action](options)


def _check(options: argparse.Namespace) -> int:
    source: Any = sys.stdin.buffer.read(2**20 + 1) if options.file == "-" else options.file
    document = read(source)
    # A configuration of naught train has three blocks more; the engine's own has none of them.
    report = check(document, Recipe if {"model", "data", "train"} & set(document.values) else Config)
    problems = list(report.problems)
    batch = None
    if options.world is not None and not problems:
        if options.world < 1:
            raise UsageError(f"--world is at least 1, not {options.world}")
        try:
            batch = derive_batch(report.config, options.world)
        except ConfigError as error:
            problems += error.problems
    if options.json:
        data = {
            "source": report.source,
            "problems": [problem.__dict__ for problem in problems],
            "keys": [{"path": note.path, "effect": note.effect.value, "detail": note.detail} for note in report.notes],
            "auto": sorted(report.config.auto),
            "batch": batch._asdict() if batch else None,
        }
        print(json.dumps(data, indent=2))
        return 1 if problems else 0
    if problems:
        raise ConfigError(report.source, problems)
    order = list(Effect)
    rows = [
        (note.path, note.effect.value, note.detail) for note in sorted(report.notes, key=lambda note: order.index(note.effect))
    ]
    _print_keys(f"{report.source} is fine", ("key", "effect", "what it does here, or why it does nothing"), rows)
    if report.config.auto:
        print(f'"auto" is left to whoever starts the run: {", ".join(sorted(report.config.auto))}')
    if not report.config.auto and not (report.config.train_batch_size or report.config.train_micro_batch_size_per_gpu):
        print("no batch size is set: give train_batch_size or train_micro_batch_size_per_gpu before a run")
    if batch:
        print(f"batch on {options.world} ranks: {batch.train} = {batch.micro} x {batch.accumulation} x {options.world}")
    return 0


def _print_keys(title: str, header: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> None:
    """Three columns flush left: the last one is prose and as long as it needs to be."""
    print(title)
    widths = [max(len(row[at]) for row in [header, *rows]) for at in range(len(header) - 1)]
    for row in [header, *rows]:
        print("  " + "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[-1]]))


def _explain(options: argparse.Namespace) -> int:
    every = list(keys.entries(Recipe))
    if options.key is None:
        _print_keys("keys", ("key", "effect", "meaning"), [_summary(entry) for entry in every])
        return 0
    found = [entry for entry in every if _means(entry, options.key)]
    within = [entry for entry in every if keys.plain_path(entry.path).startswith(f"{options.key}.")]
    refused = [path for path in REFUSED if path == options.key or path.endswith(f".{options.key}")]
    for entry in found:
        print(_explanation(entry))
    for path in refused:
        print(f"{path}\n  refused: {REFUSED[path]}")
    if options.key.rpartition(".")[2] in OLD_NAMES:
        print(f"{options.key}\n  an old name: {OLD_NAMES[options.key.rpartition('.')[2]]}")
    elif not found and not refused:
        names = {path.rpartition(".")[2] for path in [*REFUSED, *(entry.path for entry in every)]}
        near = get_close_matches(options.key.rpartition(".")[2], sorted(names), n=1)
        raise UsageError(f'no key "{options.key}"' + (f"; did you mean {near[0]}?" if near else ""))
    if within:
        _print_keys("keys", ("key", "effect", "meaning"), [_summary(entry) for entry in within])
    return 0


def _means(entry: keys.Entry, wanted: str) -> bool:
    """Whether a key or the end of its path is what was asked for, in any of its spellings."""
    path = keys.plain_path(entry.path)
    block = path.rpartition(".")[0]
    return any(
        spelled == wanted or spelled.endswith(f".{wanted}")
        for spelled in (entry.path, path, *(f"{block}.{also}".removeprefix(".") for also in entry.key.also))
    )


def _summary(entry: keys.Entry) -> tuple[str, str, str]:
    return entry.path, entry.key.effect.value, entry.key.does or entry.key.why


def _explanation(entry: keys.Entry) -> str:
    key, info = entry.key, entry.info
    lines = [entry.path]
    lines.append(f"  {key.does}" if key.does else f"  no effect here: {key.why}")
    if not keys.variants(info):
        lines.append(f"  value: {keys.allowed(info)}")
        lines.append(
            f"  default: {json.dumps(info.default, default=list)}"
            + ("" if key.peer is SAME else f" (DeepSpeed: {json.dumps(key.peer)})")
        )
    if key.does and key.why:
        lines.append(f"  why: {key.why}")
    if key.also:
        lines.append(f"  also written: {', '.join(key.also)}")
    return "\n".join(lines)


def _schema(options: argparse.Namespace) -> int:
    _emit(options.output, json.dumps(json_schema(), indent=2) + "\n")
    return 0


def _init(options: argparse.Namespace) -> int:
    _emit(options.output, starter(options.kind))
    return 0


def _emit(output: str | None, text: str) -> None:
    if output is None:
        sys.stdout.write(text)
    else:
        write_new(output, text)
        print(f"wrote {output}", file=sys.stderr)
