"""Between a device and its host: what comes up is rounded through landings, what is staged is what was planned, and a fault
leaves nothing under way."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from training import DEVICE, config_of

from naught.comm import World
from naught.ferry import Ferry
from naught.flat import Meter
from naught.holding import Buffer
from naught.machine import GPUS, Machine
from naught.rooms import LEAST_BERTHS, MOST_BERTHS, staging_bytes
from naught.rounding import half_up
from naught.simulation import simulate
from naught.staging import Staging
from naught.streams import Point, here

NUMEL = 64  # of a berth here


def ferry_of(numel: int, berths: int = MOST_BERTHS) -> Ferry:
    return Ferry(Staging(torch.device(DEVICE), numel, berths, NUMEL), Meter(), apart=True)


@pytest.mark.parametrize("numel", [1, NUMEL, NUMEL + 1, 5 * NUMEL - 3])
def test_weights_come_up_rounded_in_as_many_pieces_as_it_takes(numel):
    ferried = ferry_of(numel)
    for _ in range(3):  # landings are used again
        masters = torch.randn(numel)
        into = torch.zeros(numel, dtype=torch.bfloat16, device=DEVICE)
        ferried.bring(masters, into, here(into.device), half_up).wait()
        wanted = torch.empty(numel, dtype=torch.bfloat16)
        half_up(wanted, masters)
        assert torch.equal(into.cpu(), wanted)


@pytest.mark.parametrize("numel", [1, NUMEL, NUMEL + 1, 5 * NUMEL - 3])
def test_sums_go_down_in_as_many_pieces_as_it_takes(numel):
    ferried = ferry_of(numel)
    for _ in range(3):  # berths are used again
        total = torch.randn(numel)
        home = torch.zeros(numel)
        ferried.send(total.to(DEVICE), home, torch.float32, onto=False).arrived.wait()
        assert torch.equal(home, total)
        ferried.send(total.to(DEVICE), home, torch.float32, onto=True).arrived.wait()
        assert torch.equal(home, 2 * total)


@pytest.mark.parametrize("numel", [1, NUMEL, 2 * NUMEL, 2 * NUMEL + 1, 100 * NUMEL])
@pytest.mark.parametrize("berths", [0, LEAST_BERTHS, 6, MOST_BERTHS])
def test_what_is_staged_is_what_was_planned(numel, berths):
    ferried = ferry_of(numel, berths)
    held = ferried.staging
    assert held.nbytes == ferried.meter.live.get(Buffer.STAGING, 0) == staging_bytes(numel, berths, NUMEL)
    assert not berths or min(len(held.berths), len(held.landings)) > 0
    ferried.close()
    assert ferried.meter.live[Buffer.STAGING] == 0


def test_a_fault_on_the_way_up_is_told_once_nothing_is_under_way():
    """Else whoever hears of it lets memory go that is still written to."""
    ferried, numel = ferry_of(3 * NUMEL), 3 * NUMEL
    into = torch.zeros(numel, dtype=torch.bfloat16, device=DEVICE)
    work = torch.ones(2048, 2048, device=DEVICE)
    under_way: list[Point] = []

    def fails_at_the_second(place: Tensor, source: Tensor) -> None:
        if under_way:
            raise torch.OutOfMemoryError("no room to round in")
        for _ in range(100 if DEVICE.type == "cuda" else 1):  # an accelerator is at it when the next one fails
            torch.matmul(work, work)
        half_up(place, source)
        under_way.append(ferried.rounding.point())

    free = [landing.free for landing in ferried.staging.landings]
    with pytest.raises(torch.OutOfMemoryError):
        ferried.bring(torch.ones(numel), into, here(into.device), fails_at_the_second)
    assert all(point.event is None or point.event.query() for point in under_way)
    assert all(landing.free not in free for landing in ferried.staging.landings), "both pieces had one"
    ferried.bring(torch.ones(numel), into, here(into.device), half_up).wait()
    assert torch.equal(into.cpu(), torch.ones(numel, dtype=torch.bfloat16))


POOL = {"naught": {"placement": "auto", "activation_memory": "1MB"}}


def staged(gpu_bytes: int, stage: int, more: dict, **zero: object) -> int:
    with torch.device("meta"):
        model, x = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3))), torch.zeros(2, 64)
    machine = Machine(gpu=GPUS["h200"]._replace(memory_bytes=gpu_bytes), host_bytes=10**9)
    config = config_of(stage, more=more, **zero)
    return simulate(model, config, World(1, machine=machine), lambda run: run(x).sum()).peak.get(Buffer.STAGING, 0)


def test_nothing_is_staged_where_nothing_travels():
    assert staged(10**9, 2, {}, offload_optimizer={"device": "cpu"}) > 0
    assert staged(10**9, 2, {}, offload_optimizer={"device": "cpu", "ratio": 0.0}) == 0
    assert staged(12 * 10**5, 3, POOL) > 0
    assert staged(10**9, 3, POOL) == 0
