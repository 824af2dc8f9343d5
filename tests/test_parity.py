"""Every stage trains bit for bit alike, and like plain PyTorch, on every model of the menagerie."""

from __future__ import annotations

import os
from itertools import product

import pytest
from menagerie import MODELS
from training import Outcome, train, train_plainly
from workers import World

# Models in which ranks differ have no plain counterpart, and batch statistics are each rank's own.
OWN_WAY = {"block_skipped_on_one_rank", "experts_by_rank_and_batch", "buffers"}
# Parameters of a few odd elements: torch's kernel rounds such a tail by itself differently from the body of a flat.
ODD_SIZES = {"uneven_sizes_and_users_hooks", "dataclass_outputs_and_keyword_inputs"}
SOAK = os.environ.get("NAUGHT_SOAK") == "1"


def outcomes(world: World, name: str, **options) -> list[list[Outcome]]:
    return [world.reference(train, name, stage, **options) for stage in range(4)]


def assert_ranks_agree(runs: list[list[Outcome]]) -> None:
    for run in runs:
        assert len({outcome.weights for outcome in run}) == 1
        assert len({tuple(outcome.norms) for outcome in run}) == 1


@pytest.mark.parametrize("name", MODELS)
def test_all_stages_are_alike_on_two_ranks_and_equal_plain_pytorch(worlds, name):
    runs = outcomes(worlds[2], name, clip=0.5)
    assert_ranks_agree(runs)
    assert all(run == runs[0] for run in runs)
    if name not in OWN_WAY | ODD_SIZES:
        losses, weights = worlds[1].run(train_plainly, name, 2, runs[0][0].norms, clip=0.5)[0]
        assert losses == runs[0][0].losses
        assert weights == runs[0][0].weights


@pytest.mark.parametrize("name", MODELS)
def test_a_world_of_one_is_the_same_path(worlds, name):
    runs = outcomes(worlds[1], name, clip=0.5)
    assert all(run == runs[0] for run in runs)
    if name in ODD_SIZES:
        return
    losses, weights = worlds[1].run(train_plainly, name, 1, runs[0][0].norms, clip=0.5)[0]
    assert (losses, weights) == (runs[0][0].losses, runs[0][0].weights)


# A pairwise selection; NAUGHT_SOAK=1 runs the product.
SELECTION = [
    ("plain", 3, 1, 0.0),
    ("tied", 4, 3, 0.5),
    ("frozen", 3, 3, 0.0),
    ("lora", 4, 1, 0.5),
    ("checkpoint_reentrant", 3, 3, 0.5),
    ("checkpoint_non_reentrant", 4, 1, 0.0),
    ("block_used_twice", 2, 3, 0.0),
    ("unused_parameters", 2, 3, 0.5),
    ("block_skipped_on_one_rank", 3, 1, 0.5),
    ("experts_by_rank_and_batch", 4, 3, 0.0),
    ("dict_outputs", 2, 3, 0.5),
    ("skip_connections", 3, 3, 0.5),
    ("uneven_sizes_and_users_hooks", 4, 3, 0.5),
    ("convolution", 3, 3, 0.0),
]
EVERYTHING = list(product(MODELS, (1, 2, 3, 4), (1, 3), (0.0, 0.5)))


@pytest.mark.parametrize(("name", "size", "accumulation", "clip"), EVERYTHING if SOAK else SELECTION)
def test_more_ranks_and_micro_batches(worlds, name, size, accumulation, clip):
    """Summing micro-batches before ranks (stages 0 and 1) or ranks before micro-batches (2 and 3) rounds differently."""
    options = {"accumulation": accumulation, "clip": clip, "steps": 5 if SOAK else 4 if accumulation == 1 else 3}
    runs = outcomes(worlds[size], name, **options)
    assert_ranks_agree(runs)
    assert runs[0] == runs[1]
    assert runs[2] == runs[3]
    if accumulation == 1:
        assert runs[0] == runs[2]
    else:
        every = {"naught": {"reduce_every_micro_batch": True}}
        alike = outcomes(worlds[size], name, **options, more=every)
        assert all(run == alike[0] for run in alike)
    if name == "experts_by_rank_and_batch":
        return  # a last bit may choose another expert, and then the losses part
    for early, late in zip(runs[0], runs[2], strict=True):
        assert early.losses == pytest.approx(late.losses, rel=1e-4)
