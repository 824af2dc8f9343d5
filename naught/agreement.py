"""Agreement: ranks that differ in version, configuration or model are told so at the start, by name, on every rank."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from naught.comm import Group
from naught.config import Config, to_document
from naught.errors import RankMismatch

__all__ = ["agree", "facts_of"]

_SHOWN = 4


def facts_of(model: nn.Module, config: Config, version: str, groups: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Everything that must be the same on all ranks, each under the name that a user knows it by."""
    facts = {"naught's version": version, "torch's version": torch.__version__}
    facts |= {f"configuration key {path}": value for path, value in _leaves(to_document(config), "")}
    keys: dict[int, str] = {}
    for at, (name, param) in enumerate(model.named_parameters(remove_duplicate=False)):
        tied = keys.setdefault(id(param), name)
        kind = f"{str(param.dtype).removeprefix('torch.')}, {'trained' if param.requires_grad else 'frozen'}"
        facts[f"parameter {at}"] = f'"{name}" {list(param.shape)} {kind}' + (f', tied to "{tied}"' if tied != name else "")
    for at, group in enumerate(groups):
        facts |= {f'"{key}" of parameter group {at}': _told(value) for key, value in group.items() if key != "params"}
        facts[f"members of parameter group {at}"] = ", ".join(keys.get(id(param), "?") for param in group["params"])
    return facts


def _told(value: Any) -> str:
    """A hyperparameter as text that has no address in it."""
    plain = value.tolist() if isinstance(value, torch.Tensor) else value
    simple = isinstance(plain, int | float | str | list | tuple | None)
    return repr(plain) if simple else type(plain).__name__


def _leaves(value: Any, path: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping):
        for key, member in value.items():
            yield from _leaves(member, f"{path}.{key}".removeprefix("."))
    else:
        yield path, json.dumps(value)


def agree(group: Group, facts: Mapping[str, str]) -> None:
    """Raise the same RankMismatch on every rank if their facts differ, saying which and how."""
    text = json.dumps(facts)
    digest = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little", signed=True)
    rows = group.exchange(torch.tensor([digest]))
    if bool((rows == rows[0]).all()):
        return
    everyone: list[dict[str, str]] = [json.loads(other) for other in group.exchange_texts(text)]
    names = list(dict.fromkeys(name for theirs in everyone for name in theirs))
    differing = [name for name in names if len({theirs.get(name) for theirs in everyone}) > 1]
    shown = "; ".join(f"{name}: {_by_rank([theirs.get(name, 'none') for theirs in everyone])}" for name in differing[:_SHOWN])
    more = f"; and {len(differing) - _SHOWN} more" if len(differing) > _SHOWN else ""
    raise RankMismatch(
        f"the ranks differ in {shown}{more}",
        fix="start every rank with the same versions, the same configuration and the same model, built in the same order",
    )


def _by_rank(values: list[str]) -> str:
    """Each value with the ranks that have it."""
    holders: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        holders.setdefault(value, []).append(rank)
    return ", ".join(
        f"{value} on rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks[:8]))}" for value, ranks in holders.items()
    )
