"""Names: those of everything in a folder of checkpoints. They are made here, and none is ever read from a file."""

from __future__ import annotations

import re

from naught.errors import CheckpointError

__all__ = ["GOING", "LATEST", "MANIFEST", "POINTER", "UNDER_WAY", "is_tag", "refuse_tag", "shard_name", "table_name", "tag_of"]

MANIFEST, LATEST = "manifest.json", "latest"
UNDER_WAY, GOING = ".tmp-", ".trash-"
POINTER = ".tmp-.latest-"  # no tag begins with a dot
_TAG = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,119}")


def tag_of(step: int) -> str:
    """What a checkpoint is called unless somebody calls it otherwise. Hugging Face looks for these."""
    return f"global_step{step}"


def is_tag(name: str) -> bool:
    return _TAG.fullmatch(name) is not None and name != LATEST


def refuse_tag(tag: str) -> None:
    if not is_tag(tag):
        raise CheckpointError(
            f'"{tag[:80]}" cannot be a tag',
            fix="use letters, digits, dots, dashes and underlines, begin with a letter or digit, and not latest",
        )


def shard_name(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"


def table_name(rank: int) -> str:
    return f"rank-{rank:05d}.json"
