"""Extras: packages that not every user has. They are imported when they are needed, by names that stand in our code."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any

from naught.errors import UsageError

__all__ = ["need", "package"]


def need(name: str, *, where: str, fix: str = "") -> None:
    """Say that a package is missing, by the key that asks for it; how to get it, and what else could be done."""
    if find_spec(name) is None:
        remedy = f"install it with `pip install {_PARTS.get(name, name)}`" + (f", or {fix}" if fix else "")
        raise UsageError(f"the package {name} is not installed", where=where, fix=remedy)


def package(name: str, *, where: str, fix: str = "") -> Any:
    """The package, or an error that says how to get it."""
    need(name, where=where, fix=fix)
    return import_module(name)


# Packages that come with one of our extras, or under another name.
_PARTS = {"transformers": "'naught[hf]'", "tokenizers": "'naught[hf]'", "yaml": "pyyaml"}
