"""Between a device and its host: what comes up is rounded through landings, what is staged is what was planned, and a fault
leaves nothing under way."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from training import DEVICE, config_of

from naught import ferry, holding, staging
from naught.comm import World
from naught.ferry import Ferry
from naught.flat import Meter
from naught.holding import LEAST_SLOTS, MOST_SLOTS, Buffer, staging_bytes
from naught.machine import GPUS, Machine
from naught.rounding import half_up
from naught.simulation import simulate
from naught.streams import here

NUMEL = 64  # of a slot here


@pytest.fixture(autouse=True)
def small_slots(monkeypatch):
    for module in (ferry, holding, staging):
        monkeypatch.setattr(module, "SLOT_NUMEL", NUMEL)


def ferry_of(numel: int, slots: int = MOST_SLOTS) -> Ferry:
    return Ferry(torch.device(DEVICE), Meter(), numel, slots, apart=True)


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


@pytest.mark.parametrize("numel", [1, NUMEL, 2 * NUMEL, 2 * NUMEL + 1, 100 * NUMEL])
@pytest.mark.parametrize("slots", [0, LEAST_SLOTS, 6, MOST_SLOTS])
def test_what_is_staged_is_what_was_planned(numel, slots):
    ferried = ferry_of(numel, slots)
    held = ferried.staging
    assert held.nbytes == ferried.meter.live.get(Buffer.STAGING, 0) == (staging_bytes(numel, slots) if slots else 0)
    assert not slots or min(len(held.slots), len(held.landings)) > 0
    ferried.close()
    assert ferried.meter.live[Buffer.STAGING] == 0


def test_a_fault_on_the_way_up_is_told_once_nothing_is_under_way():
    ferried, numel = ferry_of(3 * NUMEL), 3 * NUMEL
    into = torch.zeros(numel, dtype=torch.bfloat16, device=DEVICE)
    pieces: list[Tensor] = []

    def fails_at_the_second(place: Tensor, source: Tensor) -> None:
        pieces.append(place)
        if len(pieces) == 2:
            raise torch.OutOfMemoryError("no room to round in")
        half_up(place, source)

    waited: list[str] = []
    lanes = {"up": ferried.up, "rounding": ferried.rounding}
    with mock.patch.multiple(ferried, **{name: Watched(lane, name, waited) for name, lane in lanes.items()}):
        free = {id(slot): slot.free for slot in ferried.staging.landings}
        with pytest.raises(torch.OutOfMemoryError):
            ferried.bring(torch.ones(numel), into, here(into.device), fails_at_the_second)
        assert waited == ["up", "rounding"]
        assert all(slot.free is not free[id(slot)] for slot in ferried.staging.landings), "both pieces had one"
    ferried.bring(torch.ones(numel), into, here(into.device), half_up).wait()
    assert torch.equal(into.cpu(), torch.ones(numel, dtype=torch.bfloat16))


class Watched:
    """A lane of which it is noted who waits for its points."""

    def __init__(self, lane, name: str, waited: list[str]) -> None:
        self.lane, self.name, self.waited = lane, name, waited

    def __getattr__(self, name: str):
        return getattr(self.lane, name)

    def point(self):
        point = self.lane.point()
        return mock.Mock(wraps=point, wait=lambda: (self.waited.append(self.name), point.wait()))


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
