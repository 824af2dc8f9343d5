"""Loss scale: the factor on the loss that keeps fp16 gradients above zero and below infinity. Pure.

All ranks see the same overflows, so all have the same scale.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Protocol

__all__ = ["AdaptiveScale", "FixedScale", "LossScale", "Unscaled"]

_FACTOR = 2.0


class LossScale(Protocol):
    @property
    def value(self) -> float: ...

    @property
    def adapts(self) -> bool: ...

    def update(self, *, overflow: bool) -> bool:
        """A step is over. False if it overflowed and the scale can fall no further: scaling will not help."""


@dataclass(frozen=True)
class Unscaled:
    """For whoever does not scale: an overflow has nothing to do with it."""

    value: float = 1.0
    adapts: ClassVar[bool] = False

    def update(self, *, overflow: bool) -> bool:
        del overflow
        return True


@dataclass(frozen=True)
class FixedScale:
    """A scale that never changes."""

    value: float
    adapts: ClassVar[bool] = False

    def update(self, *, overflow: bool) -> bool:
        return not overflow


@dataclass
class AdaptiveScale:
    """Halves after overflows and doubles with the step that follows `window` steps without any.

    `hysteresis` counts the overflow that halves it: those before it are forgiven. Forgiveness is restored when the scale
    doubles, or, if `consecutive`, by every step without overflow.
    """

    value: float
    window: int
    hysteresis: int
    consecutive: bool
    minimum: float
    steps: int = 0
    last_overflow: int = -1
    forgiveness: int = field(init=False)
    adapts: ClassVar[bool] = True

    def __post_init__(self) -> None:
        self.forgiveness = self.hysteresis

    def update(self, *, overflow: bool) -> bool:
        fell_short = False
        if overflow:
            if self.forgiveness == 1:
                fell_short = self.value <= self.minimum
                self.value = max(self.value / _FACTOR, self.minimum)
            else:
                self.forgiveness -= 1
            self.last_overflow = self.steps
        else:
            clean = self.steps - self.last_overflow - 1  # steps without overflow before this one
            doubles = clean > 0 and clean % self.window == 0
            if self.consecutive or doubles:
                self.forgiveness = self.hysteresis
            if doubles:
                self.value *= _FACTOR
        self.steps += 1
        return not fell_short
