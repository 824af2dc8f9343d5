"""Torn: an update that an exception has ended in the middle. Some weights are new and some are old, which the exception says, and
nobody goes on with them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from naught.errors import HalfUpdated

__all__ = ["BESIDE_TRAINING", "IN_THE_BACKWARD", "IN_THE_STEP", "half_updated", "has_torn", "is_left_torn", "tearing"]

_LEFT = "Some weights are new and some are old: load a checkpoint before you go on"
IN_THE_STEP = f"naught: this happened in the middle of an update. {_LEFT}"
IN_THE_BACKWARD = f"{IN_THE_STEP}. Units are updated in the backward (naught.update_in_backward)"
# What waits for such an update raises its error every time.
BESIDE_TRAINING = f"naught: this happened in an update on the host, maybe one of an earlier step(). {_LEFT}"


@contextmanager
def tearing(note: str) -> Iterator[None]:
    """What ends this in the middle, an interrupt, too, says what it leaves."""
    try:
        yield
    except BaseException as error:
        error.add_note(note)
        raise


def has_torn(error: BaseException) -> bool:
    """Whether an exception has ended an update that was the main thread's to finish."""
    return _has_note(error, IN_THE_STEP)


def is_left_torn(error: BaseException) -> bool:
    """Whether an exception comes of an update that was ended in the middle, by whomever."""
    return _has_note(error, IN_THE_STEP, BESIDE_TRAINING)


def _has_note(error: BaseException, *beginnings: str) -> bool:
    return any(note.startswith(beginnings) for note in getattr(error, "__notes__", ()))


def half_updated() -> HalfUpdated:
    """What whoever goes on all the same is told."""
    return HalfUpdated(
        "a step was ended in the middle of its update: some weights are new and some are old",
        fix="load a checkpoint with engine.load_checkpoint, all of it (strictly, with the optimizer), or make the engine anew",
    )
