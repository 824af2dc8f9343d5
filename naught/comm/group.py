"""Group: the ranks that train a model. Every collective goes through it and is counted.

All of them talk with each other. States are split over those that have the same part of a model, which are all of them unless
several have a model together. A process without torch.distributed is a group of one, on the same path.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from naught.comm.ledger import Call, Ledger, Waiting
from naught.comm.lineup import Lineup, Seat
from naught.comm.together import Together, heard, told
from naught.comm.wires import Alone, Collectives, Peers, Pending, Wire
from naught.devices import is_out_of_memory
from naught.errors import NaughtError, ScheduleError, UsageError
from naught.layout import ALIGN_NUMEL
from naught.torn import is_left_torn

__all__ = ["SAME_ORDER", "Group", "Mean", "Waits"]


SAME_ORDER = (
    "all ranks must run the same modules in the same order; a module that some ranks skip is fine. Or set "
    "naught.ranks_may_differ: ranks agree on each collective then, which takes longer"
)

_AGAIN = "leave more memory free: what could not be done is done again with the next step"

# Groups share one store, and every rank makes its groups in the same order: their number keeps their keys apart.
_NUMBERS = itertools.count()


class Waits(Protocol):
    """Something under way that the device's order can wait for."""

    def wait(self) -> None: ...


class Mean(NamedTuple):
    """How the gradients of the ranks become one: their mean or their sum, and how much of the division comes before."""

    averages: bool = True
    prescale: bool = False
    predivide: float = 1.0


class Group(Together):
    """Gathers flats, reduces them to their owners, and exchanges numbers. `reduce_numel` is the most that one reduce
    carries where it needs memory of its own."""

    stalls = True  # a rank of it may wait for ever

    def __init__(
        self,
        ledger: Ledger,
        device: torch.device,
        *,
        reduce_numel: int,
        mean: Mean | None = None,
        patience_s: float = 30.0,
        lineup: Lineup | None = None,
    ) -> None:
        self.ledger, self.mean, self.patience_s, self.lineup = ledger, mean or Mean(), patience_s, lineup
        self.number = next(_NUMBERS)
        # Of something that was under way on this rank, to be told to all. Texts: an error would hold the frames that it came
        # through, and they this.
        self.fault = ""  # what is lost, until it is loaded
        self.shortage = ""  # of memory, for what will be done again
        self.gathers_anew = False  # all ranks have heard of something: a part of what was gathered may not have come
        self.meetings = 0
        together = dist.is_available() and dist.is_initialized()
        self.rank: int = dist.get_rank() if together else 0
        self.size: int = dist.get_world_size() if together else 1
        backends = _backends() if together else {}
        self.wire = _wire(self.part, self.parts, device, backends.get(device.type), reduce_numel, lineup)
        # Numbers that ranks exchange lie where the backend can reach them.
        self.desk = torch.device("cpu") if self.size == 1 or "cpu" in backends else device

    @property
    def part(self) -> int:
        """Which slice of every flat is this rank's."""
        return self.rank if self.lineup is None else self.lineup.part

    @property
    def parts(self) -> int:
        """Over how many ranks states are split."""
        return self.size if self.lineup is None else self.lineup.parts

    @property
    def counts_for_all(self) -> bool:
        """Of what all ranks have that have a model together, one's counts: this one's?"""
        return self.lineup is None or self.lineup.model_rank == 0

    @contextmanager
    def noting(self, *, again: bool = False) -> Iterator[None]:
        """Of what fails in here on this rank alone the others are told when all of them look: until then they count on it to go
        on. A rank alone need not wait for that. What had no memory, and is done `again` by whoever asks next, is told until a
        step has been given up for it; all else until it is loaded."""
        try:
            yield
        except Exception as error:
            if self.size == 1:
                raise
            if again and is_out_of_memory(error) and not is_left_torn(error):
                what = f"{type(error).__name__}: {error}"
                self.shortage = self.shortage or told(UsageError(what, fix=_AGAIN))
            else:
                self.fault = self.fault or told(error)

    def look_for_faults(self, *, midway: bool) -> None:
        """Raise on every rank what was noted on any. In the middle of a step, that has to hear of it, too."""
        if self.size > 1:
            self.raise_noted(self.noted if midway else self.take_note())

    @property
    def noted(self) -> NaughtError | None:
        """What was noted on this rank."""
        text = self.fault or self.shortage
        return heard(self.rank, text) if text else None

    def take_note(self) -> NaughtError | None:
        """The same, for `raise_noted`: a shortage is known then."""
        noted, self.shortage = self.noted, ""
        return noted

    def raise_noted(self, amiss: Exception | None) -> None:
        """Raise on every rank what is amiss on any. Weights that did not come whole are gathered anew by whoever uses them."""
        try:
            self.raise_together(amiss)
        except Exception:
            self.gathers_anew = True
            raise

    def forget_notes(self) -> None:
        """Whatever was lost is written anew."""
        self.fault = self.shortage = ""

    @property
    def alive(self) -> bool:
        """Whether ranks can still talk: a script may have shut torch.distributed down."""
        return self.size == 1 or dist.is_initialized()

    def gather(self, flat: Tensor, slices: Sequence[Tensor], unit: str, own: Waits | None = None) -> Pending:
        """Fill a flat in which every rank has put its own slice, or will have once it has waited for its own."""
        call = self.ledger.add("all-gather", unit, (self.parts - 1) * slices[self.part].nbytes)
        if own is not None and self.parts == 1:
            return Pending([own]) if self.size == 1 else Pending(then=partial(self._bring, own, slices[0]))
        if own is not None:
            self._bring(own, slices[self.part])
        with self._inside(call):
            under_way = self.wire.gather(flat, slices)
        return self._timed(call, under_way)

    def _bring(self, own: Waits, mine: Tensor) -> None:
        """Wait for this rank's slice. That it was lost the others are told later: meanwhile nobody takes it for weights."""
        with self.noting(again=True):
            try:
                own.wait()
            except Exception:
                mine.fill_(float("nan"))
                raise

    def reduce(self, flat: Tensor, slices: Sequence[Tensor], unit: str) -> Pending:
        """Take the mean of all ranks' flats (or their sum); after the wait this rank's slice holds its slice of it."""
        call = self.ledger.add("reduce-scatter", unit, (self.parts - 1) * slices[self.part].nbytes)
        divisor = self.parts if self.mean.averages else 1
        before = divisor if self.mean.prescale else self.mean.predivide
        if before != 1:
            flat.div_(before)
        with self._inside(call):
            under_way = self.wire.reduce(flat, slices, divisor / before)
        return self._timed(call, under_way)

    def _timed(self, call: Call, under_way: Pending) -> Pending:
        """What is under way, with its wait counted as the wait of a collective."""

        def arrive() -> None:
            with self._inside(call):
                under_way.wait()

        return Pending(then=arrive)

    def _inside(self, call: Call) -> Waiting:
        return self.ledger.waiting(call, blocks=self.wire.blocks)

    def scratch_bytes(self, shard_numel: int, dtype: torch.dtype) -> int:
        """What a reduce needs beside its flat."""
        return self.wire.scratch_bytes(shard_numel, dtype)

    def spread(self, flat: Tensor, source: int = 0) -> None:
        """Give every rank what the one with some part has, at the start or where a user has written."""
        if self.parts > 1:
            with self._inside(self.ledger.add("broadcast", "", flat.nbytes if self.part == source else 0)):
                dist.broadcast(flat, group=self.lineup and self.lineup.data, group_src=source)

    def spread_whole(self, flat: Tensor, source: Seat | None = None, *, repeated: bool) -> None:
        """The same for weights, whose parts are each from the ranks beside the source; what is repeated on ranks that have a
        model together is all the source's."""
        source = source or Seat()
        if repeated and self.lineup is not None:
            with self._inside(
                self.ledger.add("broadcast", "", flat.nbytes if self.lineup.model_rank == source.model_rank else 0)
            ):
                dist.broadcast(flat, group=self.lineup.model, group_src=source.model_rank)
        self.spread(flat, source.part)

    def seat_of(self, rank: int) -> Seat:
        """Where a rank of the whole world is."""
        if self.lineup is None:
            return Seat(rank)
        return Seat(*self.exchange(torch.tensor([self.lineup.part, self.lineup.model_rank]))[rank].tolist())

    def exchange(self, values: Tensor) -> Tensor:
        """Every rank's row of numbers, in the order of the ranks."""
        return self._exchange(values, self.size, None)

    def _exchange(self, values: Tensor, size: int, among: dist.ProcessGroup | None) -> Tensor:
        if size == 1:
            return values.unsqueeze(0)
        mine = values.to(self.desk)
        rows = [torch.empty_like(mine) for _ in range(size)]
        with self._inside(self.ledger.begin("exchange")):
            dist.all_gather(rows, mine, group=among)
            return torch.stack(rows).to(values.device)

    def exchange_parts(self, values: Tensor) -> Tensor:
        """The rows of the ranks over which states are split, in the order of their parts."""
        return self.exchange(values) if self.lineup is None else self._exchange(values, self.parts, self.lineup.data)

    def exchange_texts(self, text: str) -> list[str]:
        """Every rank's text, in the order of the ranks; as bytes, for nothing that is sent may be code."""
        raw = torch.tensor(list(text.encode()), dtype=torch.uint8)
        lengths = self.exchange(torch.tensor([raw.numel()])).flatten().tolist()
        if not any(lengths):
            return [""] * self.size
        padded = torch.zeros(max(lengths), dtype=torch.uint8)
        padded[: raw.numel()] = raw
        rows = self.exchange(padded)
        return [bytes(row[:length].tolist()).decode() for row, length in zip(rows, lengths, strict=True)]

    def diverge(self, values: Tensor, story: str) -> Tensor:
        """Exchange numbers outside of the order of collectives, which the ranks may have lost: through the store.

        Raises ScheduleError on this rank if the others do not come to the same point in time.
        """
        if self.size == 1:
            return values.unsqueeze(0)
        store = dist.distributed_c10d._get_default_store()
        self.meetings += 1
        keys = [f"naught/{self.number}/diverge/{self.meetings}/{rank}" for rank in range(self.size)]
        store.set(keys[self.rank], ",".join(str(int(value)) for value in values))
        try:
            store.wait(keys, timedelta(seconds=self.patience_s))
        except RuntimeError as error:  # torch's DistStoreError is one
            store.delete_key(keys[self.rank])  # nobody who comes later must take this for an answer
            raise ScheduleError(
                f"{story}, and not all other ranks met the same within {self.patience_s:g} s",
                fix=SAME_ORDER,
            ) from error
        rows = [[int(number) for number in store.get(key).decode().split(",")] for key in keys]
        return torch.tensor(rows)


def _backends() -> dict[str, str]:
    """The backend for each type of device, as torch has them: "cpu:gloo,cuda:nccl"."""
    return dict(pair.split(":") for pair in dist.get_backend_config().split(","))


def _wire(part: int, parts: int, device: torch.device, backend: str | None, reduce_numel: int, lineup: Lineup | None) -> Wire:
    among = None if lineup is None else lineup.data
    if parts == 1:
        return Alone()
    if backend == "gloo":
        return Peers(part, parts, reduce_numel, ALIGN_NUMEL, among)
    if backend is None:
        raise UsageError(
            f"the model is on {device} and the process group cannot carry that: it has {dist.get_backend_config()}",
            fix='move the model first: model.to("cuda"), or start the process group with another backend',
        )
    return Collectives(part, parts, among, blocks=device.type == "cpu")
