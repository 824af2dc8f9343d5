"""Layouts cover every element once, and any world re-shards to any other."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from naught.errors import ModelError
from naught.extents import Extents
from naught.layout import ALIGN_NUMEL, Layout, Span, intersect, lay_out, pad, reshard

shapes = st.lists(st.lists(st.integers(0, 9), max_size=3).map(tuple), min_size=0, max_size=8)  # scalars, empty and small tensors
worlds = st.integers(1, 9)
aligns = st.sampled_from([1, 2, 16, ALIGN_NUMEL])


def layout_of(shapes: list[tuple[int, ...]], world: int, align: int) -> Layout:
    return lay_out([(f"p{at}", shape) for at, shape in enumerate(shapes)], world=world, align=align)


@given(shapes, worlds, aligns)
def test_shards_cover_every_element_exactly_once(shapes, world, align):
    layout = layout_of(shapes, world, align)
    times_owned = np.zeros(layout.numel, dtype=int)
    for rank in range(world):
        shard = layout.shard(rank)
        times_owned[shard.start : shard.stop] += 1
    assert (times_owned == 1).all()
    in_slot = np.zeros(layout.numel, dtype=int)
    for rank in range(world):
        for slot, span in layout.owned(rank):
            assert slot.span.start <= span.start < span.stop <= slot.span.stop
            in_slot[span.start : span.stop] += 1
    assert in_slot.sum() == sum(int(np.prod(shape, dtype=int)) for shape in shapes)
    assert in_slot.max(initial=0) <= 1


@given(shapes, worlds, aligns)
def test_slots_and_shards_start_aligned_and_slots_do_not_move_with_the_world(shapes, world, align):
    layout = layout_of(shapes, world, align)
    assert all(slot.span.start % align == 0 for slot in layout.slots)
    assert all(layout.shard(rank).start % align == 0 for rank in range(world))
    assert layout.slots == layout_of(shapes, 1, align).slots


@given(shapes, worlds, worlds, aligns, aligns)
def test_any_world_and_alignment_reshards_to_any_other(shapes, old_world, new_world, old_align, new_align):
    old, new = layout_of(shapes, old_world, old_align), layout_of(shapes, new_world, new_align)
    old_flat = np.full(old.numel, -1)
    wanted = np.full(new.numel, -1)
    value = 0
    for before, after in zip(old.slots, new.slots, strict=True):
        numel = before.span.numel
        old_flat[before.span.start : before.span.stop] = np.arange(value, value + numel)
        wanted[after.span.start : after.span.stop] = np.arange(value, value + numel)
        value += numel
    found = np.full(new.numel, -1)
    for rank in range(new_world):
        shard = found[slice(*new.shard(rank))]
        for piece in reshard(old, new, rank):
            source = old_flat[slice(*old.shard(piece.source_rank))]
            assert (shard[piece.target_start : piece.target_start + piece.numel] == -1).all(), "written twice"
            shard[piece.target_start : piece.target_start + piece.numel] = source[
                piece.source_start : piece.source_start + piece.numel
            ]
    assert (found == wanted).all()


@given(st.integers(0, 10**13), st.integers(1, 4096), st.integers(1, 4096))
def test_padding_is_the_least_that_divides(numel, world, align):
    padded = pad(numel, world, align)
    assert padded >= numel
    assert padded % (world * align) == 0
    assert padded - numel < world * align


@given(st.integers(0, 50), st.integers(0, 50), st.integers(0, 50), st.integers(0, 50))
def test_intersection_is_what_two_ranges_share(a, b, c, d):
    common = intersect(Span(a, b), Span(c, d))
    shared = set(range(a, b)) & set(range(c, d))
    assert (set(range(*common)) if common else set()) == shared


def test_bad_layouts_are_refused_by_name():
    with pytest.raises(ModelError, match='"w" is laid out twice'):
        lay_out([("w", (2,)), ("w", (3,))], world=1)
    with pytest.raises(ModelError, match='"w" has a negative extent'):
        lay_out([("w", (-2,))], world=1)
    with pytest.raises(ModelError, match="at least one rank"):
        lay_out([], world=0)


def test_resharding_between_different_models_is_refused():
    old = lay_out([("a", (4,))], world=2)
    with pytest.raises(ModelError, match=r'"b" \[4\] is missing'):
        list(reshard(old, lay_out([("b", (4,))], world=1), 0))
    with pytest.raises(ModelError, match=r'"a" \[5\] is \[4\]'):
        list(reshard(old, lay_out([("a", (5,))], world=1), 0))
    both = lay_out([("a", (4,)), ("z", (4,))], world=2)
    for rank in range(2):  # also the rank that does not own the missing one
        with pytest.raises(ModelError, match='"z"'):
            list(reshard(old, both, rank))


@given(st.lists(st.integers(1, 9), min_size=1, max_size=40), st.randoms(use_true_random=False))
def test_room_in_a_file_is_used_again_and_never_twice_at_once(sizes, dice):
    extents, end, taken = Extents(), 0, []
    for size in sizes:
        at = extents.take(size)
        if at is None:
            at, end = end, end + size
        assert all(at + size <= other or other + many <= at for other, many in taken)
        taken.append((at, size))
        while taken and dice.random() < 0.5:
            extents.give_back(*taken.pop(dice.randrange(len(taken))))
    for span in taken:
        extents.give_back(*span)
    assert extents.take(end) == 0  # all of it is one again
