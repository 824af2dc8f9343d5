"""Forecasts agree with the papers' formulas, with the plan that would run, and with themselves."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_parity import SOAK

from naught.advice import POOLED, advise, best_forecast, largest_numel, pool
from naught.errors import PlacementError, UsageError
from naught.estimate import Category, forecast
from naught.formulas import Recipe, recipe, state_bytes
from naught.job import ActivationBytes, Checkpointing, Job, transformer_activations
from naught.layout import ALIGN_NUMEL, pad
from naught.machine import GPUS, Gpu, Machine
from naught.model_names import parse_model
from naught.moving import Budgets
from naught.placement import PLACEMENTS, Kind, Placement, Tier, place_stage
from naught.plan import compile_plan
from naught.pooling import Limits, berths_beside, place_in_pool
from naught.presets import gpt_of_count
from naught.rooms import BERTH_NUMEL, LEAST_BERTHS, MOST_BERTHS, landings_of
from naught.shapes import Run
from naught.sizes import PlacedRun
from naught.steps import Event, Moment, Pass, Step, UnitBytes, Verb
from naught.working_set import whole_working_set

STATES = (Category.PARAMETERS, Category.GRADIENTS, Category.OPTIMIZER)
NOTHING = ActivationBytes(0, 0, 0, "none")
HUGE = Machine(gpu=Gpu(10**18, 1e14, 1e10), host_bytes=10**18, disk_bytes=10**18)


def machine_of(ranks: int) -> Machine:
    return replace(HUGE, ranks=ranks, ranks_per_node=ranks)


def states_of(found) -> int:
    return sum(found.memory[tier][category] for tier in Tier for category in STATES)


placements = st.sampled_from(list(PLACEMENTS.values()))
run_lists = st.lists(
    st.builds(lambda numel, repeat: Run("u", numel, repeat), st.integers(1, 10**7), st.integers(1, 12)), min_size=1, max_size=4
)


@given(run_lists, placements, st.sampled_from([1, 2, 3, 8]), st.sampled_from(["bf16", "fp32"]))
def test_states_are_the_papers_plus_padding(runs, placement, ranks, dtype):
    job = Job(recipe=recipe(dtype), wide_gradients=False)  # the papers' gradients are as wide everywhere
    found = forecast("x", [PlacedRun(run, placement) for run in runs], NOTHING, machine_of(ranks), job)
    padded = sum(pad(run.numel, ranks, ALIGN_NUMEL) * run.repeat for run in runs)
    # 32-bit weights on the device are their own masters, but an update elsewhere needs a copy of them there.
    param, grad, optim = (placement.of(kind).tier for kind in Kind)
    copied = dtype == "fp32" and (optim is not Tier.DEVICE or param is Tier.DISK)
    wanted = job.recipe._replace(master=4) if copied else job.recipe
    more = 0
    if optim is Tier.HOST and param is Tier.HOST:
        more -= job.recipe.weight * padded // ranks  # weights that rest there are made of their masters
    if optim is Tier.HOST and grad is Tier.DEVICE:
        more += job.recipe.grad * padded // ranks - job.recipe.grad * padded  # sums wait for the update there alone
    assert states_of(found) == state_bytes(padded, placement, ranks, wanted) + more


@given(run_lists, placements, st.sampled_from([2, 4]), st.integers(1, 3))
def test_traffic_is_what_the_plan_would_move(runs, placement, ranks, accumulation):
    job = Job(accumulation=accumulation)
    found = forecast("x", [PlacedRun(run, placement) for run in runs], NOTHING, machine_of(ranks), job)
    units = {f"{at}.{unit}": run for at, run in enumerate(runs) for unit in range(run.repeat)}
    flats = {name: pad(run.numel, ranks, ALIGN_NUMEL) for name, run in units.items()}
    passes = [Pass(first=at == 0, last=at == accumulation - 1) for at in range(accumulation)]
    steps = [step for which in passes for step in steps_of(flats, placement, ranks, which)]
    gathered = [step.unit for step in steps if step.verb is Verb.GATHER]
    reduced = [step.unit for step in steps if step.verb is Verb.REDUCE]
    whole = 0 if placement.optim.split else sum(flats.values())  # stage 0 gathers summed gradients instead of weights
    assert found.volume["all-gather"] == 2 * (sum(flats[unit] for unit in gathered) + whole) * (ranks - 1) // ranks
    assert found.volume["reduce-scatter"] == 2 * sum(flats[unit] for unit in reduced) * (ranks - 1) // ranks


def steps_of(flats, placement: Placement, ranks: int, which: Pass):
    names = list(flats)
    events = [Event(moment, unit) for unit in names for moment in (Moment.ENTER, Moment.EXIT)]
    events += [Event(moment, unit) for unit in reversed(names) for moment in (Moment.GRAD, Moment.DONE)]
    sizes = {unit: UnitBytes(2 * n, 2 * n // ranks, 2 * n, 2 * n // ranks, 12 * n // ranks) for unit, n in flats.items()}
    return compile_plan(events, dict.fromkeys(names, placement), sizes, budgets=Budgets(), which=which).steps


@pytest.mark.parametrize(("stage", "volume"), [(0, 2), (1, 2), (2, 2), (3, 3)])
def test_the_volume_of_a_step_is_the_papers_with_the_exact_factor(stage, volume):
    numel, ranks, layers = 64 * 4 * 1000, 4, 100
    runs = [PlacedRun(Run("block", numel, layers), PLACEMENTS[f"stage{stage}"])]
    found = forecast("x", runs, NOTHING, machine_of(ranks), Job())
    kept = numel if stage == 3 else 0  # the last block stays between forward and backward
    assert sum(found.volume.values()) == 2 * (volume * numel * layers - kept) * (ranks - 1) // ranks


@pytest.mark.parametrize(("wide", "down"), [(None, 4), (False, 2)])
def test_offload_moves_gradients_down_and_masters_up(wide, down):
    """The paper has two bytes each way; an update in 32 bits that does not round on the host has four."""
    numel, ranks = 64 * 4 * 1000, 4
    placed = [PlacedRun(Run("block", numel), PLACEMENTS["stage2-offload"])]
    found = forecast("x", placed, NOTHING, machine_of(ranks), Job(wide_gradients=wide))
    assert found.link_bytes == (down + 4) * numel // ranks


@st.composite
def mixtures(draw) -> list[PlacedRun]:
    """Runs of one placement, or of several that split everything, as the pool has them; some below a root."""
    split = [placement for placement in PLACEMENTS.values() if placement.param.split]
    choices = st.sampled_from(split) if draw(st.booleans()) else st.just(draw(placements))
    runs = [Run("u", draw(st.integers(1, 10**6)), draw(st.integers(1, 14))) for _ in range(draw(st.integers(1, 4)))]
    root = [Run("root", draw(st.integers(1, 10**6)), outer=True)] if draw(st.booleans()) else []
    return [PlacedRun(run, draw(choices)) for run in [*root, *runs]]


@given(mixtures(), st.sampled_from([1, 2]))
def test_the_working_set_is_that_of_the_whole_model(placed, ranks):
    found = forecast("x", placed, NOTHING, replace(machine_of(ranks), berths=0), Job())
    whole = whole_working_set(tuple(placed), ranks, Job())
    assert found.memory[Tier.DEVICE][Category.GATHERED] == whole.gathered
    assert found.memory[Tier.DEVICE][Category.BUFFERS] == whole.device_buffers
    assert found.memory[Tier.HOST][Category.BUFFERS] == whole.host_buffers + rooms_of(placed, ranks)


def rooms_of(placed: list[PlacedRun], ranks: int) -> int:
    """Tiles on their way from disk and back: masters, two moments, gradients and weights, sixteen times, and one more."""
    kinds_of = (Kind.OPTIM, Kind.PARAM, Kind.GRAD)
    updated, sunk, summed = (any(place.of(kind).tier is Tier.DISK for _, place in placed) for kind in kinds_of)
    largest = max(pad(run.numel, ranks, ALIGN_NUMEL) for run, _ in placed) // ranks
    tile = min(4 * pad(largest, 1, 4096), 1 << 22)
    kinds = (3 + summed) * updated + sunk
    return tile * (16 * kinds + 1 + (updated and sunk)) if kinds else 0


def _over_link(step: Step, place: Placement) -> int:
    """Bytes of an element: an update on the host works in 32 bits, and what it makes goes up as it is."""
    if step.kind is Kind.GRAD:
        return 2 if place.optim.tier is Tier.DEVICE else 4
    made = place.param.tier is place.optim.tier is Tier.HOST
    renewed = step.verb is Verb.LOAD and place.param.tier is Tier.DEVICE
    return 4 if made or renewed else 2


@given(mixtures(), st.sampled_from([1, 2]), st.integers(1, 3))
def test_traffic_between_the_tiers_is_what_the_plan_would_move(placed, ranks, accumulation):
    job = Job(accumulation=accumulation)
    found = forecast("x", placed, NOTHING, machine_of(ranks), job)
    units = {f"{at}.{unit}": item for at, item in enumerate(placed) for unit in range(item.run.repeat)}
    shards = {name: pad(item.run.numel, ranks, ALIGN_NUMEL) // ranks for name, item in units.items()}
    sizes = {name: UnitBytes(1, 1, 1, 1, 1) for name in units}
    where = {name: item.placement for name, item in units.items()}
    outer = [name for name, item in units.items() if item.run.outer]
    inner = [name for name in units if name not in outer]
    events = [Event(Moment.ENTER, unit) for unit in outer]
    events += [Event(moment, unit) for unit in inner for moment in (Moment.ENTER, Moment.EXIT)]
    events += [Event(Moment.EXIT, unit) for unit in outer] + [Event(Moment.GRAD, unit) for unit in outer]
    events += [Event(moment, unit) for unit in reversed(inner) for moment in (Moment.GRAD, Moment.DONE)]
    events += [Event(Moment.DONE, unit) for unit in outer]
    moved = {Verb.LOAD: 0, Verb.STORE: 0, Verb.READ: 0, Verb.WRITE: 0}
    kept = {Kind.PARAM: 2, Kind.GRAD: job.kept_grad, Kind.OPTIM: 12}
    for at in range(accumulation):
        which = Pass(first=at == 0, last=at == accumulation - 1)
        for step in compile_plan(events, where, sizes, budgets=Budgets(), which=which).steps:
            if step.verb is Verb.GATHER and where[step.unit].param.split and where[step.unit].param.tier is not Tier.DEVICE:
                moved[Verb.LOAD] += shards[step.unit] * _over_link(
                    step, where[step.unit]
                )  # a gather brings its own shard up first
            if step.verb in moved:
                on_link = step.verb in (Verb.LOAD, Verb.STORE)
                size = _over_link(step, where[step.unit]) if on_link else kept[step.kind]
                if step.verb is Verb.STORE and step.kind is Kind.GRAD and where[step.unit].grad.split and at:
                    size *= 2  # what was stored before comes up, to be added to
                moved[step.verb] += shards[step.unit] * size
    assert found.link_bytes == moved[Verb.LOAD] + moved[Verb.STORE]
    assert found.disk_bytes == moved[Verb.READ] + moved[Verb.WRITE]


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("block", [0, 300_000])
@pytest.mark.parametrize("loss", [0, 10**5, 10**8])
@pytest.mark.parametrize("checkpoints", [10**3, 10**9])
def test_gradients_come_as_activations_go_and_the_fullest_moment_counts(checkpoints, loss, block, accumulation):
    run = PlacedRun(Run("block", 64 * 1000, 10), PLACEMENTS["stage2"])
    given = ActivationBytes(0, block + loss, checkpoints, "given", loss=loss)
    found = forecast("x", [run], given, machine_of(1), Job(accumulation=accumulation, checkpointing=Checkpointing.BLOCK))
    cells = found.memory[Tier.DEVICE]
    flats = 2 * 64 * 1000  # one: a rank alone has none under way
    there = cells[Category.PARAMETERS] + cells[Category.OPTIMIZER] + (cells[Category.GRADIENTS] if accumulation == 2 else 0)
    late = cells[Category.GRADIENTS] if accumulation == 1 else 0
    one = 2 * 64 * 1000 if accumulation == 1 else 0  # a sum; those of several micro-batches are there already
    moments = (checkpoints + block + loss, checkpoints + block + flats + one, block + flats + late)
    assert found.total(Tier.DEVICE) == there + max(moments)


@pytest.mark.parametrize("name", PLACEMENTS)
def test_updates_in_the_backward_are_never_planned_to_hold_more(name):
    for loss, checkpoints in product((0, 10**6), (0, 10**7)):
        given = ActivationBytes(0, loss + 1000, checkpoints, "given", loss=loss)
        placed = [PlacedRun(Run("block", 64 * 1000, 10), PLACEMENTS[name])]
        late, soon = (
            forecast("x", placed, given, machine_of(2), Job(checkpointing=Checkpointing.BLOCK, update_in_backward=each))
            for each in (False, True)
        )
        assert all(soon.total(tier) <= late.total(tier) for tier in Tier)


def test_what_travels_is_staged_in_buffers_of_a_constant_size():
    for numel, wanted in ((64 * 1000, 4 * 4 * 64 * 500), (64 << 20, 5 * 4 << 24)):
        placed = [PlacedRun(Run("block", numel, 3), PLACEMENTS["stage2-offload"])]
        found = forecast("x", placed, NOTHING, machine_of(2), Job())
        assert found.memory[Tier.DEVICE][Category.BUFFERS] == wanted


def test_staging_gives_way_to_states():
    placed = [PlacedRun(Run("block", 1 << 28, 3), PLACEMENTS["stage2-offload"])]
    needs = {
        most: forecast("x", placed, NOTHING, replace(HUGE, berths=most), Job()).total(Tier.DEVICE) for most in (4, 6, 12, 24)
    }

    def berths(nbytes: int) -> int:
        machine = replace(HUGE, gpu=HUGE.gpu._replace(memory_bytes=-(-nbytes * 100 // 96)))  # of which states may have 0.96
        return berths_beside(placed, Limits(machine, Job(), 0))

    assert [berths(nbytes) for nbytes in needs.values()] == [4, 6, 12, 24]
    assert [berths(needs[most] - 100) for most in (6, 12, 24)] == [4, 6, 12]
    with pytest.raises(PlacementError, match="does not fit"):
        berths(needs[4] - 100)


@pytest.mark.parametrize(("pieces", "landings"), [(1, [0, 2, 2, 2]), (2, [0, 1, 2, 2]), (30, [0, 1, 2, 2])])
def test_what_goes_down_has_most_of_the_staging(pieces, landings):
    counts = (0, LEAST_BERTHS, LEAST_BERTHS + 1, MOST_BERTHS)
    assert [landings_of(berths, pieces * BERTH_NUMEL) for berths in counts] == landings


def test_staging_pushes_no_states_to_disk():
    """Beside the most of it they would have to go there, and a step would take twice as long."""
    units = [Run(f"block {at}", 12 * 6144**2) for at in range(20)]
    gpu = GPUS["h200"]._replace(memory_bytes=28 << 30)
    machine = Machine(gpu=gpu, host_bytes=111 * 10**9, host_share=1.0, disk_bytes=10**12)
    limits = Limits(machine, Job(recipe=Recipe(2, 2, 2, 8), wide_gradients=False), 9 * 10**9)
    arranged = place_in_pool(units, limits)
    assert arranged.berths < MOST_BERTHS
    assert all(placement.optim.tier is not Tier.DISK for placement in arranged.placements)
    roomy = place_in_pool(units, replace(limits, machine=replace(machine, host_bytes=10**12)))
    assert roomy.berths == MOST_BERTHS


def test_a_plan_gives_up_staging_before_it_calls_a_row_too_large():
    placed = [PlacedRun(Run("block", 1 << 28, 3), PLACEMENTS["stage2-offload"])]
    needs = {most: forecast("x", placed, NOTHING, replace(HUGE, berths=most), Job()).total(Tier.DEVICE) for most in (4, 24)}
    for most, nbytes in needs.items():
        machine = replace(HUGE, gpu=HUGE.gpu._replace(memory_bytes=-(-nbytes * 100 // 96)))
        found = best_forecast("x", placed, lambda _: NOTHING, machine, Job())
        assert (found.fits, found.berths) == (True, most)


def test_a_rank_alone_gathers_nothing():
    placed = [PlacedRun(Run("block", 64 * 1000, 10), PLACEMENTS["stage3"])]
    found = forecast("x", placed, NOTHING, machine_of(1), Job())
    assert found.memory[Tier.DEVICE][Category.GATHERED] == 2 * 64 * 1000  # a gradient flat, and none under way


def test_double_buffering_is_the_working_set_of_stage_3():
    numel = 64 * 1000
    found = forecast("x", [PlacedRun(Run("block", numel, 10), PLACEMENTS["stage3"])], NOTHING, machine_of(2), Job())
    assert (
        found.memory[Tier.DEVICE][Category.GATHERED] == 5 * 2 * numel
    )  # one unit in use and two ahead of theirs, and two gradient flats, one under way


def test_states_on_disk_pass_through_rooms_of_a_constant_size():
    sizes = []
    for numel in (64 << 20, 1 << 30):
        run = Run("block", numel, 10)
        found = forecast("x", [PlacedRun(run, PLACEMENTS["infinity-disk-optim"])], NOTHING, machine_of(1), Job())
        sizes.append(found.memory[Tier.HOST][Category.BUFFERS])
    assert sizes[0] == sizes[1] == (16 * 3 + 1) << 22


def test_tiles_of_a_frozen_layer_gain_no_states():
    run = Run("adapter", 64 * 4096 + 1, 3, frozen=64 * 4096 + 1)
    found = forecast("x", [PlacedRun(run, PLACEMENTS["stage3"])], NOTHING, machine_of(1), Job(), tiles=4096)
    assert found.memory[Tier.DEVICE][Category.OPTIMIZER] == 0


def test_frozen_weights_on_disk_are_read_and_never_written():
    run = Run("block", 64 * 1000, 3, frozen=64 * 1000)
    found = forecast("x", [PlacedRun(run, PLACEMENTS["infinity-disk"])], NOTHING, machine_of(1), Job())
    assert found.disk_bytes == 5 * 2 * 64 * 1000


def test_an_outer_unit_is_held_beside_the_others():
    numel = 64 * 1000
    runs = [Run("root", numel, outer=True), Run("block", numel, 10)]
    found = forecast("x", [PlacedRun(run, PLACEMENTS["stage3"]) for run in runs], NOTHING, machine_of(2), Job())
    assert found.memory[Tier.DEVICE][Category.GATHERED] == 7 * 2 * numel  # its weights and gradients as well


def test_frozen_parameters_have_neither_gradients_nor_states():
    run = Run("block", 64 * 1000, 2, frozen=64 * 990)
    found = forecast("x", [PlacedRun(run, PLACEMENTS["stage2"])], NOTHING, machine_of(1), Job())
    cells = found.memory[Tier.DEVICE]
    assert cells[Category.PARAMETERS] == 2 * 2 * 64 * 1000
    assert cells[Category.GRADIENTS] == 2 * 2 * 64 * 10
    assert cells[Category.OPTIMIZER] == 2 * 12 * 64 * 10


def test_whole_frozen_weights_are_never_gathered_and_split_ones_are():
    frozen = Run("block", 64 * 1000, 3, frozen=64 * 1000)
    for stage, gathers in ((1, 0), (2, 0), (3, 5)):
        found = forecast("x", [PlacedRun(frozen, PLACEMENTS[f"stage{stage}"])], NOTHING, machine_of(2), Job())
        assert found.volume == {"all-gather": gathers * 2 * 64 * 1000 // 2, "reduce-scatter": 0}


def test_micro_batches_are_summed_in_32_bits():
    run = [PlacedRun(Run("block", 64 * 1000), PLACEMENTS["stage2"])]
    one, many = (forecast("x", run, NOTHING, machine_of(2), Job(accumulation=a)) for a in (1, 4))
    assert many.memory[Tier.DEVICE][Category.GRADIENTS] == 2 * one.memory[Tier.DEVICE][Category.GRADIENTS]
    assert many.volume["reduce-scatter"] == 4 * one.volume["reduce-scatter"]


@pytest.mark.parametrize("ranks", [1, 4])
def test_whole_gradients_that_leave_for_the_host_rest_on_the_device_only_while_they_are_summed(ranks):
    numel = 64 * 1000
    row = [[PlacedRun(Run("block", numel, 10), PLACEMENTS[f"stage{stage}-offload"])] for stage in (1, 2)]
    once, split = (forecast("x", placed, NOTHING, machine_of(ranks), Job()) for placed in row)
    assert {tier: once.total(tier) for tier in Tier} == {tier: split.total(tier) for tier in Tier}
    far = Placement(PLACEMENTS["stage1"].param, PLACEMENTS["stage1"].grad, PLACEMENTS["infinity-disk"].optim)
    on_disk = forecast("x", [PlacedRun(Run("block", numel, 10), far)], NOTHING, machine_of(ranks), Job())
    for found in (once, split, on_disk):
        assert found.memory[Tier.HOST][Category.GRADIENTS] == 4 * 10 * numel // ranks
    summed = forecast("x", row[0], NOTHING, machine_of(ranks), Job(accumulation=2))
    assert summed.memory[Tier.DEVICE][Category.GRADIENTS] == 4 * 10 * numel


def test_gradients_on_disk_are_added_to_in_place():
    run = [PlacedRun(Run("block", 64 * 1000), PLACEMENTS["infinity-disk-all"])]
    states, weights = 2 * 12 * 64 * 1000, 2 * 64 * 1000
    for accumulation, gradient in ((1, 2), (4, 4)):
        job = Job(accumulation=accumulation)
        found = forecast("x", run, NOTHING, machine_of(1), job)
        moved = found.disk_bytes - states - (accumulation + 1) * weights  # a kept unit is read once a pass, written once
        assert moved == 2 * accumulation * gradient * 64 * 1000


def test_checkpoints_go_where_they_are_told():
    shape = parse_model("gpt2").shape
    for where, tier in ((Checkpointing.BLOCK, Tier.DEVICE), (Checkpointing.HOST, Tier.HOST), (Checkpointing.DISK, Tier.DISK)):
        job = Job(checkpointing=where)
        measured = transformer_activations(shape, job)
        found = forecast("x", [PlacedRun(Run("b", 640), PLACEMENTS["stage0"])], measured, HUGE, job)
        assert found.memory[tier][Category.CHECKPOINTS] == 2 * 1024 * 768 * 12
        assert found.memory[Tier.DEVICE][Category.ACTIVATIONS] == measured.working
        # On their way to disk and back they pass through six rooms on the host.
        assert found.memory[Tier.HOST][Category.BUFFERS] == (6 * 2 * 1024 * 768 if tier is Tier.DISK else 0)
        assert found.link_bytes == (0 if tier is Tier.DEVICE else 2 * 2 * 1024 * 768 * 12)
        assert found.disk_bytes == (2 * 2 * 1024 * 768 * 12 if tier is Tier.DISK else 0)
    job = Job(checkpointing=Checkpointing.NONE)
    found = forecast("x", [PlacedRun(Run("b", 640), PLACEMENTS["stage0"])], measured, HUGE, job)
    assert found.memory[Tier.DEVICE][Category.ACTIVATIONS] == measured.full


def test_gpt2_activations_are_the_papers_60_gigabytes():
    # ZeRO: a 1.5B GPT-2 with batch 32 and 1K tokens holds about 60 GB; its 12 h elements a token are 24 h bytes, and
    # ZeRO-Infinity's are 16 h and the attention scores.
    shape = replace(parse_model("gpt2-1.5b").shape, vocab=0)
    fused = transformer_activations(shape, Job(micro_batch=32, checkpointing=Checkpointing.NONE))
    assert fused.full == 2 * 12 * 1600 * 32 * 1024 * 48
    assert 60e9 < fused.full < 61e9
    assert "lower bound" in fused.source
    eager = transformer_activations(shape, Job(micro_batch=32, fused_attention=False)).full
    assert eager == 48 * 32 * 1024 * (16 * 1600 + 2 * 25 * 1024)
    assert transformer_activations(shape, Job(micro_batch=32)).checkpoints == 2 * 32 * 1024 * 1600 * 48


# --- what the papers' machines and ours can hold ----------------------------------------------------------------------


def dgx2(nodes: int, *, disk: bool = True, ranks: int = 16) -> Machine:
    host_bytes, disk_bytes = 1500 * 10**9, 28 * 10**12 if disk else 0
    return Machine(ranks=nodes * ranks, ranks_per_node=ranks, gpu=GPUS["v100"], host_bytes=host_bytes, disk_bytes=disk_bytes)


def fitting(model: str, machine: Machine) -> set[str]:
    return {row.name for row in advise(parse_model(model), None, machine, Job()).forecasts if row.fits}


def test_32_trillion_parameters_fit_512_v100s_with_nvme_and_not_without():
    assert "infinity-disk-all" in fitting("32T", dgx2(32))
    assert fitting("32T", dgx2(32, disk=False)) == set()


def test_1_trillion_parameters_fit_one_dgx2_with_nvme_and_not_without():
    assert "infinity-disk-all" in fitting("infinity-1t", dgx2(1))
    assert fitting("infinity-1t", dgx2(1, disk=False)) == set()


def test_13_billion_parameters_fit_one_v100_with_stage_2_offload():
    found = fitting("offload-13b", dgx2(1, disk=False, ranks=1))
    assert "stage2-offload" in found
    assert found.isdisjoint({"stage0", "stage1", "stage2", "stage3"})


def test_what_does_not_fit_is_told_by_what_lacks_least():
    """A model that is a little too large has its pool filled up, on every tier that there is."""
    h200 = Machine(gpu=GPUS["h200"], host_bytes=125 * 2**30)
    most = largest_numel(POOLED, h200, Job())
    for disk in (0, 10**9):
        advice = advise(gpt_of_count(int(most * 1.02)), None, replace(h200, disk_bytes=disk), Job())
        assert advice.best is None
        assert advice.nearest.name == POOLED
        assert sum(advice.nearest.lacks.values()) < 0.06 * sum(h200.capacity(tier) for tier in Tier)


def test_plain_data_parallelism_stops_near_two_billion():
    largest = largest_numel("stage0", dgx2(1, disk=False), Job())
    assert 1.4e9 <= largest <= 2e9


def test_an_h200_with_little_host_memory_holds_most_when_all_tiers_are_one_pool():
    h200 = Machine(gpu=GPUS["h200"], host_bytes=125 * 2**30, disk_bytes=60 * 2**30)
    plain, offload, pooled = (largest_numel(name, h200, Job(micro_batch=8)) for name in ("stage0", "stage2-offload", POOLED))
    assert 8.5e9 < plain < 9.3e9
    assert 7.5e9 < offload < 8e9, "host memory is smaller than the GPU's: offload alone holds less"
    assert 8e9 < largest_numel("stage2-offload", h200, Job(micro_batch=8, wide_gradients=False)) < 9e9
    assert 19e9 < pooled < 21e9


@pytest.mark.parametrize("name", [*PLACEMENTS, POOLED])
def test_the_largest_model_fits_and_a_slightly_larger_one_does_not(name):
    machine = replace(dgx2(2), disk_bytes=10**12)
    job = Job(wide_gradients=False) if name == POOLED else Job()
    largest = largest_numel(name, machine, job)

    def fits(numel: int) -> bool:
        model = gpt_of_count(numel)
        measure = lambda trial: transformer_activations(model.shape, trial)  # noqa: E731
        placed = (
            pool(model.runs, measure, machine, job).placed
            if name == POOLED
            else [PlacedRun(run, PLACEMENTS[name]) for run in model.runs]
        )
        return best_forecast(name, placed, measure, machine, job).fits

    assert fits(largest)
    assert not fits(int(largest * 1.05))


@settings(max_examples=1000 if SOAK else 30)
@given(st.integers(10**6, 3 * 10**11), st.sampled_from([1, 2, 8]), st.integers(0, 10**12), st.integers(0, 10**12), st.booleans())
def test_the_pool_loses_no_unit_and_fits_whenever_a_single_row_does(numel, ranks, host, disk, early):
    machine = Machine(ranks=ranks, ranks_per_node=ranks, gpu=GPUS["a100-80gb"], host_bytes=host, disk_bytes=disk)
    advice = advise(gpt_of_count(numel), None, machine, Job(update_in_backward=early))
    model = gpt_of_count(numel)
    assert sum(run.numel * run.repeat for run, _ in advice.pooled) == model.numel
    names = ("stage3", "stage3-offload", "infinity-host", "infinity-disk-optim", "infinity-disk", "infinity-disk-all")
    rows = [row for row in advice.forecasts if row.name in names and row.fits]
    if rows:
        assert advice.forecasts[-1].fits
        assert advice.forecasts[-1].times.likely <= min(row.times.likely for row in rows)
        assert all(advice.largest[POOLED] >= 0.99 * advice.largest[row.name] for row in rows)
    assert disk or advice.forecasts[-1].total(Tier.DISK) == 0  # also where nothing fits
    for row in advice.forecasts:
        times = row.times
        assert times.overlapped <= times.likely * 1.000001 and times.likely <= times.serial
        if advice.best and row.fits:
            assert advice.best.times.likely <= times.likely * 1.01
            like, faster = times.likely <= advice.best.times.likely, times.overlapped < advice.best.times.overlapped * 0.99
            assert not (like and faster), f"{row.name} is no slower in any way than {advice.best.name}"


def test_what_the_host_updates_in_the_backward_hides_under_it():
    """As long as there is backward to hide under: with no checkpoints two forwards, with them three."""
    block = Run("block", 10**9)
    for tier, forward_s, checkpointing, hidden in (
        (Tier.HOST, 0.05, Checkpointing.NONE, 0.1),
        (Tier.HOST, 0.05, Checkpointing.BLOCK, 0.15),
        (Tier.HOST, 9.0, Checkpointing.NONE, 0.5),
        (Tier.DEVICE, 0.05, Checkpointing.NONE, 0.0),
    ):
        machine = Machine(gpu=GPUS["h200"], host_bytes=10**12, update_numel_s=2e9)
        found, waiting = (
            forecast(
                "x",
                [PlacedRun(block, place_stage(2, optim=tier))],
                ActivationBytes(0, 0, 0, "given", forward_flops=round(forward_s * machine.gpu.flops)),
                machine,
                Job(update_in_backward=early, checkpointing=checkpointing),
            ).times
            for early in (True, False)
        )
        assert found.behind_backward == pytest.approx(hidden) and waiting.behind_backward == 0
        assert found.likely == pytest.approx(found.serial - found.behind_update - hidden)


def test_of_rows_that_likely_take_as_long_the_one_that_moves_less_is_recommended():
    machine = Machine(gpu=GPUS["rtx4090"], host_bytes=500 * 10**9)
    advice = advise(gpt_of_count(10**10), None, machine, Job())
    rows = {row.name: row for row in advice.forecasts}
    best, other = advice.best, rows["infinity-host"]
    assert best is not None
    assert other.fits and other.times.likely <= best.times.likely * 1.01  # what comes up again does so beside what goes down
    assert best.times.overlapped < other.times.overlapped and best.link_bytes < other.link_bytes


def test_weights_leave_the_device_for_states_where_they_come_up_beside_the_hosts_update():
    """Of 8B parameters within 32 GiB: weights that stay would save traffic that nobody waits for, and leave the host more to
    update."""
    blocks = [Run(f"block {at}", 12 * 5120**2) for at in range(25)]
    machine = Machine(gpu=GPUS["h200"]._replace(memory_bytes=32 << 30), host_bytes=122 * 10**9, host_share=1.0)
    job = Job(recipe=Recipe(2, 2, 2, 8), wide_gradients=False, checkpointing=Checkpointing.NONE)
    activations = ActivationBytes(9 * 10**9, 0, 0, "given", forward_flops=1)
    placed, _ = pool(blocks, lambda _: activations, machine, job, automatic=False, tiles=False)
    tiers = [(placement.param.tier, placement.optim.tier) for _, placement in placed]
    assert tiers.count((Tier.DEVICE, Tier.DEVICE)) == 5 and tiers.count((Tier.HOST, Tier.HOST)) > 12
    kept = [PlacedRun(run, place_stage(3, optim=Tier.HOST)) for run in blocks[1:]]
    others = [PlacedRun(blocks[0], PLACEMENTS["stage3"]), *kept]
    chosen, other = (forecast("x", rows, activations, machine, job) for rows in (placed, others))
    assert chosen.fits and other.fits
    assert chosen.times.likely < other.times.likely and chosen.times.link > other.times.link


def test_without_a_gpu_host_memory_is_the_device():
    machine = Machine(gpu=Gpu(16 * 10**9, 1e11, 1e10), disk_bytes=10**12, unified=True)
    advice = advise(gpt_of_count(2 * 10**9), None, machine, Job())
    rows = {row.name: row for row in advice.forecasts}
    assert not rows["stage0"].fits
    assert rows["infinity-disk"].fits
    assert all(row.total(Tier.HOST) == 0 for row in advice.forecasts)


@pytest.mark.parametrize(
    "bad",
    [
        lambda: Machine(ranks=0),
        lambda: Machine(ranks=12, ranks_per_node=8),
        lambda: Machine(host_bytes=-1),
        lambda: Job(micro_batch=0),
        lambda: recipe("fp8"),
        lambda: recipe("bf16", "muon"),
    ],
)
def test_impossible_machines_and_jobs_are_refused(bad):
    with pytest.raises(UsageError):
        bad()


def test_a_row_of_units_is_placed_as_its_units_are():
    """Whether they are told as one run or one by one."""
    machine, job = machine_of(1), Job()
    machine = replace(machine, gpu=machine.gpu._replace(memory_bytes=6 * 10**9), host_bytes=4 * 10**9, disk_bytes=10**12)
    together, apart = [Run("block", 10**7, 64)], [Run(f"block {at}", 10**7) for at in range(64)]
    counts = []
    for runs in (together, apart):
        found: Counter[Placement] = Counter()
        for run, placement in pool(runs, lambda _: NOTHING, machine, job, automatic=False, tiles=False).placed:
            found[placement] += run.repeat
        counts.append(found)
    assert counts[0] == counts[1]
    assert len(counts[0]) > 1
