"""The loss scale follows DeepSpeed's documented rules over any pattern of overflows."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from naught.loss_scale import AdaptiveScale, FixedScale


def by_the_rules(
    history: list[bool], *, start: float, window: int, hysteresis: int, consecutive: bool, least: float
) -> list[float]:
    """The scale after each step, told as a story: how many clean steps lie behind, how many overflows are forgiven."""
    scale, clean, left = start, 0, hysteresis - 1
    told = []
    for overflow in history:
        if overflow:
            if left:
                left -= 1
            else:
                scale = max(scale / 2, least)
            clean = 0
        else:
            grows = clean > 0 and clean % window == 0
            if grows:
                scale *= 2
            if grows or consecutive:
                left = hysteresis - 1
            clean += 1
        told.append(scale)
    return told


@given(
    st.lists(st.booleans(), max_size=60) | st.lists(st.sampled_from([False, False, False, False, True]), max_size=60),
    st.sampled_from([1.0, 2.0**4, 2.0**16]),
    st.integers(1, 6),
    st.integers(1, 4),
    st.booleans(),
    st.sampled_from([1.0, 8.0]),
)
def test_a_trajectory_is_the_documented_one(history, start, window, hysteresis, consecutive, least):
    scale = AdaptiveScale(start, window=window, hysteresis=hysteresis, consecutive=consecutive, minimum=least)
    found = []
    for overflow in history:
        scale.update(overflow=overflow)
        found.append(scale.value)
    assert found == by_the_rules(history, start=start, window=window, hysteresis=hysteresis, consecutive=consecutive, least=least)


def test_an_overflow_at_the_minimum_is_told():
    scale = AdaptiveScale(2.0, window=10, hysteresis=1, consecutive=False, minimum=1.0)
    assert [scale.update(overflow=True) for _ in range(3)] == [True, False, False]
    assert scale.value == 1.0
    assert scale.update(overflow=False)


def test_a_fixed_scale_stays_and_tells_every_overflow():
    scale = FixedScale(128.0)
    assert [scale.update(overflow=flag) for flag in (False, True)] == [True, False]
    assert scale.value == 128.0
