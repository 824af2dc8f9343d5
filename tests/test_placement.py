"""Stages are rows of a table, and a placement that would starve a rank is refused."""

from __future__ import annotations

from itertools import product

import pytest

from naught.errors import PlacementError
from naught.placement import PLACEMENTS, STAGES, Place, Placement, Tier, place_stage

EVERY_PLACE = [Place(split, tier) for split, tier in product((False, True), Tier)]


def test_a_placement_is_valid_just_when_no_rank_misses_what_it_needs():
    accepted = refused = 0
    for param, grad, optim in product(EVERY_PLACE, repeat=3):
        chain = param.split <= grad.split <= optim.split
        whole_stays = all(place.split or place.tier is Tier.DEVICE for place in (param, grad, optim))
        if chain and whole_stays:
            Placement(param, grad, optim)
            accepted += 1
        else:
            with pytest.raises(PlacementError) as error:
                Placement(param, grad, optim)
            assert error.value.fix and error.value.where
            refused += 1
    assert (accepted, refused) == (1 + 3 + 9 + 27, 6**3 - 40)


@pytest.mark.parametrize("stage", STAGES)
def test_stages_split_one_kind_more_each(stage):
    placement = place_stage(stage)
    assert placement.param.split + placement.grad.split + placement.optim.split == stage


def test_split_gradients_follow_the_optimizer_to_the_host_and_no_further():
    assert place_stage(1, optim=Tier.HOST).grad == Place(False, Tier.DEVICE)
    assert place_stage(2, optim=Tier.HOST).grad == Place(True, Tier.HOST)
    assert place_stage(3, optim=Tier.DISK).grad == Place(True, Tier.HOST)
    assert place_stage(3, optim=Tier.DISK, grad=Tier.DISK).grad == Place(True, Tier.DISK)


def test_named_rows_are_all_different():
    assert len(set(PLACEMENTS.values())) == len(PLACEMENTS)


def test_offload_of_whole_state_says_what_to_do():
    with pytest.raises(PlacementError, match=r"whole param state cannot rest on host.*Split the param state"):
        place_stage(2, param=Tier.HOST)
