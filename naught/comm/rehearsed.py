"""Rehearsed: several ranks in one process, which do all that ranks of a real run on CPUs do, with the same bits, and hand each
other copies of tensors instead of sending them. No torch.distributed and no launcher: for debuggers, and for small models."""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import Store

from naught.comm.group import SAME_ORDER, Group
from naught.comm.ledger import Call, Ledger
from naught.comm.turns import Turns
from naught.comm.wires import Alone, Peers, Pending
from naught.errors import ScheduleError, UsageError
from naught.layout import ALIGN_NUMEL
from naught.running import running

__all__ = ["rehearse"]

Result = TypeVar("Result")


def rehearse(work: Callable[[int], Result], *, ranks: int) -> list[Result]:
    """Call `work` with the number of each rank, each in a thread of its own and one at a time, and return what they return.
    Inside, everything is as in a process of a real run on CPUs: engines, `naught.comm.get_rank()`, random numbers. A rank that
    fails ends all, and its error is raised here."""
    if ranks < 1:
        raise UsageError(f"{ranks} ranks are none", fix="rehearse with 1 or more")
    if running() is not None:
        raise UsageError("this is a rehearsal or a simulation already", fix="call rehearse outside of it")
    threads = torch.get_num_threads()
    post, turns = _Post(), Turns(_keep, SAME_ORDER)

    def play(rank: int) -> Result:
        torch.set_num_threads(threads)  # a product rounds by it, and a new thread may have another number
        return work(rank)

    return turns.run([_Rehearsing(rank, ranks, post, turns) for rank in range(ranks)], play)


def _keep() -> Callable[[], None]:
    """What a process has once, and ranks change: random numbers, the type of new tensors, what makes parameters."""
    dtype, drawn, drawn_by_python = torch.get_default_dtype(), torch.get_rng_state(), random.getstate()
    make = nn.Parameter.__new__
    numpy: Any = sys.modules.get("numpy")
    drawn_by_numpy = None if numpy is None else numpy.random.get_state()

    def restore() -> None:
        torch.set_default_dtype(dtype)
        torch.set_rng_state(drawn)
        if nn.Parameter.__new__ is not make:
            nn.Parameter.__new__ = staticmethod(make)  # type: ignore[method-assign]
        random.setstate(drawn_by_python)
        if drawn_by_numpy is not None:
            numpy.random.set_state(drawn_by_numpy)

    return restore


class _Road(NamedTuple):
    """From one rank to another; what takes different roads does not wait for each other."""

    source: int
    target: int
    beside: bool = False  # the order of collectives


class _Letter(NamedTuple):
    call: Call | None  # None: beside the order of collectives
    contents: Tensor


class _Post:
    """What ranks have sent and not received yet, numbered on each road in the order in which it was sent, and is awaited."""

    def __init__(self) -> None:
        self.letters: dict[tuple[_Road, int], _Letter] = {}
        self.sent: Counter[_Road] = Counter()
        self.awaited: Counter[_Road] = Counter()
        self.store = dist.HashStore()  # type: ignore[attr-defined]  # torch's stubs lag

    def send(self, road: _Road, letter: _Letter) -> None:
        self.letters[road, self.sent[road]] = letter
        self.sent[road] += 1

    def await_next(self, road: _Road) -> int:
        self.awaited[road] += 1
        return self.awaited[road] - 1


class _Rehearsing:
    """One of the ranks that share this process."""

    device = torch.device("cpu")

    def __init__(self, rank: int, ranks: int, post: _Post, turns: Turns) -> None:
        self.rank, self.ranks, self.post, self.turns = rank, ranks, post, turns

    def group(self, ledger: Ledger, device: torch.device, **options: Any) -> Group:
        return _Rehearsed(self, ledger, device, **options)

    def store(self) -> Store:
        return self.post.store

    def swap(self, call: Call | None, outgoing: Mapping[int, Tensor], incoming: Mapping[int, Tensor], where: str = "") -> Pending:
        """Send copies to some, and have those of others written where they are wanted."""
        copies = {id(tensor): tensor.detach().clone() for tensor in outgoing.values()}  # what all are sent is copied once
        for peer, tensor in outgoing.items():
            self.post.send(_Road(self.rank, peer, call is None), _Letter(call, copies[id(tensor)]))
        roads = [_Road(peer, self.rank, call is None) for peer in incoming]
        keys = [(road, self.post.await_next(road)) for road in roads]
        letters = self.post.letters

        def arrive() -> None:
            self.turns.wait(self.rank, lambda: all(key in letters for key in keys), where or _told(call))
            for key, into in zip(keys, incoming.values(), strict=True):
                letter = letters.pop(key)
                self._refuse_another(call, letter, key[0].source)
                into.copy_(letter.contents)

        return Pending(then=arrive)

    def _refuse_another(self, call: Call | None, letter: _Letter, peer: int) -> None:
        """Real ranks would take each other's bytes for something else, or wait for ever."""
        if call is not None and letter.call is not None and call[1:3] != letter.call[1:3]:
            raise ScheduleError(
                f"rank {self.rank} is in {_told(call)}, and rank {peer} in {_told(letter.call)}",
                fix=SAME_ORDER,
            )


def _told(call: Call | None) -> str:
    if call is None:
        return "a meeting beside the order of collectives"
    unit = f' for "{call.unit or "root"}"' if call.collective in ("all-gather", "reduce-scatter") else ""
    return f"{call.collective} #{call.number}{unit} ({call.phase})"


class _Handed(Peers):
    """As gloo's peers, to the last bit; from hand to hand."""

    def __init__(self, rank: _Rehearsing, ledger: Ledger, reduce_numel: int) -> None:
        super().__init__(rank.rank, rank.ranks, reduce_numel, ALIGN_NUMEL)
        self.seat, self.ledger = rank, ledger

    def _swap(self, outgoing: Sequence[Tensor], incoming: dict[int, Tensor]) -> Pending:
        return self.seat.swap(self.ledger.inside, {peer: outgoing[peer] for peer in self.peers}, incoming)


class _Rehearsed(Group):
    """The ranks that share this process."""

    stalls = False  # if nobody can go on, everybody hears of it; and who stands still in a debugger is no fault

    def __init__(self, rank: _Rehearsing, ledger: Ledger, device: torch.device, *, reduce_numel: int, **options: Any) -> None:
        super().__init__(ledger, device, reduce_numel=reduce_numel, **options)
        self.seat, self.rank, self.size = rank, rank.rank, rank.ranks
        self.desk = torch.device("cpu")
        self.wire = Alone() if self.size == 1 else _Handed(rank, ledger, reduce_numel)

    @property
    def alive(self) -> bool:
        return True

    def spread(self, flat: Tensor, source: int = 0) -> None:
        if self.size == 1:
            return
        call = self.ledger.add("broadcast", "", flat.nbytes if self.rank == source else 0)
        outgoing = dict.fromkeys(self._peers, flat) if self.rank == source else {}
        with self._inside(call):
            self.seat.swap(call, outgoing, {} if self.rank == source else {source: flat}).wait()

    def exchange(self, values: Tensor) -> Tensor:
        if self.size == 1:
            return values.unsqueeze(0)
        call = self.ledger.begin("exchange")
        with self._inside(call):
            return self._rows(call, values)

    def diverge(self, values: Tensor, story: str) -> Tensor:
        return values.unsqueeze(0) if self.size == 1 else self._rows(None, values, f'a meeting because "{story}"')

    def _rows(self, call: Call | None, values: Tensor, where: str = "") -> Tensor:
        rows = values.new_empty(self.size, *values.shape)
        rows[self.rank] = values
        self.seat.swap(call, dict.fromkeys(self._peers, values), {peer: rows[peer] for peer in self._peers}, where).wait()
        return rows

    @property
    def _peers(self) -> list[int]:
        return [peer for peer in range(self.size) if peer != self.rank]
