"""States on the host: the same training to the last bit, updates that are still under way, the pool, and small masters."""

from __future__ import annotations

import gc
import logging
import os
import re
import threading
import weakref
from itertools import pairwise, product
from pathlib import Path
from unittest import mock

import pytest
import torch
from menagerie import MODELS
from test_parity import EVERYTHING, SOAK, assert_ranks_agree
from torch import nn
from training import (
    DEVICE,
    batch_of,
    config_of,
    digest_in_32_bits,
    digest_of_weights,
    engine_of,
    my_rank,
    start,
    take_steps,
    train,
)

from naught import initialize
from naught.beside import Beside
from naught.errors import ConfigError, PlacementError
from naught.ferry import Arrival
from naught.fragments import safe_get_full_fp32_param, safe_get_full_grad, safe_set_full_fp32_param, safe_set_full_grad
from naught.host_crew import HostCrew, cores_of
from naught.host_update import _take
from naught.placement import Tier
from naught.rounding import fold, half_up, unfold
from naught.rules import Part
from naught.steps import order_of_updates
from naught.streams import Point, Slab, here
from naught.tiers import hire_crew

ON_GPU = str(DEVICE) != "cpu"
HOST = {"device": "cpu"}
PLACES = {
    "stage1-offload": (1, {"offload_optimizer": HOST}),
    "stage2-offload": (2, {"offload_optimizer": HOST}),
    "half": (2, {"offload_optimizer": HOST | {"ratio": 0.5}}),
    "stage3-offload": (3, {"offload_optimizer": HOST}),
    "param-only": (3, {"offload_param": HOST}),
    "infinity-host": (3, {"offload_optimizer": HOST, "offload_param": HOST}),
}
BF16, FP16 = {"bf16": {"enabled": True}}, {"fp16": {"enabled": True, "initial_scale_power": 8}}
SMALL = BF16 | {"naught": {"small_masters": True}}
NARROW = BF16 | {"naught": {"wide_gradients": False}}
SUMMED_IN_16 = BF16 | {"data_types": {"grad_accum_dtype": "bf16"}}
BOTH = {"stage3_param_persistence_threshold": 0, "offload_optimizer": HOST, "offload_param": HOST}


# On a GPU what rests on the host is updated by another kernel than what rests on the device: one training there is the other
# within a bound, and to the last bit only among placements that update in the same place.
REMOTE = ("stage1-offload", "stage2-offload", "stage3-offload", "infinity-host")
on_one_device = pytest.mark.skipif(ON_GPU, reason="the host's kernel is not the device's")


def near_of(place: str) -> dict:
    """What is the same to the last bit with all states near."""
    return {"offload_optimizer": HOST} if ON_GPU and place in REMOTE else {}


# --- bit for bit ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_training_is_the_same_wherever_states_rest(two, name):
    near = two.reference(train, name, 2, clip=0.5)
    same = two.reference(train, name, 2, clip=0.5, **near_of("stage2-offload"))
    for place in PLACES if SOAK and not ON_GPU else ("stage2-offload", "infinity-host"):
        stage, zero = PLACES[place]
        far = two.run(train, name, stage, clip=0.5, **zero)
        assert_ranks_agree([far])
        assert far == same, place
        if name != "experts_by_rank_and_batch":  # a last bit may choose another expert
            for ours, theirs in zip(far, near, strict=True):
                assert ours.losses == pytest.approx(theirs.losses, rel=1e-4)


SELECTION = [
    ("plain", 1, 3, 0.5, "stage2-offload", BF16),
    ("tied", 3, 3, 0.5, "infinity-host", FP16),
    ("frozen", 2, 1, 0.0, "stage3-offload", BF16),
    ("lora", 2, 3, 0.5, "infinity-host", BF16),
    ("checkpoint_reentrant", 1, 1, 0.5, "half", SMALL),
    ("checkpoint_non_reentrant", 3, 3, 0.0, "param-only", SMALL),
    ("block_used_twice", 2, 3, 0.5, "stage3-offload", SMALL),
    ("unused_parameters", 2, 3, 0.5, "half", FP16),
    ("block_skipped_on_one_rank", 3, 1, 0.5, "infinity-host", SMALL),
    ("experts_by_rank_and_batch", 4, 3, 0.0, "stage2-offload", {}),
    ("uneven_sizes_and_users_hooks", 4, 3, 0.5, "infinity-host", {}),
    ("convolution", 3, 3, 0.0, "param-only", {}),
    ("plain", 2, 1, 0.5, "stage1-offload", BF16),
    ("unused_parameters", 1, 1, 0.5, "stage1-offload", SMALL),
    ("plain", 2, 1, 0.5, "stage2-offload", NARROW),
    ("tied", 2, 3, 0.5, "infinity-host", SUMMED_IN_16),
    ("lora", 1, 3, 0.5, "stage3-offload", SUMMED_IN_16 | {"naught": {"wide_gradients": False}}),
]


@pytest.mark.parametrize(
    ("name", "size", "accumulation", "clip", "place", "more"),
    [(*case, place, more) for case, place, more in product(EVERYTHING, PLACES, ({}, BF16, SMALL))] if SOAK else SELECTION,
)
def test_more_ranks_micro_batches_and_precisions(worlds, name, size, accumulation, clip, place, more):
    stage, zero = PLACES[place]
    options = {"accumulation": accumulation, "clip": clip, "more": more}
    if ON_GPU and place == "half":
        pytest.skip("half of it is updated by another kernel")
    near = worlds[size].reference(train, name, stage, **options, **near_of(place))
    assert worlds[size].run(train, name, stage, **options, **zero) == near


@pytest.mark.parametrize("more", [BF16, NARROW, SUMMED_IN_16 | {"naught": {"wide_gradients": False}}, {}])
@pytest.mark.parametrize("clip", [0.0, 0.05])
def test_the_host_may_update_in_pieces_and_blocks_of_any_size(monkeypatch, more, clip):
    def trained() -> tuple[list[float], str]:
        engine = start(2, more=more, clip=clip, offload_optimizer=HOST)
        losses = take_steps(engine, 3)
        assert not clip or engine.get_global_grad_norm() > clip
        return losses, digest_in_32_bits(engine)

    whole = trained()
    monkeypatch.setattr("naught.host_update._PIECE_NUMEL", 512)
    monkeypatch.setattr("naught.host_update._ROOM_NUMEL", 64)
    assert trained() == whole


def held_on_host(more: dict, accumulation: int) -> tuple[dict[str, int], dict[str, int], int]:
    engine = start(3, more=more, accumulation=accumulation, **BOTH)
    take_steps(engine, 2 * accumulation)
    numel = sum(segment.states.owned.numel for unit in engine.schedule.units.values() for segment in unit.trained)
    peak = {name: nbytes for name, nbytes in engine.report()["peak"].items() if name.startswith("host ")}
    return peak, {name: nbytes for name, nbytes in engine.planned().items() if name.startswith("host ")}, numel


@pytest.mark.parametrize(("more", "accumulation", "each"), [(BF16, 1, 16), (NARROW, 1, 14), (NARROW, 2, 16), ({}, 1, 16)])
def test_the_host_holds_no_more_than_it_must_for_each_parameter_of_the_shard(two, more, accumulation, each):
    for held, planned, numel in two.run(held_on_host, more, accumulation):
        assert sum(held.values()) == each * numel
        assert held == {name: nbytes for name, nbytes in planned.items() if nbytes}


# --- an update that is still under way --------------------------------------------------------------------------------


def read_between_steps(stage: int, zero: dict) -> tuple[list, str]:
    engine = start(stage, clip=0.5, **zero)
    found: list = []
    for step in range(3):
        take_steps(engine, 1, first=step)
        param = next(engine.module.parameters())
        found.append(safe_get_full_fp32_param(param).sum().item())
        engine.optimizer.param_groups[0]["lr"] = 1e-3 * (step + 2)  # the step that was taken does not know of it
        engine.eval()
        with torch.no_grad():
            found.append(engine(batch_of(9, my_rank())).item())
        engine.train()
    return found, digest_in_32_bits(engine)


@pytest.mark.parametrize("place", ["stage2-offload", "infinity-host"])
def test_whoever_looks_finds_the_update_done_and_whoever_changes_a_rate_changes_the_next(two, place):
    stage, zero = PLACES[place]
    assert two.run(read_between_steps, stage, zero) == two.run(read_between_steps, stage, near_of(place))


def write_between_steps(stage: int, zero: dict) -> tuple[list[float], str]:
    engine = start(stage, clip=0.5, more=SMALL, **zero)
    losses = take_steps(engine, 2)
    first, *others = engine.module.parameters()
    with engine.gathered(), torch.no_grad():
        for param in others:
            param.mul_(1.01)
    safe_set_full_fp32_param(first, torch.full(first.shape, 0.3, device=first.device))
    losses += take_steps(engine, 1, first=2)
    engine.backward(engine(batch_of(3, my_rank())))
    safe_set_full_grad(first, 2 * safe_get_full_grad(first))
    engine.step()
    return [*losses, engine.get_global_grad_norm(), *take_steps(engine, 2, first=4)], digest_in_32_bits(engine)


@pytest.mark.parametrize("place", PLACES)
def test_what_a_user_writes_counts_wherever_it_rests(two, place):
    stage, zero = PLACES[place]
    if ON_GPU and place == "half":
        pytest.skip("half of it is updated by another kernel")
    assert two.run(write_between_steps, stage, zero) == two.run(write_between_steps, stage, near_of(place))


def shown_between_steps(lazy: bool | None) -> bool:
    engine = start(2, more={"naught": {"lazy_weights": lazy}}, offload_optimizer=HOST)
    take_steps(engine, 2)
    return any(bool(param.isnan().any()) for param in engine.module.parameters())


def test_new_weights_cannot_be_mistaken_for_old_ones(two):
    assert two.run(shown_between_steps, None) == [True, True]
    assert two.run(shown_between_steps, False) == [False, False]


@pytest.mark.parametrize("place", ["stage2-offload", "stage3-offload", "infinity-host"])
def test_a_forward_of_a_unit_waits_for_that_units_update_and_for_no_other(monkeypatch, place):
    stage, zero = PLACES[place]
    engine = start(stage, stage3_param_persistence_threshold=0, **zero)
    take_steps(engine, 2)  # from then on there is a plan
    engine.backward(engine(batch_of(2, 0)))
    *_, late = order_of_updates([unit for unit in engine.schedule.units.values() if unit.trained])
    assert late.name == "blocks.2"
    computed, waited = threading.Event(), []
    engine.module.blocks[0].register_forward_hook(lambda *_: computed.set())

    def take_the_last_late(part: Part, *args: object) -> None:
        if part.weights.data_ptr() == late.trained[0].kept.masters.data_ptr():
            waited.append(computed.wait(10))
        _take(part, *args)

    monkeypatch.setattr("naught.host_update._take", take_the_last_late)
    engine.step()
    engine(batch_of(3, 0))
    assert waited == [True], "the first block was computed while the last one was still to be updated"


def test_an_update_that_fails_is_told_by_the_next_forward():
    engine = start(2, offload_optimizer=HOST)
    take_steps(engine, 1)
    engine.optimizer.param_groups[0]["eps"] = "small"
    with pytest.raises(TypeError, match="eps"):
        take_steps(engine, 2)  # the first of these hands the work over


def test_a_step_with_a_norm_that_is_not_finite_changes_nothing_on_the_host(caplog):
    engine = start(3, more=BF16 | {"bf16": {"enabled": True, "check_grad_overflow": True}}, **BOTH)
    take_steps(engine, 2)
    before = digest_in_32_bits(engine)
    engine.backward(engine(batch_of(2, 0)) * float("inf"))
    engine.step()
    assert engine.skipped_steps == 1
    assert "is not finite" in caplog.text
    assert digest_in_32_bits(engine) == before
    take_steps(engine, 1, first=3)
    assert digest_in_32_bits(engine) != before


def brought(stage: int, zero: dict) -> tuple[list[float], str]:
    torch.manual_seed(0)
    model = MODELS["plain"]().to(DEVICE)
    optimizer = torch.optim.NAdam(model.parameters(), lr=1e-3)
    engine = initialize(
        model=model, optimizer=optimizer, config={k: v for k, v in config_of(stage, **zero).items() if k != "optimizer"}
    )[0]
    return take_steps(engine, 4), digest_of_weights(engine)


@on_one_device
def test_an_optimizer_that_a_user_brings_works_on_the_host(two):
    assert two.run(brought, 3, {"offload_optimizer": HOST}) == two.run(brought, 3, {})


# --- checkpoints ------------------------------------------------------------------------------------------------------

TIERS = {
    "device": (2, {}, BF16),
    "host": (2, {"offload_optimizer": HOST}, BF16),
    "both": (3, BOTH, BF16),
    "small": (1, {}, SMALL),
    "small-host": (3, BOTH, SMALL),
}


def save(place: str, folder: str) -> str:
    stage, zero, more = TIERS[place]
    engine = start(stage, more=more, **zero)
    take_steps(engine, 2)
    engine.save_checkpoint(folder)
    return digest_in_32_bits(engine)


def resume(place: str, folder: str) -> tuple[str, list[float]]:
    stage, zero, more = TIERS[place]
    engine = start(stage, more=more, **zero)
    take_steps(engine, 1)
    engine.load_checkpoint(folder)
    return digest_in_32_bits(engine), take_steps(engine, 2, first=2)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("host", "device"),
        ("device", "both"),
        ("both", "host"),
        ("small", "small-host"),
        ("small-host", "small"),
        ("small", "both"),
    ],
)
def test_a_checkpoint_of_one_tier_loads_on_another(worlds, tmp_path, one, other):
    (saved,) = set(worlds[2].run(save, one, str(tmp_path)))
    for size in (1, 2):
        assert {found for found, _ in worlds[size].run(resume, other, str(tmp_path))} == {saved}
    if ("small" in one) == ("small" in other):  # else weights are rounded otherwise
        assert worlds[2].run(resume, other, str(tmp_path)) == worlds[2].run(resume, one, str(tmp_path))


# --- the pool ---------------------------------------------------------------------------------------------------------


def pooled(gpu: str, host: str, stage: int = 3) -> tuple[list[float], str, dict[str, str], bool]:
    limits = {"gpu_memory": gpu, "host_memory": host, "activation_memory": 1}
    placement = {"placement": "auto"} if stage == 3 else {}
    engine = start(stage, more=BF16 | {"naught": limits | placement}, stage3_param_persistence_threshold=0)
    losses = take_steps(engine, 3)
    where = {
        unit.name: "".join(str(place.tier)[0] for place in (unit.placement.param, unit.placement.grad, unit.placement.optim))
        for unit in engine.schedule.units.values()
    }
    peak, planned = engine.report()["peak"], engine.planned()
    return losses, digest_of_weights(engine), where, all(peak.get(name, 0) == planned[name] for name in planned)


@pytest.mark.skipif(ON_GPU, reason="an accelerator hands out no less than 2 MB")
def test_the_pool_puts_the_first_units_on_the_device_and_trains_alike(worlds):
    everything, some, little = (worlds[1].run(pooled, gpu, "100MB")[0] for gpu in ("100MB", "700kB", "300kB"))
    assert everything[:2] == some[:2] == little[:2]
    assert set(everything[2].values()) == {"ddd"}
    placed = list(some[2].values())
    assert placed[0] == "ddd"
    assert set(placed) - {"ddd"}, "not all of it has room"
    assert placed.index("dhh") > 0
    assert "h" in "".join(little[2].values())
    assert list(little[2].values()).count("ddd") < placed.count("ddd")
    assert all(run[3] for run in (everything, some, little)), "what was planned is what was held"


def gradients_in_pool(host: int | str, wide: bool | None) -> tuple[list[float], set[torch.dtype], list[str], int]:
    """Losses; types of the sums that wait on the host, where units rest, and what the host holds."""
    ours = {"placement": "auto", "gpu_memory": "300kB", "host_memory": host, "activation_memory": 1, "wide_gradients": wide}
    engine = start(3, more=BF16 | {"naught": ours}, clip=0.5, stage3_param_persistence_threshold=0)
    losses = take_steps(engine, 3)
    segments = [segment for unit in engine.schedule.units.values() for segment in unit.trained if segment.remote]
    places = [str(unit.placement) for unit in engine.schedule.units.values()]
    held = sum(nbytes for name, nbytes in engine.planned().items() if name.startswith("host "))
    engine.destroy()
    return losses, {segment.grads.owned.dtype for segment in segments}, places, held


@pytest.mark.skipif(ON_GPU, reason="an accelerator hands out no less than 2 MB")
def test_gradients_on_the_host_are_wide_where_a_pool_has_room_for_that():
    """And nothing rests elsewhere because of it."""
    narrow = gradients_in_pool("90MB", False)
    assert narrow[1] == {torch.bfloat16}
    assert gradients_in_pool("90MB", None) == (narrow[0], {torch.float32}, narrow[2], gradients_in_pool("90MB", True)[3])
    tight = gradients_in_pool(narrow[3] + 1000, None)
    assert tight == narrow


def refused() -> str:
    with pytest.raises(PlacementError) as found:
        pooled("200kB", "100kB")
    return str(found.value)


def test_what_does_not_fit_is_refused_before_anything_is_allocated(two):
    with pytest.raises(PlacementError, match=r"the model does not fit, .* the host would hold \d+ kB of the 300 kB"):
        pooled("300kB", "300kB")
    with pytest.raises(PlacementError, match=r"the model does not fit, .* the device would hold"):
        pooled("10kB", "100MB")  # what is in use has no room, though all that rests has some
    with pytest.raises(PlacementError, match=r"the plan does not fit: the device would hold .* Stage\d-offload would fit"):
        pooled("500kB", "100MB", stage=1)
    for story in two.run(refused):
        assert "the model does not fit" in story


@pytest.mark.skipif(not ON_GPU, reason="only an accelerator's allocator has a limit")
def test_a_limit_ends_with_the_engine_that_asked_for_it():
    with pytest.raises(PlacementError):
        pooled("200kB", "100kB")
    torch.empty(1 << 24, device=DEVICE)
    engine = start(2, more={"naught": {"gpu_memory": "100MB"}})
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(1 << 28, device=DEVICE)
    engine.destroy()
    torch.empty(1 << 28, device=DEVICE)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"gpu_memory": "much"}, "gpu_memory"),
        ({"placement": "auto", "small_masters": True}, "small masters are a bf16 weight"),
        ({"host_memory": 0}, 'host_memory.*must be bytes, at least 1, or a size such as "32GB"'),
        ({"placement": "auto", "gradients": "device"}, "a pool itself chooses where gradients rest"),
    ],
)
def test_limits_that_make_no_sense_are_told(changes, words):
    with pytest.raises(ConfigError, match=words):
        engine_of(MODELS["plain"](), config_of(3) | {"naught": changes})


# --- small masters ----------------------------------------------------------------------------------------------------


def test_a_weight_and_a_rest_are_their_master_for_every_upper_half():
    dice = torch.Generator().manual_seed(0)
    upper = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int64)
    for lower in (0, 1, 0x7FFF, 0x8000, 0xFFFF, *torch.randint(0, 1 << 16, (16,), generator=dice).tolist()):
        bits = ((upper << 16) + lower).to(torch.int32)
        weights, rest = torch.empty(bits.shape, dtype=torch.bfloat16), torch.empty(bits.shape, dtype=torch.int16)
        fold(bits.view(torch.float32).clone(), weights, rest)
        odd = bits.view(torch.float32).isnan()
        assert torch.equal(unfold(weights, rest).view(torch.int32)[~odd], bits[~odd])
        assert bool(unfold(weights, rest)[odd].isnan().all())
        assert bool(weights[odd].isnan().all()), "what is not a number is never rounded to one"
        rounded = torch.empty_like(weights)
        half_up(rounded, bits.view(torch.float32))
        assert torch.equal(rounded.view(torch.int16), weights.view(torch.int16))


def test_half_up_is_the_nearest_and_rounds_a_half_away_from_zero():
    values = torch.tensor([1.0, 1.0 + 2**-9, 1.0 + 2**-8, 1.0 + 3 * 2**-8, -1.0 - 2**-8, 3.0e38, 0.0])
    into = torch.empty(values.shape, dtype=torch.bfloat16)
    half_up(into, values)
    assert into.tolist()[:5] == [1.0, 1.0, 1.0 + 2**-7, 1.0 + 4 * 2**-8, -1.0 - 2**-7]
    apart = torch.randn(1 << 12, generator=torch.Generator().manual_seed(1))
    near = torch.empty(apart.shape, dtype=torch.bfloat16)
    half_up(near, apart)
    assert torch.equal(near, apart.bfloat16()), "no halves among them"


def small_bytes() -> dict[str, int]:
    engine = start(2, more=SMALL)
    take_steps(engine, 2)
    return engine.report()["live"]


def test_small_masters_take_two_bytes_instead_of_four():
    live = small_bytes()
    assert "masters" not in live
    assert live["rests"] == live["weights"] == live["states"] // 4


# --- the crew ---------------------------------------------------------------------------------------------------------


def test_a_crew_takes_up_jobs_in_order_and_tells_of_a_fault_once_all_pieces_are_over():
    crew = HostCrew([0, 0, 0])
    begun: list[tuple[str, int]] = []
    go = threading.Event()

    def note(name: str):
        def do(at: int) -> None:
            begun.append((name, at))
            assert go.wait(10)

        return do

    def fail(at: int) -> None:
        if at == 1:
            raise ValueError("piece 1")
        begun.append(("fails", at))

    first, second, third = crew.ask(3, note("a")), crew.ask(2, note("b")), crew.ask(3, fail)
    go.set()
    assert first.result(10) is None
    assert second.result(10) is None
    with pytest.raises(ValueError, match="piece 1"):
        third.result(10)
    assert [name for name, _ in begun[:3]] == ["a"] * 3
    assert ("fails", 2) in begun
    assert crew.ask(0, note("none")).done()
    crew.stop()
    assert not crew.threads


def test_ranks_of_a_host_share_its_cores(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(16)))
    assert cores_of(0, 1) == list(range(14)), "two are left to the threads that ask the device"
    assert cores_of(1, 2) == list(range(8, 15))
    assert [cores_of(rank, 16) for rank in (0, 15)] == [[0], [15]]
    assert cores_of(20, 32) == [4]


@pytest.mark.parametrize(("cores", "each"), [(None, 3), ([min(os.sched_getaffinity(0))], 1), ([None, None], 1)])
def test_a_thread_that_has_a_core_does_not_divide_a_loop_among_more_threads(cores, each):
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    found: list[int] = []

    def loop(_: int) -> None:
        torch.zeros(1 << 20).mul_(2.0)  # long enough to be divided, which is when torch settles on a number of threads
        found.append(torch.get_num_threads())

    try:
        crew = HostCrew(cores)
        crew.ask(4, loop).result(10)
        crew.stop()
        assert found == [each] * 4
        assert torch.get_num_threads() == 3, "training keeps its own number"
    finally:
        torch.set_num_threads(before)


def test_a_core_that_cannot_be_had_is_done_without(caplog):
    caplog.set_level(logging.INFO, "naught")
    crew, done = HostCrew([min(os.sched_getaffinity(0)), 1 << 14]), []
    crew.ask(4, done.append).result(10)
    crew.stop()
    assert sorted(done) == [0, 1, 2, 3]
    assert "is not bound to core 16384" in caplog.text


def test_threads_that_cannot_be_had_are_told_and_nobody_waits_for_them(monkeypatch):
    crew, starts = HostCrew([None] * 3), threading.Thread.start
    hired: list[threading.Thread] = []

    def start_two(thread: threading.Thread) -> None:
        if len(hired) == 2:
            raise RuntimeError("can't start new thread")
        hired.append(thread)
        starts(thread)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start_two)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            crew.ask(1, print)
    crew.stop()
    assert [thread.is_alive() for thread in hired] == [False, False]


def cores_of_crew(bound: bool) -> list[int]:
    """As on a device, of a host whose 16 cores a launcher has divided among its ranks or has not."""
    group = start(0).schedule.group
    mine = set(range(8 * group.rank, 8 * group.rank + 8)) if bound else set(range(16))
    with mock.patch("os.sched_getaffinity", lambda _: mine):
        return hire_crew(torch.device("cuda"), group).cores


@pytest.mark.parametrize("bound", [True, False])
def test_ranks_divide_the_cores_that_they_share_and_no_others(two, bound):
    assert two.run(cores_of_crew, bound) == [list(range(7)), list(range(8, 15))]


def test_a_process_that_is_forked_does_not_get_what_rests_on_the_host():
    slab = Slab(1 << 20, register=False)
    address = slab.tensor(1, torch.uint8).data_ptr()
    places = Path("/proc/self/smaps").read_text().split("VmFlags:")
    for before, after in pairwise(places):
        found = re.findall(r"^([0-9a-f]+)-([0-9a-f]+) ", before, re.MULTILINE)
        first, last = (int(bound, 16) for bound in found[-1])
        if first <= address < last:
            assert "dc" in after.splitlines()[0].split(), "do not copy on fork"
            return
    raise AssertionError("a slab is mapped")


class SlowFerry:
    """Brings what it is told to once somebody waits for it."""

    def __init__(self) -> None:
        self.device, self.awaited, self.brought = torch.device("cpu"), threading.Event(), False

    def bring(self, *_: object) -> Point:
        assert self.awaited.wait(10)
        self.brought = True
        return here(self.device)

    def keep(self, *_: object) -> None:
        """It is there already."""


def test_an_update_is_not_over_before_what_it_has_left_has_been_read(monkeypatch):
    """Who waits for a future may go on before what is to be done behind it is done."""
    crew, ferry, asked = HostCrew(None), SlowFerry(), threading.Event()
    beside = Beside(crew, ferry, half_up)
    beside.update(1, lambda _: asked.wait(10))
    beside.coming = beside.bring(torch.zeros(1), torch.zeros(1))
    asked.set()
    waits = Arrival.wait_here
    monkeypatch.setattr(Arrival, "wait_here", lambda arrival: (ferry.awaited.set(), waits(arrival)))
    beside.wait()
    assert ferry.brought
    crew.stop()


def test_states_rest_where_the_placement_says():
    engine = start(3, more=BF16, **BOTH)
    take_steps(engine, 1)
    unit = engine.schedule.units["blocks.0"]
    assert {place.tier for place in (unit.placement.param, unit.placement.grad, unit.placement.optim)} == {Tier.HOST}
    segment = unit.segments[0]
    assert segment.weights.shard is None
    assert {tensor.device.type for tensor in (segment.exact, *segment.states.moments.values())} == {"cpu"}
    engine.destroy()
    assert {name for name, nbytes in engine.report()["live"].items() if name.startswith("host ") and nbytes} == set()


@pytest.mark.parametrize("include", [None, ["lp_params"]])
def test_states_are_parked_once_nothing_is_under_way(two, include):
    for place in ("stage2-offload", "stage3-offload"):
        stage, zero = PLACES[place]
        assert two.run(parked, stage, zero, include) == two.reference(parked, stage, zero, [])


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_what_is_parked_comes_back_to_where_it_was(worlds, stage):
    for size in (1, 2):
        assert worlds[size].run(parked, stage, {}, None) == worlds[size].run(parked, stage, {}, [])


def parked(stage: int, zero: dict, include: list[str] | None) -> tuple[list[float], str]:
    engine = start(stage, **zero)
    losses = take_steps(engine, 1)
    if include != []:
        engine.offload_states(include=include)
        engine.reload_states()
    return losses + take_steps(engine, 2, first=1), digest_in_32_bits(engine)


def test_what_is_written_to_small_masters_is_not_what_was_read_before():
    engine = start(2, more=SMALL)
    take_steps(engine, 1)
    first, second, *_ = engine.module.parameters()
    safe_get_full_fp32_param(first)
    with engine.gathered(), torch.no_grad():
        first.fill_(7.0)
    assert safe_get_full_fp32_param(first).unique().tolist() == [7.0]
    safe_set_full_fp32_param(second, torch.full(second.shape, 0.25, device=second.device))
    assert safe_get_full_fp32_param(first).unique().tolist() == [7.0]


def test_a_crew_that_nobody_has_any_more_ends():
    crew = HostCrew(None)
    done = crew.ask(1, print)
    assert done.result(10) is None
    (thread,) = crew.threads
    ghost = weakref.ref(crew)
    del crew
    gc.collect()
    assert ghost() is None
    thread.join(10)
    assert not thread.is_alive()


@pytest.mark.parametrize("tiles", [1, 2])
def test_an_engine_that_nobody_has_any_more_ends_its_crew(tiles):
    """With parameters large enough to tell when their gradients are made."""
    model = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256)).to(DEVICE)
    engine = engine_of(model, config_of(3, offload_optimizer=HOST, more={"naught": {"tiles": tiles}}))
    engine.backward(engine(torch.ones(2, 256, device=DEVICE)).square().mean())
    engine.step()
    (crew,) = {segment.home.host.crew for unit in engine.schedule.units.values() for segment in unit.segments}
    threads, ghost = list(crew.threads), weakref.ref(crew)
    assert threads
    digest_of_weights(engine)  # once the update is over
    del model, engine, crew
    gc.collect()
    assert ghost() is None
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()


def test_an_engine_whose_update_has_failed_can_be_destroyed():
    engine = start(2, offload_optimizer=HOST)
    engine.optimizer.param_groups[0]["eps"] = "small"
    with pytest.raises(TypeError, match="eps"):
        take_steps(engine, 2)
    with pytest.raises(TypeError, match="eps"):
        engine.destroy()
    engine_of(MODELS["plain"](), config_of(2))  # and nothing is in the way of another


@pytest.mark.parametrize("place", ["stage1-offload", "stage2-offload", "stage3-offload", "infinity-host"])
def test_nothing_is_trained_with_weights_of_which_an_update_has_failed(monkeypatch, place):
    stage, zero = PLACES[place]
    engine = start(stage, **zero)
    take_steps(engine, 1)
    digest_of_weights(engine)  # once the first update is over
    pieces: list[int] = []

    def take_all_but_one(*args: object) -> None:
        pieces.append(len(pieces))
        if len(pieces) == 2:
            raise MemoryError("of the second piece")
        _take(*args)

    monkeypatch.setattr("naught.host_update._take", take_all_but_one)
    take_steps(engine, 1)
    for _ in range(4):
        with pytest.raises(MemoryError, match="of the second piece") as told:
            take_steps(engine, 1)
        assert sum("load a checkpoint before you go on" in note for note in told.value.__notes__) == 1
    with pytest.raises(MemoryError, match="of the second piece"):
        engine.destroy()
