"""`naught ckpt`: what is in a folder of checkpoints, whether every byte of it is what was written, and what to do with it."""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from naught.checkpoints import RealDisk, Saved, Store
from naught.errors import NaughtError, UsageError
from naught.quantity import parse_bytes, show_bytes, show_count
from naught.text import print_table

__all__ = ["run_ckpt"]


def run_ckpt(options: argparse.Namespace) -> int:
    return {"info": _info, "verify": _verify, "export": _export, "diff": _diff}[options.action](options)


def _chosen(given: str, tag: str | None) -> tuple[Store, list[Saved]]:
    """The checkpoints of a folder, or the one that is named: by a tag, or as the folder itself."""
    folder = Path(given).resolve()
    if not folder.is_dir():
        raise UsageError(f'"{given}" is not a folder', fix="give the folder that save_checkpoint was given")
    if tag is None and (folder / "manifest.json").exists():
        folder, tag = folder.parent, folder.name
    store = Store(RealDisk(), str(folder))
    return store, [store.find(tag)] if tag else store.all() or [store.newest()]


def _info(options: argparse.Namespace) -> int:
    store, found = _chosen(options.folder, options.tag)
    rows = [_facts(store, saved) for saved in found]
    for tag, error in store.survey().damaged.items():
        print(f"{tag}: {error}", file=sys.stderr)
    if options.json:
        print(json.dumps(rows, indent=2))
        return 0
    header = ("tag", "step", "ranks", "parameters", "trained", "bytes", "kinds")
    shown = [
        (
            row["tag"],
            str(row["step"]),
            str(row["ranks"]),
            show_count(row["parameters"]),
            show_count(row["trained"]),
            show_bytes(row["bytes"]),
            ", ".join(row["kinds"]),
        )
        for row in rows
    ]
    print_table(f"checkpoints in {store.root}", header, shown)
    return 0


def _facts(store: Store, saved: Saved) -> dict[str, Any]:
    kinds: Counter[str] = Counter()
    nbytes = 0
    for rank in range(saved.manifest.world):
        table = store.table(saved, rank)
        nbytes += table.nbytes
        for run in table.runs:
            kinds[f"{run.kind} {run.dtype}"] += run.count
    params = [param for name, param in saved.manifest.params.items() if ":" not in name]
    return {
        "tag": saved.tag,
        "step": saved.manifest.step,
        "ranks": saved.manifest.world,
        "parameters": sum(param.numel for param in params),
        "trained": sum(param.numel for param in params if param.trained),
        "bytes": nbytes,
        "kinds": sorted(kind for kind in kinds if not kind.startswith("own ")),
        "version": saved.manifest.engine.get("version"),
        "client_state": saved.manifest.engine.get("client_state"),
    }


def _verify(options: argparse.Namespace) -> int:
    """Read everything; say what is damaged, and go on to the next."""
    store, found = _chosen(options.folder, options.tag)
    damaged = {} if options.tag else store.survey().damaged
    for tag, error in damaged.items():
        print(f"{tag}: {error}")
    bad = len(damaged)
    for saved in found:
        try:
            store.verify(saved)
        except NaughtError as error:
            bad += 1
            print(f"{saved.tag}: {error}")
        else:
            print(f"{saved.tag}: every byte is what was written")
    return 1 if bad else 0


_DTYPES = {"saved": None, "fp32": "F32", "bf16": "BF16", "fp16": "F16"}


def _export(options: argparse.Namespace) -> int:
    from naught.saves.contents import Contents
    from naught.saves.exporting import export

    store, found = _chosen(options.folder, options.tag)
    most_bytes = parse_bytes(options.file_size)
    saved = found[-1]
    dtype = _DTYPES[options.dtype]
    names = export(Contents(store, saved), RealDisk(), str(Path(options.to)), dtype=dtype, most_bytes=most_bytes)
    nbytes = sum((Path(options.to) / name).stat().st_size for name in names)
    print(f"{saved.tag}: {show_bytes(nbytes)} in {options.to}: {', '.join(names[:3])}{' ...' if len(names) > 3 else ''}")
    return 0


_SHOWN = 40


def _diff(options: argparse.Namespace) -> int:
    from naught.saves.comparing import compare
    from naught.saves.contents import Contents

    one, other = (Contents(store, found[-1]) for store, found in (_chosen(given, None) for given in (options.one, options.other)))
    found = list(compare(one, other))
    steps = (one.saved.manifest.step, other.saved.manifest.step)
    if options.json:
        print(json.dumps({"steps": steps, "differences": [difference._asdict() for difference in found]}, indent=2))
        return 1 if found else 0
    print(f"{options.one}: {one.saved.tag}, step {steps[0]}; {options.other}: {other.saved.tag}, step {steps[1]}")
    if not found:
        print("the same bits in every parameter, buffer and optimizer state")
        return 0
    rows = [
        (
            difference.name,
            difference.kind,
            f"{difference.differing} {difference.what}".removeprefix("0 "),
            f"{difference.largest:g}",
        )
        for difference in found[:_SHOWN]
    ]
    print_table(f"{len(found)} differ", ("name", "kind", "differing", "by at most"), rows)
    if len(found) > _SHOWN:
        print(f"... and {len(found) - _SHOWN} more; --json prints all")
    return 1
