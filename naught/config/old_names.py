"""Old names: ways of saying things that DeepSpeed has changed in more than a word, put into today's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from naught.config.read import Spot
from naught.config.types import shown

__all__ = ["OLD_NAMES", "Modern", "modern_top", "modern_zero"]

OLD_NAMES = {
    "cpu_offload": 'offload_optimizer: {"device": "cpu"}',
    "cpu_offload_param": 'offload_param: {"device": "cpu"}',
    "cpu_offload_use_pin_memory": "pin_memory of both",
    "fp32_allreduce": 'communication_data_type: "fp32"',
}
_PIN = "cpu_offload_use_pin_memory"
_OFFLOADS = {"cpu_offload": "offload_optimizer", "cpu_offload_param": "offload_param"}


@dataclass
class Modern:
    """A block in today's words: its members, what was wrong with the old ones, remarks on them, and for which old key a
    new one stands."""

    values: dict[str, Any]
    faults: list[tuple[Spot, str, str]] = field(default_factory=list)
    remarks: list[tuple[Spot, str]] = field(default_factory=list)
    stands_for: dict[Spot, Spot] = field(default_factory=dict)


def modern_top(values: Mapping[str, Any]) -> Modern:
    """The top level: fp32_allreduce, and a boolean for zero_optimization."""
    modern = Modern({key: value for key, value in values.items() if key != "fp32_allreduce"})
    if "fp32_allreduce" in values:
        asked, spot = values["fp32_allreduce"], ("fp32_allreduce",)
        if not isinstance(asked, bool):
            modern.faults.append((spot, f"must be true or false, is {shown(asked)}", ""))
        elif asked and values.get("communication_data_type") is not None:
            modern.faults.append((spot, "says again what communication_data_type says", "remove it"))
        else:
            modern.remarks.append((spot, f"the old way to say {OLD_NAMES['fp32_allreduce']}"))
            modern.values |= {"communication_data_type": "fp32"} if asked else {}
    zero = values.get("zero_optimization")
    if isinstance(zero, bool):
        modern.remarks.append((("zero_optimization",), "an old way to say stage 1 (true) or 0 (false)"))
        modern.values["zero_optimization"] = {"stage": int(zero)}
    return modern


def modern_zero(values: Mapping[str, Any]) -> Modern:
    """zero_optimization: offloads that were booleans."""
    modern = Modern({key: value for key, value in values.items() if key not in (*_OFFLOADS, _PIN)})
    pinned = values.get(_PIN)
    if pinned is not None and not isinstance(pinned, bool):
        modern.faults.append((_spot(_PIN), f"must be true or false, is {shown(pinned)}", ""))
    elif pinned is not None:
        modern.remarks.append((_spot(_PIN), f"the old name of {OLD_NAMES[_PIN]}"))
    for old, new in _OFFLOADS.items():
        asked = values.get(old)
        if asked in (None, "auto"):
            continue
        if not isinstance(asked, bool):
            modern.faults.append((_spot(old), f"must be true or false, is {shown(asked)}", ""))
        elif asked and values.get(new) is not None:
            modern.faults.append((_spot(old), f"says again what {new} says", f"remove {old}, which is the old name"))
        else:
            modern.remarks.append((_spot(old), f"the old name of {new}"))
            if asked:
                modern.values[new] = {"device": "cpu"} | ({"pin_memory": pinned} if isinstance(pinned, bool) else {})
                modern.stands_for[_spot(new)] = _spot(old)
    return modern


def _spot(key: str) -> Spot:
    return ("zero_optimization", key)
