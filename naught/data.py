"""Data: each rank's share of a dataset, in batches. Shuffles anew each epoch without being told."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any, Protocol, runtime_checkable

import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, Sampler

from naught.errors import UsageError

__all__ = ["Loader", "RepeatingLoader", "loader_of"]


def loader_of(
    dataset: Dataset[Any],
    *,
    batch_size: int,
    rank: int,
    world: int,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    sampler: Sampler[Any] | Iterable[Any] | None = None,
    num_workers: int = 0,
    pin_memory: bool = False,
    drop_last: bool = False,
    shuffle: bool = True,
    seed: int = 0,
) -> Loader:
    """Batches of a rank's share of a dataset. An iterable dataset, or one with its own sampler, is taken as it comes:
    it has to give each rank its share itself.

    Every rank has as many samples. Where they cannot be shared out, a few come twice, or are left out by `drop_last`.
    """
    if batch_size < 1:
        raise UsageError(f"a batch has at least 1 sample, not {batch_size}", where="batch_size")
    share: _Share | None = None
    if isinstance(dataset, IterableDataset):
        if sampler is not None:
            raise UsageError("an iterable dataset has no sampler: it gives samples in its own order", fix="leave the sampler out")
    else:
        numel = _numel(dataset)
        if sampler is None:
            if drop_last and numel // world < batch_size:
                raise UsageError(
                    f"a dataset of {numel} samples has no full batch of {batch_size} for each of {world} ranks",
                    fix="set dataloader_drop_last to false, or make the batches smaller",
                )
            share = _Share(dataset, world, rank, shuffle=shuffle, seed=seed, drop_last=drop_last)
    loader = DataLoader(
        dataset,
        batch_size,
        sampler=share if share is not None else sampler,
        num_workers=num_workers,
        collate_fn=collate_fn,
        pin_memory=pin_memory and torch.accelerator.is_available(),  # without one torch would warn of it
        drop_last=drop_last,
        generator=torch.Generator(),  # its own: drawing from the script's would shift what a resumed script draws
    )
    return Loader(loader, share, world, seed)


class _Share(DistributedSampler[Any]):
    """A rank's samples, in torch's order, or from one of them on."""

    first = 0
    asked: int | None = None  # the epoch that a user has set since the last began

    def set_epoch(self, epoch: int) -> None:
        super().set_epoch(epoch)
        self.asked = epoch

    def begin(self, epoch: int, first: int) -> None:
        super().set_epoch(epoch)
        self.first, self.asked = first, None

    def __iter__(self) -> Iterator[Any]:
        return islice(super().__iter__(), self.first, None)


@runtime_checkable
class _Numbered(Protocol):
    """A dataset that is asked for samples by number, whatever it derives from."""

    def __getitem__(self, index: int) -> Any: ...

    def __len__(self) -> int: ...


def _numel(dataset: Dataset[Any]) -> int:
    """How many samples a dataset has that is asked for them by number."""
    kind = type(dataset)
    if not isinstance(dataset, _Numbered):
        raise UsageError(
            f"a {kind.__name__} is no dataset: samples cannot be had from it by number",
            where="training_data",
            fix="give it __getitem__ and __len__, or derive it from torch.utils.data.IterableDataset",
        )
    numel = len(dataset)
    if numel == 0:
        raise UsageError("the dataset is empty", where="training_data")
    return int(numel)


class Loader:
    """A DataLoader that begins a new epoch whenever it is iterated, and can tell and take up where it is. Whoever sets the
    epoch himself is heeded, and counting goes on from there. All else is the DataLoader's own."""

    def __init__(self, loader: DataLoader[Any], share: _Share | None, world: int, seed: int) -> None:
        self.loader, self.share, self.world, self.seed = loader, share, world, seed
        self.epoch = 0  # the one under way, or the next
        self.given: int | None = None  # batches of it; None: it has not begun
        self.skips = 0  # batches that the next iteration leaves out, for it goes on where another was

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        if self.share is not None and self.share.asked is not None:
            self.set_epoch(self.share.asked)
        elif self.given is not None:
            self.set_epoch(self.epoch + 1)
        skips, self.skips = self.skips, 0
        if self.share is not None:
            self.share.begin(self.epoch, skips * self._batch)
        self.loader.generator.manual_seed(self.seed + self.epoch)  # the seeds of workers, too, depend on the epoch alone
        batches = iter(self.loader)
        if self.share is None:
            for _ in range(skips):  # nobody knows the order but by drawing
                next(batches, None)
        self.given = skips
        return self._counted(batches)

    def _counted(self, batches: Iterator[Any]) -> Iterator[Any]:
        epoch = self.epoch
        for batch in batches:
            if self.given is not None and self.epoch == epoch:  # else somebody has gone elsewhere meanwhile
                self.given += 1
            yield batch
        if self.given is not None and self.epoch == epoch:
            self.set_epoch(epoch + 1)

    @property
    def _batch(self) -> int:
        return self.loader.batch_size or 1

    def set_epoch(self, epoch: int) -> None:
        """Shuffle as in this epoch when iterated next: from its start, or from where it was when it was saved."""
        if (epoch, None) != (self.epoch, self.given):
            self.epoch, self.given, self.skips = epoch, None, 0

    def state_dict(self) -> dict[str, int]:
        """Where it is: in an epoch, after so many samples over all ranks. For a checkpoint's client_state; the loader of
        `training_data` is saved with the engine."""
        given = self.skips if self.given is None else self.given
        whole = isinstance(self.loader.dataset, _Numbered) and given >= len(self.loader)
        return {"epoch": self.epoch + whole, "samples": 0 if whole else given * self._batch * self.world}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on there when iterated next, with any number of ranks. Where samples do not make whole batches of all ranks, a
        few come twice. What a user's own sampler or an iterable dataset gave before is drawn again, and let go."""
        self.epoch, self.given = int(state["epoch"]), None
        if self.share is not None:
            self.share.asked = None
        self.skips = int(state["samples"]) // (self._batch * self.world)

    def __getattr__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "loader"), name)


class RepeatingLoader:
    """An iterator that starts its loader over whenever that ends."""

    def __init__(self, loader: Iterable[Any]) -> None:
        self.loader = loader
        self.batches: Iterator[Any] | None = None  # None: not begun

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]

    def __iter__(self) -> RepeatingLoader:
        return self

    def __next__(self) -> Any:
        nothing = object()
        batch = nothing if self.batches is None else next(self.batches, nothing)
        if batch is nothing:
            self.batches = iter(self.loader)
            batch = next(self.batches, nothing)
        if batch is nothing:
            raise UsageError("the loader that is repeated gives no batch", fix="pass one that can be iterated again and again")
        return batch
