"""Faults of one rank while others go on, and in threads beside training: all hear of them, nothing is torn, nothing is kept."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch
from menagerie import DEVICE, MODELS, batch_of
from torch import Tensor, nn
from training import config_of, digest_in_32_bits, digest_of_weights, my_rank, start, take_steps

from naught import applying, host_crew
from naught.beside import Beside
from naught.comm.wires import Alone, Collectives, Peers
from naught.engine import Engine
from naught.errors import ModelError, UsageError
from naught.ferry import Arrival, Ferry
from naught.flat import Flat, Meter
from naught.fragments import safe_get_full_optimizer_state
from naught.holding import Buffer
from naught.host_crew import HostCrew
from naught.rounding import half_up
from naught.segment import Segment
from naught.shelves import DeviceShelf
from naught.staging import Staging
from naught.start import initialize
from naught.streams import Point

# --- on one rank alone ---


def no_room_for_moments(stage: int) -> tuple[str, bool]:
    engine, take = start(stage), DeviceShelf.take

    def fails(self: DeviceShelf, numel: int, dtype: torch.dtype, category: str, *, travels: bool = False) -> Tensor:
        if category == "states" and my_rank() == 1:
            raise torch.OutOfMemoryError("no room for moments")
        return take(self, numel, dtype, category, travels=travels)

    DeviceShelf.take = fails  # type: ignore[method-assign]
    before = digest_of_weights(engine)
    try:
        with pytest.raises((torch.OutOfMemoryError, UsageError), match="no room for moments") as caught:
            take_steps(engine, 1)
    finally:
        DeviceShelf.take = take  # type: ignore[method-assign]
    assert (caught.type is UsageError) == (my_rank() == 0), "the others hear which rank it was"
    unchanged = digest_of_weights(engine) == before
    take_steps(engine, 2)
    return digest_of_weights(engine), unchanged


def two_steps(stage: int) -> str:
    engine = start(stage)
    take_steps(engine, 2)
    return digest_of_weights(engine)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_rank_without_memory_for_its_moments_ends_the_step_on_all_before_anything_changes(two, stage):
    assert two.run(no_room_for_moments, stage) == [(digest, True) for digest in two.run(two_steps, stage)]


def refused_on_one_rank() -> str:
    model = MODELS["plain"]().to(DEVICE)
    if my_rank() == 1:
        model.head.weight.data = torch.ones(1, 1, device=DEVICE).expand(model.head.weight.shape)
    with pytest.raises(ModelError, match=r'"head.weight" was expanded') as caught:
        initialize(model=model, config=config_of(1))
    return str(caught.value)


def test_a_model_that_one_rank_refuses_all_refuse(two):
    first, second = two.run(refused_on_one_rank)
    assert "[rank 1]" in first
    assert "[rank 1]" not in second


def test_a_frozen_parameter_may_be_expanded():
    model = MODELS["plain"]().to(DEVICE)
    model.tok.weight = nn.Parameter(torch.ones(1, 1, device=DEVICE).expand(model.tok.weight.shape), requires_grad=False)
    engine = initialize(model=model, config=config_of(3))[0]
    take_steps(engine, 1)
    with engine.gathered():
        assert bool((model.tok.weight == 1).all())


def test_two_that_share_memory_are_found_also_with_a_third_between():
    model = nn.Module()
    both = torch.randn(100)
    model.wide, model.between = (nn.Parameter(part, requires_grad=False) for part in (both, both[10:20]))
    model.trained = nn.Parameter(both[50:60])
    with pytest.raises(ModelError, match='"wide" and "trained" are two parameters with the same memory'):
        initialize(model=model, config=config_of(1))


OFFLOADED: dict[str, Any] = {"more": {"bf16": {"enabled": True}}, "offload_optimizer": {"device": "cpu"}}
BELOW: dict[str, Any] = {"offload_param": {"device": "cpu"}, "stage3_param_persistence_threshold": 0}


def take_four_steps(options: dict[str, Any]) -> str:
    engine = start(**options)
    take_steps(engine, 4)
    return digest_of_weights(engine)


def fail_to_come_up(engine: Engine, times: int) -> AbstractContextManager[None]:
    """The weights of one block find no memory on rank 0, so many times."""
    block = engine.schedule.units["blocks.1"].trained[0]
    bring, masters, left = Ferry.bring, block.states.masters, [True] * times if my_rank() == 0 else []
    assert masters is not None

    def fails(self: Ferry, source: Tensor, *args: Any) -> Point:
        if source.data_ptr() == masters.data_ptr() and left and left.pop():
            raise torch.OutOfMemoryError("no room to round in")
        return bring(self, source, *args)

    @contextmanager
    def failing() -> Iterator[None]:
        Ferry.bring = fails  # type: ignore[method-assign]
        try:
            yield
        finally:
            Ferry.bring = bring  # type: ignore[method-assign]

    return failing()


def four_steps_without_room_to_come_up(options: dict[str, Any], looks: bool) -> tuple[list[str], str]:
    """On rank 0 the weights of one block find no memory, three times in a row."""
    engine = start(**options)
    take_steps(engine, 2)
    block = engine.schedule.units["blocks.1"].trained[0]
    told, taken = [], 2
    with fail_to_come_up(engine, 3):
        while taken < 4:
            try:
                take_steps(engine, 1, first=taken)
                taken += 1
            except (torch.OutOfMemoryError, UsageError) as error:
                told.append(str(error))
            assert len(told) < 4
            if looks:
                engine.planned()
                assert safe_get_full_optimizer_state(block.weights.params[0], "exp_avg") is not None
    return told, digest_of_weights(engine)


COMES_UP = [
    {"stage": 1, **OFFLOADED},
    {"stage": 2, **OFFLOADED, "more": OFFLOADED["more"] | {"naught": {"lazy_weights": False}}},
    {"stage": 3, **OFFLOADED, "stage3_param_persistence_threshold": 0},
    {"stage": 3, **OFFLOADED, **BELOW},
]


@pytest.mark.parametrize("options", COMES_UP)
@pytest.mark.parametrize("looks", [False, True])
def test_weights_that_find_no_memory_on_one_rank_cost_a_step_on_all_and_come_again(two, options, looks):
    (told, weights), (heard, others) = two.run(four_steps_without_room_to_come_up, options, looks)
    assert [weights, others] == two.run(take_four_steps, options)
    assert told
    assert len(told) == len(heard)
    assert all("no room to round in" in text and "done again with the next step" in text for text in told + heard)


@pytest.mark.parametrize("options", [options for options in COMES_UP if options["stage"] != 2])
@pytest.mark.parametrize("looks", [False, True])
def test_on_a_rank_alone_too(options, looks):
    told, weights = four_steps_without_room_to_come_up(options, looks)
    assert weights == take_four_steps(options)
    assert told


def test_a_step_whose_weights_do_not_come_is_a_step_and_is_said_to_be():
    """Where they are to be there after it. Who takes it again would take it twice."""
    options = OFFLOADED | {"more": OFFLOADED["more"] | {"naught": {"lazy_weights": False}}}
    engine, bring = start(2, **options), Ferry.bring
    take_steps(engine, 1)

    def fails(*_: object) -> Point:
        raise torch.OutOfMemoryError("no room to round in")

    Ferry.bring = fails  # type: ignore[assignment]
    try:
        with pytest.raises(torch.OutOfMemoryError) as caught:
            take_steps(engine, 1, first=1)
    finally:
        Ferry.bring = bring  # type: ignore[method-assign]
    assert any("the step was taken all the same" in note for note in caught.value.__notes__)
    assert (engine.global_steps, engine.global_samples) == (2, 4)
    take_steps(engine, 2, first=2)
    assert digest_of_weights(engine) == take_four_steps({"stage": 2, **options})


def train_late_without_room() -> tuple[int, int, bool]:
    """Weights that follow an update one step late, and have lost the masters that they were to be made of."""
    engine, failed = start(2, **OFFLOADED | {"more": OFFLOADED["more"] | {"naught": {"delay_update_after": 1}}}), 0
    take_steps(engine, 3)
    with fail_to_come_up(engine, 2):
        for step in range(3, 8):
            try:
                take_steps(engine, 1, first=step)
            except (torch.OutOfMemoryError, UsageError):
                failed += 1
    with engine.gathered():
        whole = all(bool(param.isfinite().all()) for param in engine.module.parameters())
    return failed, engine.global_steps, whole


@pytest.mark.parametrize("size", [1, 2])
def test_weights_that_are_late_and_cannot_come_any_more_catch_up(worlds, size):
    for failed, steps, whole in worlds[size].run(train_late_without_room):
        assert failed in (1, 2)
        assert steps == 8 - failed
        assert whole


def look_in_the_middle() -> tuple[list[str], str]:
    """Somebody hears of a shortage between backward and step, and goes on."""
    engine = start(stage=3, **OFFLOADED, **BELOW)
    take_steps(engine, 2)
    heard = []
    with fail_to_come_up(engine, 2):
        engine.backward(engine(batch_of(2, my_rank())))
        for asked in (engine.grad_norms, engine.step):
            try:
                asked()
            except UsageError as error:
                heard.append(str(error))
    take_steps(engine, 2, first=2)
    return heard, digest_of_weights(engine)


def test_who_hears_of_a_shortage_in_the_middle_of_a_step_does_not_keep_the_step_from_hearing_of_it(two):
    wanted = two.run(take_four_steps, {"stage": 3, **OFFLOADED, **BELOW})
    for heard, weights in two.run(look_in_the_middle):
        assert len(heard) == 2
        assert [weights] * 2 == wanted


def export_without_room() -> tuple[bool, bool, int]:
    """Behind a step whose weights have not come, where they are to be there."""
    options = OFFLOADED | {"more": OFFLOADED["more"] | {"naught": {"lazy_weights": False}}}
    engine, wanted = start(2, **options), start(2, **options)
    take_steps(wanted, 2)
    take_steps(engine, 1)
    with fail_to_come_up(engine, 2):
        take_steps(engine, 1, first=1)
    with pytest.raises(UsageError, match="no room to round in"):
        engine.module_state_dict()
    same = wanted.module_state_dict()
    exported = all(bool((value == same[name]).all()) for name, value in engine.module_state_dict().items())
    return exported, digest_of_weights(engine) == digest_of_weights(wanted), engine.global_samples


def test_weights_that_have_not_come_are_not_exported(two):
    assert two.run(export_without_room) == [(True, True, 8)] * 2


def tear_an_update(rank: int) -> list[str]:
    engine = start(2, **OFFLOADED)
    take_steps(engine, 1)
    kind = type(engine.optimizer.rule)
    update, told = kind.update, []

    def fails(*_: object) -> None:
        raise MemoryError("no room in the rule")

    if my_rank() == rank:
        kind.update = fails
    try:
        for step in range(1, 5):
            try:
                take_steps(engine, 1, first=step)
            except (UsageError, MemoryError) as error:
                told.append("\n".join([str(error), *error.__notes__]))
    finally:
        kind.update = update
    return told


def test_an_update_that_is_torn_for_want_of_memory_is_no_mere_shortage(two):
    for told in two.run(tear_an_update, 0):
        assert told
        assert all("no room in the rule" in text and "load a checkpoint before you go on" in text for text in told)
        assert not any("done again" in text for text in told)


def write_without_memory_for_it(wanted: bool) -> str:
    """On one rank masters find no memory to follow what was written, once."""
    engine = start(2, more={"bf16": {"enabled": True}})
    take_steps(engine, 2)
    with torch.no_grad():
        engine.module.head.weight.mul_(0.5)
    follow, left = Segment.follow_weights, [True] if my_rank() == 1 and not wanted else []

    def once(self: Segment) -> None:
        if left and left.pop():
            raise torch.OutOfMemoryError("no room to compare")
        follow(self)

    Segment.follow_weights = once  # type: ignore[method-assign]
    try:
        if not wanted:
            with pytest.raises(UsageError, match="no room to compare"):
                take_steps(engine, 1, first=2)
        take_steps(engine, 2, first=2)
    finally:
        Segment.follow_weights = follow  # type: ignore[method-assign]
    return digest_in_32_bits(engine)


def test_a_write_that_masters_had_no_memory_to_follow_is_followed_by_the_next_step(two):
    assert two.run(write_without_memory_for_it, False) == two.run(write_without_memory_for_it, True)


# --- in the middle ---


def test_whatever_fails_in_the_middle_of_an_update_says_what_it_leaves(two):
    assert all(two.run(fail_in_the_second_gather))


def fail_in_the_second_gather() -> bool:
    engine = start(2)
    take_steps(engine, 1)
    group, batch = engine.schedule.group, applying._BATCH_BYTES
    gather, asked = group.gather, []

    def second_fails(*args: object) -> object:
        asked.append(True)
        if len(asked) == 2:
            raise RuntimeError("the second is lost")
        return gather(*args)

    applying._BATCH_BYTES, group.gather = 1, second_fails
    try:
        with pytest.raises(RuntimeError, match="the second is lost") as caught:
            take_steps(engine, 1, first=1)
    finally:
        applying._BATCH_BYTES = batch
    return any("load a checkpoint before you go on" in note for note in caught.value.__notes__)


def test_a_step_with_late_gradients_is_a_step_to_its_end(two):
    for early, late in two.run(sent_by_phase):
        assert late == early
        assert late
        assert all(name.startswith("all-gather step") for name in late)


def sent_by_phase() -> tuple[dict[str, int], dict[str, int]]:
    found = []
    for late in (False, True):
        engine = start(1)
        take_steps(engine, 2)
        before = engine.report()["sent"]
        ids = torch.zeros(2, 16, dtype=torch.int64, device=DEVICE)
        engine.backward(engine(ids))
        engine.grad_norms()  # the pass is over
        if late:
            param = next(engine.module.parameters())
            param.grad = torch.zeros_like(param)
        engine.step()
        sent = {name: nbytes - before.get(name, 0) for name, nbytes in engine.report()["sent"].items()}
        found.append({name: nbytes for name, nbytes in sent.items() if nbytes and name.startswith("all-gather")})
    return found[0], found[1]


@pytest.mark.parametrize("stage", [2, 3])
def test_a_reduce_that_cannot_begin_is_counted_no_more(two, stage):
    assert two.run(scratch_after_a_reduce_that_failed, stage) == [0, 0]


def scratch_after_a_reduce_that_failed(stage: int) -> int:
    engine = start(stage)
    take_steps(engine, 1)
    wire = engine.schedule.group.wire
    assert isinstance(wire, Peers | Collectives | Alone)
    kind, reduce = type(wire), type(wire).reduce

    def fails(*_: object) -> None:
        raise torch.OutOfMemoryError("no room to receive")

    kind.reduce = fails
    try:
        with pytest.raises(torch.OutOfMemoryError, match="no room to receive"):
            take_steps(engine, 1, first=1)
    finally:
        kind.reduce = reduce
    return engine.meter.live[Buffer.SCRATCH]


def flats_after_a_gather_that_failed() -> tuple[int, int]:
    engine = start(3, name="lora")  # units of two flats: what is trained and what is not
    take_steps(engine, 1)
    alloc, second = Flat.alloc, engine.schedule.units["blocks.0"].absentees[1].weights.flat

    def second_fails(self: Flat) -> None:
        if self is second:
            raise torch.OutOfMemoryError("no room for a flat")
        alloc(self)

    Flat.alloc = second_fails
    try:
        with pytest.raises(torch.OutOfMemoryError, match="no room for a flat"):
            take_steps(engine, 1, first=1)
    finally:
        Flat.alloc = alloc
    live, pending = engine.meter.live[Buffer.GATHERED], sum(len(unit.pending) for unit in engine.schedule.units.values())
    take_steps(engine, 1, first=1)
    return live, pending


def test_a_gather_that_cannot_begin_leaves_no_flat(two):
    assert two.run(flats_after_a_gather_that_failed) == [(0, 0), (0, 0)]


# --- beside training ---


def test_a_thread_that_cannot_work_is_told_instead_of_waited_for(monkeypatch):
    def lost(_: torch.device) -> None:
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(host_crew, "stand_on", lost)
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    with pytest.raises(threading.BrokenBarrierError):
        HostCrew([None, None]).ask(1, lambda _: None)


def test_a_crew_that_waits_for_a_device_for_ever_does_not_keep_a_process():
    crew, go_on = HostCrew([None, None]), threading.Event()
    over = crew.ask(1, lambda _: go_on.wait(60) and None)
    threads = list(crew.threads)
    assert not crew.stops_by(time.monotonic() + 0.05)
    go_on.set()
    over.result(10)
    for thread in threads:
        thread.join(10)
    assert not any(thread.is_alive() for thread in threads)


def test_a_crew_that_is_done_says_so():
    crew = HostCrew([None, None])
    crew.ask(3, lambda _: None)
    assert crew.stops_by(time.monotonic() + 10)


def test_a_ferry_that_is_closed_keeps_nothing():
    ferry = Ferry(Staging(torch.device("cpu"), 64, 4, 64), Meter(), apart=True)

    class Never(Point):
        reached = False  # as on a device that is at something else

        def __init__(self) -> None:
            super().__init__(None)

    held = Arrival(ferry, torch.ones(64), torch.zeros(64), None, half_up)
    gone = weakref.ref(held)
    ferry.keep(held, Never())
    del held
    gc.collect()
    assert gone() is not None
    ferry.close()
    gc.collect()
    assert gone() is None


def test_weights_that_did_not_come_are_not_brought_from_under_the_next_update():
    """Delayed, an update may run while nobody has looked for the weights of the one before."""
    masters, into = torch.full((8,), 2.0), torch.zeros(8, dtype=torch.bfloat16)
    crew, fails, go_on, half = HostCrew(None), [True], threading.Event(), threading.Event()

    class Failing(Ferry):
        def bring(self, *args: object) -> Point:
            if fails and fails.pop():
                raise torch.OutOfMemoryError("no room to round in")
            return super().bring(*args)  # type: ignore[arg-type]

    ferry = Failing(Staging(torch.device("cpu"), 64, 0, 64), Meter(), apart=False)
    beside = Beside(crew, ferry, half_up)
    beside.update(1, lambda _: None)
    beside.coming = beside.bring(masters, into)

    def half_of_it(_: int) -> None:
        masters[:4] = 9.0
        half.set()
        assert go_on.wait(10)
        masters[4:] = 9.0

    beside.update(1, half_of_it)
    assert half.wait(10)
    with pytest.raises(torch.OutOfMemoryError, match="no room to round in"):
        beside.arrive()
    assert not bool(into.any()), "nothing has come, and not half of something else"
    go_on.set()
    crew.stop()
