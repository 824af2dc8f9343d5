"""`naught ckpt`: what is in a folder of checkpoints, and whether every byte of it is what was written. Needs no torch."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from pathlib import Path
from typing import Any

from naught.checkpoints import RealDisk, Saved, Store
from naught.errors import CheckpointError, NaughtError, UsageError
from naught.quantity import show_bytes, show_count
from naught.text import print_table

__all__ = ["run_ckpt"]


def run_ckpt(options: argparse.Namespace) -> int:
    return {"info": _info, "verify": _verify}[options.action](options)


def _chosen(options: argparse.Namespace) -> tuple[Store, list[Saved]]:
    """The checkpoints of a folder, or the one that is named: by a tag, or as the folder itself."""
    folder = Path(options.folder)
    if not folder.is_dir():
        raise UsageError(f'"{options.folder}" is not a folder', fix="give the folder that save_checkpoint was given")
    if options.tag is None and (folder / "manifest.json").exists():
        folder, options.tag = folder.parent, folder.name
    store = Store(RealDisk(), str(folder))
    found = [store.find(options.tag)] if options.tag else store.all()
    if not found:
        raise CheckpointError(f"there is no whole checkpoint in {folder}", fix="look at the path")
    return store, found


def _info(options: argparse.Namespace) -> int:
    store, found = _chosen(options)
    rows = [_facts(store, saved) for saved in found]
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
    store, found = _chosen(options)
    bad = 0
    for saved in found:
        try:
            store.verify(saved)
        except NaughtError as error:
            bad += 1
            print(f"{saved.tag}: {error}")
        else:
            print(f"{saved.tag}: every byte is what was written")
    return 1 if bad else 0
