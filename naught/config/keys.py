"""Keys: questions about the schema: which spelling means which field, what a field allows, which key is nearest."""

from __future__ import annotations

import re
import types
import typing
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from typing import Any, Literal, NamedTuple

from annotated_types import Ge, Gt, Le, Lt
from pydantic.fields import FieldInfo

from naught.config.refused import REFUSED
from naught.config.schema import Config
from naught.config.types import SIZE, Block, Key

__all__ = [
    "Entry",
    "allowed",
    "entries",
    "fields",
    "is_fixed",
    "key_of",
    "nearest",
    "plain_path",
    "spelled",
    "takes_auto",
    "variants",
]


def fields(block: type[Block]) -> dict[str, FieldInfo]:
    """The keys of a block; `Config.auto` is not one."""
    return {name: info for name, info in block.model_fields.items() if name != "auto"}


def key_of(info: FieldInfo) -> Key:
    return next(item for item in info.metadata if isinstance(item, Key))


def spelled(block: type[Block], spelling: str) -> str | None:
    """The field that a spelling means."""
    if spelling in fields(block):
        return spelling
    return next((name for name, info in fields(block).items() if spelling in key_of(info).also), None)


def variants(info: FieldInfo) -> tuple[type[Block], ...]:
    """The blocks that a field may hold; empty for a plain value."""
    options = typing.get_args(info.annotation) if _is_union(info.annotation) else (info.annotation,)
    return tuple(option for option in options if isinstance(option, type) and issubclass(option, Block))


def takes_auto(info: FieldInfo) -> bool:
    """Whether "auto" is a value of this key, and not a hole for an integration to fill."""
    return "auto" in _literals(info.annotation)


class Entry(NamedTuple):
    """A key with its full path and the block that holds it."""

    path: str
    info: FieldInfo

    @property
    def key(self) -> Key:
        return key_of(self.info)


def entries(block: type[Block] = Config, path: str = "") -> Iterator[Entry]:
    """Every key of the schema, blocks before what they hold. Optimizers and schedules appear under their type."""
    for name, info in fields(block).items():
        here = f"{path}.{name}" if path else name
        yield Entry(here, info)
        found = variants(info)
        for variant in found:
            label = f"{here}({variant.__name__})" if len(found) > 1 else here
            yield from entries(variant, label)


# What people write who come from another tool, and what they mean.
_SYNONYMS = {
    "micro_batch_size": "train_micro_batch_size_per_gpu",
    "batch_size": "train_batch_size",
    "global_batch_size": "train_batch_size",
    "gradient_accumulation": "gradient_accumulation_steps",
    "learning_rate": "lr",
    "zero": "zero_optimization",
    "max_grad_norm": "gradient_clipping",
    "clip_grad": "gradient_clipping",
    "mixed_precision": "bf16",
    "allgather_size": "allgather_bucket_size",
}


def nearest(block: type[Block], spelling: str, path: str, root: type[Config] = Config) -> str:
    """The key that an unknown spelling probably means, or where it belongs; "" if nothing is near."""
    here = [*fields(block), *(also for info in fields(block).values() for also in key_of(info).also)]
    if _SYNONYMS.get(spelling) in here:
        return f"did you mean {_SYNONYMS[spelling]}?"
    elsewhere = {
        plain_path(entry.path)
        for entry in entries(root)
        if entry.path.rpartition(".")[2] == spelling or spelling in entry.key.also
    }
    if len(elsewhere) == 1:  # a name that several blocks have, such as enabled, says nothing
        return f"it belongs in {elsewhere.pop().rpartition('.')[0] or 'the top level'}"
    prefix = f"{path}." if path else ""
    here += [refused.removeprefix(prefix) for refused in REFUSED if refused.startswith(prefix)]
    close = get_close_matches(spelling, [name for name in here if "." not in name], n=1, cutoff=0.7)
    return f"did you mean {close[0]}?" if close else ""


def plain_path(path: str) -> str:
    """A path as it stands in a file: without the type that an optimizer or schedule is listed under."""
    return re.sub(r"\([^)]*\)", "", path)


def is_fixed(info: FieldInfo) -> bool:
    """Whether a key has only one value that is allowed."""
    return len(_literals(info.annotation)) == 1


def allowed(info: FieldInfo) -> str:
    """What a key may be, in words."""
    return _describe(info.annotation, info.metadata)


def _describe(annotation: Any, metadata: Sequence[Any]) -> str:
    if typing.get_origin(annotation) is typing.Annotated:
        inner, *more = typing.get_args(annotation)
        return _describe(inner, [*more, *metadata])
    if _is_union(annotation):
        options = [_describe(option, metadata) for option in typing.get_args(annotation)]
        return " or ".join(dict.fromkeys(options))
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Literal:
        return " or ".join(str(value).lower() if isinstance(value, bool) else f'"{value}"' for value in args)
    if origin is tuple:
        if args[-1] is Ellipsis:
            return f"a list, each {_describe(args[0], [])}"
        return f"a list of {len(args)}, each {_describe(args[0], [])}"
    if isinstance(annotation, type) and issubclass(annotation, Block):
        return "an object"
    names = {bool: "true or false", str: "a text", type(None): "null"}
    if annotation in names:
        return names[annotation]
    if SIZE in metadata:
        return 'bytes, at least 1, or a size such as "32GB"'
    return {int: "a whole number", float: "a finite number"}[annotation] + _range(metadata)


def _range(metadata: Sequence[Any]) -> str:
    flat = [limit for item in metadata for limit in (item.metadata if isinstance(item, FieldInfo) else [item])]
    words = {
        Ge: lambda limit: f"from {limit.ge}",
        Gt: lambda limit: f"above {limit.gt}",
        Le: lambda limit: f"to {limit.le}",
        Lt: lambda limit: f"below {limit.lt}",
    }
    said = [words[type(limit)](limit) for limit in flat if type(limit) in words]
    return " " + " ".join(dict.fromkeys(said)) if said else ""


def _literals(annotation: Any) -> tuple[Any, ...]:
    if typing.get_origin(annotation) is Literal:
        return typing.get_args(annotation)
    return tuple(value for option in typing.get_args(annotation) for value in _literals(option))


def _is_union(annotation: Any) -> bool:
    return typing.get_origin(annotation) in (typing.Union, types.UnionType)
