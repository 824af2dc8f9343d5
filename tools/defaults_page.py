"""Prints docs/config.md: every key with our default beside DeepSpeed's, made from the schema so that it cannot lie."""

from __future__ import annotations

import json
from typing import Any

from naught.config import Effect, keys
from naught.config.refused import REFUSED, REFUSED_OPTIMIZERS
from naught.config.types import SAME

HEAD = """# The configuration, key by key

*Made by `make docs` from the schema; a test keeps it true.*

Naught reads the JSON that you have for DeepSpeed: a path, a dict, JSON text or base64 of it, with comments and trailing
commas if you like. Every key that DeepSpeed 0.19.8 knows is **honoured**, has **no effect** here (the table says why), or
is **refused** (the last table says why). Anything else is an error: `naught config check FILE` prints all of them at once,
each with its line. *Honoured* means that the typed object carries the value to the planner and to the engine. What the
engine cannot do yet it refuses instead of ignoring it.

- `5e8` is a whole number; `"3"`, `true` and `1.5` are not.
- `"auto"` is accepted for any value. Whoever starts the run fills it (Hugging Face does) or refuses it by name.
- Keys that begin with `_`, `//`, `#` or `$` are remarks, and so are `comment` and `comments`. A block may be `null`.
- `train_batch_size` = micro-batch x accumulation x ranks: give any two, or one and the accumulation is 1. It is derived
  when the number of ranks is known.
- Old names work: `cpu_offload`, `cpu_offload_param`, `cpu_offload_use_pin_memory`, `"zero_optimization": true`.

Defaults are DeepSpeed's but where the table says why.
"""


def main() -> None:
    print(HEAD)
    blocks: dict[str, list[keys.Entry]] = {}
    for entry in keys.entries():
        if not keys.variants(entry.info):
            blocks.setdefault(entry.path.rpartition(".")[0], []).append(entry)
    for block, entries in blocks.items():
        print(f"\n## `{block}`\n" if block else "\n## top level\n")
        print("| key | default | DeepSpeed's | what it does |")
        print("|---|---|---|---|")
        for entry in entries:
            print(_row(entry))
    _refusals()


def _row(entry: keys.Entry) -> str:
    key = entry.key
    name = entry.path.rpartition(".")[2]
    ours = _shown(entry.info.default)
    peer = "" if entry.path.startswith("naught.") else ours if key.peer is SAME else _shown(key.peer)
    does = key.does if key.effect is Effect.HONOURED else f"*no effect:* {key.why}"
    if key.effect is Effect.HONOURED and key.why:
        does += f". *Why:* {key.why}"
    if key.also:
        does += f" (also `{'`, `'.join(key.also)}`)"
    return f"| `{name}` | {ours} | {peer} | {does} |"


def _shown(value: Any) -> str:
    if isinstance(value, str) and " " in value:
        return value
    if isinstance(value, int) and not isinstance(value, bool) and value >= 10**5:
        value = "largest" if value == 2**63 - 1 else value
        return value if isinstance(value, str) else f"`{value:,}`"
    return f"`{json.dumps(value, default=list)}`"


def _refusals() -> None:
    print('\n## Refused\n\nA value that only switches the thing off (`false`, `null`, `{"enabled": false}`) is accepted.\n')
    print("| key | why |\n|---|---|")
    for path, why in REFUSED.items():
        print(f"| `{path}` | {why} |")
    print("\n| optimizer | why |\n|---|---|")
    for name, why in REFUSED_OPTIMIZERS.items():
        print(f"| `{name}` | {why} |")


if __name__ == "__main__":
    main()
