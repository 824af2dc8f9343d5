"""Quantities as people write them: 80GB, 1.5TiB, 7.5B parameters; and back."""

from __future__ import annotations

import math
import re

from naught.errors import UsageError

__all__ = ["parse_bytes", "parse_count", "show_bytes", "show_clock", "show_count", "show_seconds"]

_BYTES = {"B": 1}
for _power, _letter in enumerate("KMGTP", start=1):
    _BYTES |= {_letter: 1000**_power, f"{_letter}B": 1000**_power, f"{_letter}IB": 1024**_power}
_COUNTS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "G": 10**9, "T": 10**12}
_NUMBER = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?(?:[eE]\+?[0-9]{1,2})?)\s*([A-Za-z]*)\s*", re.ASCII)


def parse_bytes(text: str, *, what: str = "size") -> int:
    """Bytes from 80GB (decimal) or 80GiB (binary). Only 0 needs no unit: nobody means 80 bytes."""
    if text.strip() == "0":
        return 0
    return _parse(text, _BYTES, what, "80GB, 1.5TB or 125GiB")


def parse_count(text: str, *, what: str = "count") -> int:
    """A number of parameters or tokens from 124M, 7.5B, 1T or a bare number."""
    return _parse(text, _COUNTS, what, "124M, 7.5B or 1T")


def _parse(text: str, units: dict[str, int], what: str, example: str) -> int:
    match = _NUMBER.fullmatch(text)
    scale = units.get(match[2].upper()) if match else None
    if match is None or scale is None:
        raise UsageError(f'{what} "{text[:80]}" is not a quantity', fix=f"write it like {example}")
    value = float(match[1]) * scale
    if not math.isfinite(value) or value >= 2**70:
        raise UsageError(f'{what} "{text[:80]}" is too large')
    return round(value)


def show_bytes(nbytes: float) -> str:
    """Three significant digits in decimal units, as the papers print them."""
    return _show(nbytes, ["B", "kB", "MB", "GB", "TB", "PB"], " ")


def show_count(numel: float) -> str:
    return _show(numel, ["", "k", "M", "B", "T"], "")


def _show(value: float, units: list[str], space: str) -> str:
    scaled, power = float(value), 0
    while abs(scaled) >= 999.5 and power < len(units) - 1:
        scaled, power = scaled / 1000, power + 1
    digits = 0 if power == 0 or abs(scaled) >= 99.95 else 1 if abs(scaled) >= 9.995 else 2
    return f"{scaled:.{digits}f}{space}{units[power]}".rstrip()


def show_clock(seconds: float) -> str:
    """As a clock shows it: 1:04, 2:00:05."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


def show_seconds(seconds: float) -> str:
    if seconds >= 3600:
        return f"{seconds / 3600:.1f} h"
    if seconds >= 100:
        return f"{seconds / 60:.1f} min"
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.1f} ms" if seconds >= 0.9995e-3 or not seconds else f"{seconds * 1e6:.3g} us"
