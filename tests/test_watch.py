"""What a rank knows of itself: for which collectives it has waited, and what its process holds beside training."""

from __future__ import annotations

import gc
import itertools
from collections import Counter

import pytest
import torch
from menagerie import DEVICE
from torch import nn
from training import config_of, engine_of, start, take_steps

from naught import devices
from naught.comm import ledger as ledgers
from naught.comm.ledger import Call, Ledger
from naught.comm.wires import Collectives
from naught.devices import allocated_bytes, forget_peak, peak_bytes
from naught.watch import Watch

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")


def test_seconds_are_added_up_by_collective_and_by_the_phase_in_which_a_rank_waits(monkeypatch):
    clock = iter([0.0, 1.0, 10.0, 12.0, 20.0, 24.0])
    monkeypatch.setattr(ledgers, "perf_counter", lambda: next(clock))
    ledger = Ledger(phase="forward")
    call = ledger.add("all-gather", "a", 5)
    for phase in ("forward", "backward", "backward"):
        ledger.phase = phase
        with ledger.waiting(call, blocks=True):
            assert ledger.inside == Call(1, "all-gather", "a", "forward")
    assert ledger.waited == {("all-gather", "forward"): 1.0, ("all-gather", "backward"): 6.0}


def test_a_wait_that_fails_counts_too_and_is_over():
    ledger = Ledger()
    with pytest.raises(ValueError, match="gone"), ledger.waiting(ledger.begin("exchange"), blocks=True):
        raise ValueError("gone")
    assert ledger.inside is None
    assert list(ledger.waited) == [("exchange", "start")]


def test_small_exchanges_have_numbers_but_nothing_that_is_sent():
    ledger = Ledger()
    ledger.add("broadcast", "", 3)
    assert ledger.begin("exchange") == ledger.latest == Call(2, "exchange", "", "start")
    assert (ledger.count, ledger.total(), list(ledger.order)) == (2, 3, [("broadcast", "")])


def ticks(stage: int, *, blocks: bool) -> tuple[Counter[str], Counter[str], int, Call | None]:
    """Train by a clock that ticks when it is read: every issue and every wait takes one tick."""
    engine = start(stage)
    group, ledger = engine.schedule.group, engine.watch.ledger
    if not blocks:
        group.wire = Collectives(group.rank, group.size, blocks=False)
    take_steps(engine, 2)
    ledger.waited.clear()
    ledger.order.clear()
    before, clock = ledger.count, itertools.count()
    ledgers.perf_counter, real = clock.__next__, ledgers.perf_counter
    take_steps(engine, 1, first=2)
    ledgers.perf_counter = real
    waited: Counter[str] = Counter()
    for name, seconds in engine.report()["waited"].items():
        waited[name.split()[0]] += seconds
    return waited, Counter(collective for collective, _ in ledger.order), ledger.count - before, ledger.inside


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_the_issue_and_the_wait_of_every_collective_are_counted_and_so_are_exchanges(two, stage):
    told = two.run(ticks, stage, blocks=True)
    for waited, calls, count, inside in told:
        exchanges = count - sum(calls.values())
        assert exchanges > 0
        assert waited == {**{name: 2 * times for name, times in calls.items()}, "exchange": exchanges}
        assert inside is None
    assert told[0][2] == told[1][2], "the same numbers on every rank"


def test_where_waits_do_not_block_the_host_nobody_knows_how_long_they_are(two):
    for waited, calls, count, _ in two.run(ticks, 3, blocks=False):
        assert not waited
        assert count > sum(calls.values()) > 0


# --- memory -----------------------------------------------------------------------------------------------------------


def test_on_a_cpu_the_allocator_says_what_it_has_handed_out():
    before = allocated_bytes(CPU)
    if before is None:
        pytest.skip("another C library")
    held = torch.empty(3_000_000)
    assert allocated_bytes(CPU) - before == pytest.approx(held.nbytes, abs=1 << 16)
    del held
    assert allocated_bytes(CPU) == pytest.approx(before, abs=1 << 16)
    forget_peak(CPU)
    assert peak_bytes(CPU) is None


@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a GPU")
def test_on_a_gpu_a_peak_is_counted_from_where_the_last_was_forgotten():
    def passing(nbytes: int) -> int:
        forget_peak(DEVICE)
        before = allocated_bytes(DEVICE)
        torch.empty(nbytes, dtype=torch.uint8, device=DEVICE)
        return peak_bytes(DEVICE) - before

    assert [passing(nbytes) for nbytes in (1 << 22, 1 << 20)] == [1 << 22, 1 << 20]


class Tied(nn.Module):
    """Large enough that what Python itself allocates does not count."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(1500, 1500), nn.Linear(1500, 1500)
        self.other.weight = self.one.weight
        self.register_buffer("mask", torch.zeros(1500, 1500))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.other(self.one(x) + self.mask).mean()


@pytest.mark.skipif(DEVICE.type != "cpu", reason="on a GPU the libraries of products have memory of their own")
def test_what_is_allocated_above_the_base_is_what_training_holds():
    gc.collect()  # what tests before this one have left must not be let go in the middle
    strangers = torch.empty(5_000_000, device=DEVICE)  # not training's
    engine = engine_of(Tied(), config_of(1))
    for _ in range(2):
        engine.backward(engine(torch.ones(1, 1500, device=DEVICE)))
        engine.step()
    report = engine.report()
    if report["base"] is None:
        pytest.skip("another C library")
    held = sum(nbytes for name, nbytes in report["after"]["step"].items() if name != "allocated") + engine.mask.nbytes
    assert report["after"]["step"]["allocated"] - report["base"] == pytest.approx(held, abs=2e6)
    assert report["base"] >= strangers.nbytes


def test_where_nobody_counts_there_is_no_number(monkeypatch):
    monkeypatch.setattr(devices, "_mallinfo", lambda: None)
    watch = Watch(CPU)
    watch.after("forward")
    report = watch.report()
    assert (report["base"], report["after"], watch.held().other) == (None, {"forward": {}}, None)
