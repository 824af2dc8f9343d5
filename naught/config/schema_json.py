"""JSON Schema of a configuration, so that an editor can complete and check it as it is typed."""

from __future__ import annotations

from typing import Any

from naught.config import keys
from naught.config.refused import REFUSED
from naught.config.schema import Block, Config

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
        elif path == "" and name in ("optimizer", "scheduler"):
            shown = {"type": ["object", "null"]}  # DeepSpeed takes the type in any case, which no schema can say
        else:
            shown = {"anyOf": [shown, {"type": "null"}, *([{"type": "boolean"}] if name == "zero_optimization" else [])]}
        shown["description"] = key.does or f"no effect here: {key.why}"
        for spelling in (name, *key.also):
            properties[spelling] = shown
    prefix = f"{path}." if path else ""
    for refused, why in REFUSED.items():
        if refused.startswith(prefix) and "." not in refused.removeprefix(prefix):
            properties[refused.removeprefix(prefix)] = {"description": f"refused unless it is off: {why}"}
    if path == "zero_optimization":
        for old in ("cpu_offload", "cpu_offload_param", "cpu_offload_use_pin_memory"):
            properties[old] = {"enum": [True, False, None, "auto"], "deprecated": True}
    definition["patternProperties"] = {"^(_|//|#|\\$|comments?$)": {}}
