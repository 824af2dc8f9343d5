"""The batch triple is derived from any one or two of its members, late, and refused where it cannot hold."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from naught.config import Batch, derive_batch, load
from naught.errors import ConfigError

NAMES = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


def derive(world: int, **given_) -> Batch:
    return derive_batch(load({name: value for name, value in zip(NAMES, given_.values(), strict=True) if value}), world)


@given(st.integers(1, 64), st.integers(1, 64), st.integers(1, 64), st.sampled_from([(1, 1, 1), (1, 1, 0), (1, 0, 1), (0, 1, 1)]))
def test_any_two_members_imply_the_third(micro, steps, world, shown):
    whole = Batch(micro * steps * world, micro, steps)
    seen = [member if keep else None for member, keep in zip(whole, shown, strict=True)]
    assert derive(world, train=seen[0], micro=seen[1], steps=seen[2]) == whole


@given(st.integers(1, 64), st.integers(1, 64))
def test_one_member_means_an_accumulation_of_one(micro, world):
    assert derive(world, train=micro * world, micro=None, steps=None) == (micro * world, micro, 1)
    assert derive(world, train=None, micro=micro, steps=None) == (micro * world, micro, 1)


@pytest.mark.parametrize(
    ("document", "world", "words"),
    [
        ({}, 2, "the batch size is not set"),
        ({"gradient_accumulation_steps": 4}, 2, "the batch size is not set"),
        ({"train_batch_size": 7}, 2, "7 is not micro-batch x accumulation x ranks = 3 x 1 x 2 = 6"),
        ({"train_batch_size": 1}, 4, "= 0 x 1 x 4 = 0"),
        ({"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2}, 3, "2 x 1 x 3 = 6"),
        ({"train_batch_size": 8, "gradient_accumulation_steps": 2}, 3, "1 x 2 x 3 = 6"),
        ({"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2}, 4, "2 x 2 x 4 = 16"),
        ({"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto"}, 2, '"auto" can only be filled'),
    ],
)
def test_a_triple_that_cannot_hold_is_refused_with_its_arithmetic(document, world, words):
    with pytest.raises(ConfigError) as raised:
        derive_batch(load(document), world)
    assert words in str(raised.value)
    assert raised.value.problems[0].fix


def test_auto_beside_a_number_is_derived():
    config = load({"train_batch_size": 16, "gradient_accumulation_steps": "auto"})
    assert derive_batch(config, 4) == (16, 4, 1)
