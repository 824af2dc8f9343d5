"""JSON Schema of a configuration, so that an editor can complete and check it as it is typed."""

from __future__ import annotations

from typing import Any

from naught.config import keys
from naught.config.refused import REFUSED
from naught.config.schema import Config
from naught.config.types import Block

__all__ = ["json_schema"]


def json_schema() -> dict[str, Any]:
    """Every key in each of its spellings; "auto" wherever an integration may fill a value."""
    schema: dict[str, Any] = _standard(Config.model_json_schema())
    definitions = schema.get("$defs", {})
    _finish(schema, Config, "")
    for entry in keys.entries():
        for variant in keys.variants(entry.info):
            if variant.__name__ in definitions:
                _finish(definitions[variant.__name__], variant, entry.path)
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    schema["title"] = "A Naught (DeepSpeed-shaped) configuration"
    return schema


_NAMED = ("optimizer", "scheduler")


def _by_type(blocks: tuple[type[Block], ...]) -> dict[str, Any]:
    """One of several blocks, chosen by its type, which is read in any case."""
    spellings = {block.__name__: _cases(str(block.model_fields["type"].default)) for block in blocks}
    choices = [
        {"if": {"properties": {"type": {"enum": spelled}}}, "then": {"$ref": f"#/$defs/{name}"}}
        for name, spelled in spellings.items()
    ]
    known = [spelling for spelled in spellings.values() for spelling in spelled]
    chosen = {"type": "object", "required": ["type"], "properties": {"type": {"enum": known}}, "allOf": choices}
    return {"anyOf": [{"type": "null"}, chosen]}


def _cases(name: str) -> list[str]:
    return list(dict.fromkeys([name, name.lower(), name.upper()]))


# What a refused key may say: nothing, or that the thing is off.
_OFF = {
    "anyOf": [
        {"enum": [None, False, "", "none", "auto", -1, 0, 1]},
        {"type": "array", "maxItems": 0},
        {"type": "object", "properties": {"enabled": {"enum": [False, None]}, "deepcompile": {"enum": [False, None]}}},
    ]
}

# What pydantic calls a limit that stands outside a converting validator, and what JSON Schema calls it.
_LIMITS = {"ge": "minimum", "gt": "exclusiveMinimum", "le": "maximum", "lt": "exclusiveMaximum"}


def _standard(part: Any) -> Any:
    if isinstance(part, list):
        return [_standard(member) for member in part]
    if not isinstance(part, dict):
        return part
    return {_LIMITS.get(key, key) if "type" in part else key: _standard(value) for key, value in part.items()}


def _finish(definition: dict[str, Any], block: type[Block], path: str) -> None:
    properties: dict[str, Any] = definition["properties"]
    properties.pop("auto", None)
    for name, info in keys.fields(block).items():
        key = keys.key_of(info)
        shown = properties[name]
        if not keys.variants(info):
            shown = {"anyOf": [shown, {"const": "auto"}]}
        elif name in _NAMED and path == "":
            shown = _by_type(keys.variants(info))
        else:
            shown = {"anyOf": [shown, {"type": "null"}, *([{"type": "boolean"}] if name == "zero_optimization" else [])]}
        shown["description"] = key.does or f"no effect here: {key.why}"
        for spelling in (name, *key.also):
            properties[spelling] = shown
    prefix = f"{path}." if path else ""
    for refused, why in REFUSED.items():
        if refused.startswith(prefix) and "." not in refused.removeprefix(prefix):
            properties[refused.removeprefix(prefix)] = _OFF | {"description": f"refused unless it is off: {why}"}
    if path == "zero_optimization":
        for old in ("cpu_offload", "cpu_offload_param", "cpu_offload_use_pin_memory"):
            properties[old] = {"enum": [True, False, None, "auto"], "deprecated": True}
    if path == "":
        properties["fp32_allreduce"] = {"type": "boolean", "deprecated": True}
    if "type" in keys.fields(block):
        properties["type"] = {"enum": _cases(str(block.model_fields["type"].default))}
    definition["patternProperties"] = {"^(_|//|#|\\$|comments?$)": {}}
