"""Ten thousand mutated configurations: a typed error or a sound object, and never a broken one let through.

What is sound is judged twice: by what the mutation did, and by the JSON Schema with an independent validator.
"""

from __future__ import annotations

import json
import math
import os
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import jsonschema
import pytest
from real_configs import REAL

from naught.config import Config, check, load
from naught.config.keys import entries
from naught.config.read import read
from naught.config.refused import REFUSED
from naught.config.schema_json import json_schema
from naught.errors import ConfigError

COUNT = int(os.environ.get("NAUGHT_FUZZ", "10000"))
VALIDATOR = jsonschema.Draft202012Validator(json_schema())
DOCUMENTS = [read(text).values for text in REAL.values() if len(text) > 2]
KNOWN = {name for entry in entries() for name in (entry.path.rpartition(".")[2], *entry.key.also)}
REFUSED_NAMES = {path.rpartition(".")[2] for path in REFUSED}
KNOWN |= REFUSED_NAMES | {"cpu_offload", "cpu_offload_param", "cpu_offload_use_pin_memory"}

Spot = tuple[dict[str, Any], str]


def spots(document: dict[str, Any], *, leaves: bool) -> list[Spot]:
    """Every (block, key) that the schema looks at."""
    found: list[Spot] = []
    for key, value in document.items():
        if key.startswith("_") or key in ("writer", "parallel_write") or key in REFUSED_NAMES:
            continue
        if not leaves or not isinstance(value, dict):
            found.append((document, key))
        if isinstance(value, dict):
            found += spots(value, leaves=leaves)
    return found


def edited(rng: random.Random, key: str) -> str:
    at = rng.randrange(len(key) + 1)
    letter = rng.choice("abcdefghijklmnopqrstuvwxyz3")
    return rng.choice([key[:at] + letter + key[at:], key[: at - 1] + key[at:], key[:at] + letter + key[at + 1 :]])


# A mutation changes the document and says whether it must be refused (True), must still load (False), or may do
# either (None).
def rename(rng: random.Random, document: dict[str, Any]) -> bool | None:
    block, key = rng.choice(spots(document, leaves=False))
    new = edited(rng, key)
    if new in KNOWN or not new or new in block or new.startswith(("_", "#", "$", "//")) or new.startswith("comment"):
        return None
    block[new] = block.pop(key)
    return True


def wreck_type(rng: random.Random, document: dict[str, Any]) -> bool | None:
    block, key = rng.choice(spots(document, leaves=True))
    if key == "zero_optimization" or block[key] is None:  # an old boolean, or null for a block: neither has one type
        return None
    old = block[key]
    wrong: list[Any] = [{"a": 1}, [[1]], 1.5j]
    if isinstance(old, bool):
        wrong += ["true", 1, 0, None if key not in ("overlap_comm", "cpu_offload", "cpu_offload_param") else "x"]
    elif isinstance(old, int | float):
        wrong += [str(old), "", "NaN"]
    elif isinstance(old, str) and old != "auto":
        wrong += [7, True, [old, 3]]
    block[key] = rng.choice(wrong)
    return True


def wreck_number(rng: random.Random, document: dict[str, Any]) -> bool | None:
    numbers = [
        (block, key)
        for block, key in spots(document, leaves=True)
        if isinstance(block[key], int | float) and not isinstance(block[key], bool)
    ]
    if not numbers:
        return None
    block, key = rng.choice(numbers)
    value = rng.choice([math.nan, -math.inf, 10**400, -(10**9) - 0.5, -1e308])
    block[key] = value
    return True


def insert_unknown(rng: random.Random, document: dict[str, Any]) -> bool | None:
    blocks = [
        document,
        *(value for value in document.values() if isinstance(value, dict) and value is not document.get("pipeline")),
    ]
    block = rng.choice(blocks)
    name = next((key for key, value in document.items() if value is block), "")
    if name in REFUSED or name.startswith("_"):
        return None
    block["".join(rng.choices("qwxzj", k=9))] = rng.choice([1, "a", None, [], {}])
    return True


def insert_remark(rng: random.Random, document: dict[str, Any]) -> bool | None:
    document[rng.choice(["_comment", "_note", "//", "#x", "$schema", "comment"])] = rng.choice([1, "x", [{}], None, {"a": []}])
    return False


def deepen(rng: random.Random, document: dict[str, Any]) -> bool | None:
    inner: Any = 1
    for _ in range(rng.choice([40, 400, 5000])):
        inner = [inner] if rng.random() < 0.5 else {"a": inner}
    document[rng.choice(["zero_optimization", "train_batch_size", "fp16"])] = inner
    return True


def swap_values(rng: random.Random, document: dict[str, Any]) -> bool | None:
    found = spots(document, leaves=True)
    (block, key), (other, name) = rng.choice(found), rng.choice(found)
    block[key], other[name] = other[name], block[key]
    return None


def drop(rng: random.Random, document: dict[str, Any]) -> bool | None:
    block, key = rng.choice(spots(document, leaves=False))
    del block[key]
    return None


def to_auto(rng: random.Random, document: dict[str, Any]) -> bool | None:
    block, key = rng.choice(spots(document, leaves=True))
    block[key] = "auto"
    return None


MUTATIONS: list[Callable[[random.Random, dict[str, Any]], bool | None]] = [
    rename, wreck_type, wreck_number, insert_unknown, insert_remark, deepen, swap_values, drop, to_auto,
]  # fmt: skip


def wreck_text(rng: random.Random, text: str) -> str:
    at = rng.randrange(len(text))
    junk = rng.choice(["\0", '"', "{", "}", "[", ",,", "NaN", "\ufeff", "//", "/*", "\\u12", "1e999", "é", "\ud800", ":"])
    return rng.choice([text[:at], text[:at] + junk + text[at:], text[:at] + text[at + 1 :], text[:at] * 2])


def outcome(source: Any) -> Config | None:
    """The configuration, or None for a proper refusal; anything else that is raised fails the test."""
    try:
        return load(source)
    except ConfigError as error:
        assert error.problems
        assert all(len(str(problem)) < 1500 for problem in error.problems)
        return None


@pytest.mark.timeout(600)
def test_mutated_configurations_are_refused_or_sound():
    rng = random.Random(20260817)
    seen: Counter[str] = Counter()
    for _ in range(COUNT):
        document = json.loads(json.dumps(rng.choice(DOCUMENTS)))
        if rng.random() < 0.2:
            text = wreck_text(rng, json.dumps(document, indent=rng.choice([None, 1])))
            config = outcome(text)
            if config is not None:
                document = read(text).values
                assert_sound(document, text)
            seen["text", config is not None] += 1
            continue
        mutation = rng.choice(MUTATIONS)
        must_fail = mutation(rng, document)
        config = outcome(document)
        if must_fail is not None:
            assert (config is None) == must_fail, (mutation.__name__, document)
        if config is not None:
            assert_sound(document, document)
        seen[mutation.__name__, config is not None] += 1
    refused = sum(count for (_, accepted), count in seen.items() if not accepted)
    assert refused > COUNT // 3
    assert len(seen) >= len(MUTATIONS) + 4, "every mutation had its turn"


def assert_sound(document: dict[str, Any], shown: Any) -> None:
    plain = json.loads(json.dumps(document), parse_constant=lambda name: None if name == "Infinity" else name)
    for error in VALIDATOR.iter_errors(plain):
        raise AssertionError(f"accepted against the schema at {list(error.path)}: {error.message[:200]} in {shown!r:.2000}")


def test_real_configurations_agree_with_the_schema():
    jsonschema.Draft202012Validator.check_schema(json_schema())
    for document in DOCUMENTS:
        assert_sound(document, document)


def test_the_schema_refuses_what_the_check_refuses():
    for wrong in (
        {"train_batch_size": "8"},
        {"zero_optimization": {"stage": 4}},
        {"xyzzy": 1},
        {"fp16": {"enabled": 1}},
        {"optimizer": {}},
        {"optimizer": {"type": "Adamm"}},
        {"optimizer": {"type": "adam", "params": {"lr": -1}}},
        {"optimizer": {"type": "ADAMW", "params": {"learning_rate": 1}}},
        {"scheduler": {"type": "Foo"}},
        {"sequence_parallel_size": 4},
        {"amp": {"enabled": True}},
    ):
        assert check(wrong).problems
        assert list(VALIDATOR.iter_errors(wrong))
