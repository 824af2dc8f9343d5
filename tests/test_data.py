"""Ranks share a dataset out, shuffle it anew each epoch, and start over when they are told to repeat."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, SequentialSampler, TensorDataset

from naught.data import RepeatingLoader, loader_of
from naught.errors import UsageError


class Numbers(Dataset):
    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, at: int) -> int:
        return at


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(5))


def ranks(count: int, world: int = 2, **options):
    return [loader_of(Numbers(count), batch_size=4, rank=rank, world=world, **options) for rank in range(world)]


def samples(loader) -> list[int]:
    return [int(value) for batch in loader for value in batch]


def test_ranks_see_every_sample_once():
    loaders = ranks(24)
    assert [len(loader) for loader in loaders] == [3, 3]
    shares = [samples(loader) for loader in loaders]
    assert sorted(shares[0] + shares[1]) == list(range(24))
    assert shares[0] + shares[1] != list(range(24))


def test_each_epoch_is_shuffled_anew_and_alike_on_all_ranks():
    loaders = ranks(24)
    epochs = [[samples(loader) for loader in loaders] for _ in range(3)]
    assert all(sorted(first + second) == list(range(24)) for first, second in epochs)
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    again = ranks(24)
    assert [[samples(loader) for loader in again] for _ in range(3)] == epochs


def test_it_is_the_order_of_torchs_own_sampler():
    loader = ranks(24, seed=7)[1]
    sampler = DistributedSampler(Numbers(24), 2, 1, seed=7)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        assert samples(loader) == list(sampler)


@pytest.mark.parametrize("through", ["loader", "sampler"])
def test_whoever_sets_the_epoch_is_heeded(through):
    loader, reference = ranks(24)[0], ranks(24)[0]
    epochs = [samples(reference) for _ in range(9)]
    teller = loader if through == "loader" else loader.sampler
    for epoch in range(3):
        teller.set_epoch(epoch)
        assert samples(loader) == epochs[epoch]
    teller.set_epoch(7)
    assert samples(loader) == epochs[7]
    assert samples(loader) == epochs[8]


def test_the_same_epoch_may_be_asked_for_again():
    loader = ranks(24)[0]
    orders = []
    for _ in range(2):
        loader.set_epoch(5)
        orders.append(samples(loader))
    assert orders[0] == orders[1]


def test_order_is_kept_without_shuffling():
    first, second = ranks(8, shuffle=False)
    assert samples(first) == samples(first) == [0, 2, 4, 6]
    assert samples(second) == [1, 3, 5, 7]


def test_ranks_have_as_many_batches_though_samples_do_not_divide():
    shares = [samples(loader) for loader in ranks(9)]
    assert [len(share) for share in shares] == [5, 5]
    assert set(shares[0]) | set(shares[1]) == set(range(9))


def test_what_is_dropped_is_not_made_up_for():
    shares = [samples(loader) for loader in ranks(15, drop_last=True)]
    assert [len(share) for share in shares] == [4, 4]  # of 7 each: an eighth would come twice
    assert len(set(shares[0]) | set(shares[1])) == 8


def test_an_iterable_dataset_is_taken_as_it_comes():
    loader = loader_of(Stream(), batch_size=2, rank=1, world=2)
    assert samples(loader) == samples(loader) == [0, 1, 2, 3, 4]
    loader.set_epoch(3)
    assert samples(loader) == [0, 1, 2, 3, 4]


def test_a_sampler_of_the_users_own_is_taken_as_it_comes():
    data = Numbers(6)
    loader = loader_of(data, batch_size=4, rank=1, world=2, sampler=SequentialSampler(data))
    assert [batch.tolist() for batch in loader] == [[0, 1, 2, 3], [4, 5]]
    assert loader_of(data, batch_size=4, rank=0, world=2, sampler=SequentialSampler(data), drop_last=True).drop_last
    theirs = DistributedSampler(data, 2, 0)
    loader = loader_of(data, batch_size=4, rank=0, world=2, sampler=theirs)
    assert samples(loader) == samples(loader)
    assert theirs.epoch == 0


def test_collating_and_workers_are_the_dataloaders():
    data = TensorDataset(torch.arange(8.0))
    loader = loader_of(data, batch_size=2, rank=0, world=1, collate_fn=len, num_workers=1, pin_memory=True)
    assert list(loader) == [2, 2, 2, 2]
    assert isinstance(loader.loader, DataLoader)
    assert (loader.batch_size, loader.num_workers, loader.dataset) == (2, 1, data)
    assert loader.pin_memory is torch.accelerator.is_available()
    with pytest.raises(AttributeError, match="nonsense"):
        loader.nonsense  # noqa: B018
    assert len(copy.copy(loader)) == 4


@pytest.mark.parametrize(
    ("data", "options", "said"),
    [
        (Numbers(0), {}, "the dataset is empty"),
        (Numbers(1), {"drop_last": True}, "1 samples has no full batch of 4 for each of 2 ranks"),
        (Numbers(7), {"drop_last": True}, "7 samples has no full batch of 4 for each of 2 ranks"),
        (Stream(), {"sampler": [0]}, "an iterable dataset has no sampler"),
        ((number for number in range(3)), {}, "a generator is no dataset"),
        (Numbers(8), {"batch_size": 0}, "at least 1 sample, not 0"),
    ],
)
def test_data_that_gives_no_batch_is_refused(data, options, said):
    with pytest.raises(UsageError, match=said):
        loader_of(data, **({"batch_size": 4, "rank": 0, "world": 2} | options))


def test_a_dataset_smaller_than_the_world_is_shared_by_repeating_it():
    shares = [samples(loader) for loader in ranks(2, world=4)]
    assert [len(share) for share in shares] == [1, 1, 1, 1]
    assert {value for share in shares for value in share} == {0, 1}


def test_a_repeating_loader_starts_over_with_a_new_order():
    loader = ranks(24)[0]
    repeating = RepeatingLoader(loader)
    assert len(repeating) == 3
    drawn = [next(repeating).tolist() for _ in range(7)]
    fresh = ranks(24)[0]
    assert drawn == list(itertools.islice((batch.tolist() for _ in range(3) for batch in fresh), 7))
    assert drawn[:3] != drawn[3:6]
    assert [batch for batch, _ in zip(RepeatingLoader([1, 2]), range(5), strict=False)] == [1, 2, 1, 2, 1]


@pytest.mark.parametrize("loader", [[], iter([1])], ids=["empty", "used up"])
def test_repeating_nothing_is_refused(loader):
    repeating = RepeatingLoader(loader)
    with pytest.raises(UsageError, match="gives no batch"):
        for _ in range(2):
            next(repeating)


# --- where it is ----------------------------------------------------------------------------------------------------------


def take(loader, count: int) -> list[int]:
    return [int(value) for batch in itertools.islice(iter(loader), count) for value in batch]


@pytest.mark.parametrize(("epochs", "batches"), [(0, 0), (0, 1), (0, 2), (1, 2), (0, 3), (2, 0)])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_goes_on_where_it_was(epochs, batches, workers):
    loader, reference = ranks(24, num_workers=workers)[1], ranks(24)[1]
    for _ in range(epochs):
        assert samples(loader) == samples(reference)
    had, whole = take(loader, batches) if batches else [], samples(reference)
    assert had == whole[: len(had)]
    state = loader.state_dict()
    again = ranks(24, num_workers=workers)[1]
    again.load_state_dict(state)
    assert again.state_dict() == state
    rest = samples(again)
    follows = samples(reference)
    assert rest + samples(again) == (whole[len(had) :] or follows) + (follows if len(had) < len(whole) else samples(reference))


def test_users_who_set_the_epoch_again_after_loading_lose_nothing():
    loader, reference = ranks(24)[0], ranks(24)[0]
    samples(reference)
    whole = samples(reference)
    loader.load_state_dict({"epoch": 1, "samples": 8})
    loader.sampler.set_epoch(1)
    assert samples(loader) == whole[4:]
    loader.sampler.set_epoch(1)
    assert samples(loader) == whole


@pytest.mark.parametrize("world", [1, 3, 6])
def test_another_number_of_ranks_sees_the_rest_and_nothing_twice(world):
    first = [take(loader, 3) for loader in ranks(72, world=2)]
    loaders = ranks(72, world=world)
    for loader in loaders:
        loader.load_state_dict({"epoch": 0, "samples": 24})
    seen = [value for share in [*first, *map(samples, loaders)] for value in share]
    assert sorted(seen) == list(range(72))


def test_what_has_its_own_order_is_drawn_again():
    loader = loader_of(Stream(), batch_size=2, rank=0, world=1)
    assert take(loader, 1) == [0, 1]
    again = loader_of(Stream(), batch_size=2, rank=0, world=1)
    again.load_state_dict(loader.state_dict())
    assert samples(again) == [2, 3, 4]
    assert samples(again) == [0, 1, 2, 3, 4]
