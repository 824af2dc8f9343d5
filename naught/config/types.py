"""Types: what a key is, and the kinds of values that keys take. Strict where DeepSpeed's users mistype, lenient where
they are only writing a number as people do."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StrictBool, WithJsonSchema

from naught.errors import UsageError
from naught.quantity import parse_bytes

__all__ = [
    "SAME",
    "Betas",
    "Block",
    "Count",
    "Effect",
    "Flag",
    "Key",
    "Names",
    "Opaque",
    "Positive",
    "Precision",
    "Rates",
    "Real",
    "Share",
    "Text",
    "Whole",
    "any_case",
    "idle",
    "lower",
    "never_if_infinite",
    "shown",
    "true_or_false",
]


class Effect(StrEnum):
    HONOURED = "honoured"
    NONE = "no effect"
    REFUSED = "refused"


SAME = object()


@dataclass(frozen=True)
class Key:
    """What a key does here. `peer` is DeepSpeed 0.19.8's default where ours differs; `why` says why it differs, or
    why the key has no effect; `also` lists other spellings."""

    does: str
    why: str = ""
    effect: Effect = Effect.HONOURED
    peer: Any = SAME
    also: tuple[str, ...] = ()


def idle(why: str, *, also: tuple[str, ...] = ()) -> Key:
    return Key("", why, Effect.NONE, also=also)


def _whole(value: Any) -> int:
    """5e8 is a whole number to whoever wrote it; true, "3" and 1.5 are not."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if type(value) is not int or abs(value) >= 2**63:
        raise ValueError("not a whole number")
    return value


def _real(value: Any) -> float:
    # The comparison is exact for whole numbers of any length, and false for NaN.
    if type(value) not in (int, float) or not abs(value) <= 1e300:
        raise ValueError("not a finite number")
    return float(value)


def true_or_false(value: Any) -> bool:
    """Python's 1 equals True; JSON's does not."""
    if not isinstance(value, bool):
        raise ValueError("not true or false")
    return value


def never_if_infinite(value: Any) -> Any:
    """Hugging Face passes infinity to mean never."""
    return None if isinstance(value, float) and value == math.inf else value


def _dropped(_: Any) -> None:
    return None


def lower(value: Any) -> Any:
    return value.lower() if isinstance(value, str) else value


_PRECISIONS = {"float32": "fp32", "float16": "fp16", "half": "fp16", "bfloat16": "bf16", "bfp16": "bf16"}


def _precision(value: Any) -> Any:
    lowered = value.lower().removeprefix("torch.") if isinstance(value, str) else value
    return _PRECISIONS.get(lowered, lowered) if isinstance(lowered, str) else lowered


def _nbytes(value: Any) -> Any:
    """80GB and 1.5TiB are what people write; a bare number is bytes."""
    if not isinstance(value, str):
        return _whole(value)
    try:
        return parse_bytes(value)
    except UsageError as error:
        raise ValueError("not a size like 80GB or 125GiB") from error


def any_case(*names: str) -> WithJsonSchema:
    """JSON Schema cannot say that case does not matter; these are the cases that people write."""
    return WithJsonSchema({"enum": [spelling for name in names for spelling in (name, name.capitalize(), name.upper())]})


Whole = Annotated[int, BeforeValidator(_whole)]
Real = Annotated[float, BeforeValidator(_real)]
Share = Annotated[Real, Field(ge=0, le=1)]
Positive = Annotated[Whole, Field(ge=1)]
Count = Annotated[Whole, Field(ge=0)]
SIZE = WithJsonSchema({"type": ["integer", "string"]})
Size = Annotated[int, BeforeValidator(_nbytes), Field(ge=1), SIZE]
Flag = StrictBool
Text = Annotated[str, Field(strict=True, max_length=4096)]
Names = tuple[Text, ...]
Rates = Annotated[Real, Field(ge=0)] | tuple[Annotated[Real, Field(ge=0)], ...]
Precision = Annotated[
    Literal["fp32", "fp16", "bf16"], BeforeValidator(_precision), any_case("fp32", "fp16", "bf16", *_PRECISIONS)
]
Betas = tuple[Annotated[Real, Field(ge=0, lt=1)], Annotated[Real, Field(ge=0, lt=1)]]
Opaque = Annotated[None, BeforeValidator(_dropped), WithJsonSchema({})]


class Block(BaseModel):
    """An object of the configuration; its fields are its keys."""

    model_config = ConfigDict(frozen=True, extra="forbid")


def shown(value: Any) -> str:
    """A value as a message shows it: short, and with its type where that is the point."""
    kinds: list[tuple[type, Callable[[Any], str]]] = [
        (bool, lambda flag: f"{str(flag).lower()} (a boolean)"),
        (str, lambda text: f'"{text[:60]}" (a text)'),
        (dict, lambda _: "an object"),
        (list, lambda members: f"a list of {len(members)}" if len(members) > 4 else f"[{', '.join(map(shown, members))}]"),
        (float, lambda number: "NaN" if math.isnan(number) else repr(number)),
    ]
    if value is None:
        return "null"
    return next((show(value) for kind, show in kinds if isinstance(value, kind)), repr(value)[:60])
