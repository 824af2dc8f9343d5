"""Plans: hoisting keeps the orders that matter, keeps to its budget, and changes nothing else."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from naught.errors import PlanError
from naught.placement import PLACEMENTS, Kind, Tier, place_stage
from naught.plan import Budgets, Event, Moment, Plan, Step, UnitBytes, Verb, compile_plan, expand, hoist, keep, simulate

UNITS = ("a", "b", "c", "d", "e")
FETCHES = ((Verb.READ, Kind.PARAM), (Verb.READ, Kind.OPTIM), (Verb.LOAD, Kind.PARAM), (Verb.GATHER, Kind.PARAM))
HELD = {
    (Verb.READ, Kind.PARAM): ("read weights", "weight_shard"),
    (Verb.READ, Kind.OPTIM): ("read states", "state_shard"),
    (Verb.LOAD, Kind.PARAM): ("loaded weights", "weight_shard"),
    (Verb.GATHER, Kind.PARAM): ("gathered weights", "weights"),
}


def one_pass(units) -> list[Event]:
    forward = [Event(moment, unit) for unit in units for moment in (Moment.ENTER, Moment.EXIT)]
    return forward + [Event(moment, unit) for unit in reversed(units) for moment in (Moment.GRAD, Moment.DONE)]


@st.composite
def sizes_of(draw) -> dict[str, UnitBytes]:
    return {unit: UnitBytes(*draw(st.tuples(*[st.integers(0, 100)] * 6))) for unit in UNITS}


@st.composite
def records(draw) -> list[Event]:
    """Any order of uses: blocks skipped, used twice, nested, with and without a backward."""
    order = draw(st.lists(st.sampled_from(UNITS), min_size=1, max_size=10))
    events = [Event(moment, unit) for unit in order for moment in (Moment.ENTER, Moment.EXIT)]
    back = draw(st.permutations(list(dict.fromkeys(order))))
    if draw(st.booleans()):
        events += [Event(moment, unit) for unit in back for moment in (Moment.GRAD, Moment.DONE)]
    if draw(st.booleans()):
        events = [Event(Moment.ENTER, "e"), *events, Event(Moment.EXIT, "e")]
    return events


placements = st.fixed_dictionaries({unit: st.sampled_from(list(PLACEMENTS.values())) for unit in UNITS})


@given(records(), placements, sizes_of(), st.sampled_from(FETCHES), st.integers(0, 400), st.booleans(), st.booleans())
def test_hoisting_never_breaks_an_order_that_matters(events, placed, sizes, fetch, budget, last, eager):
    before = expand(events, placed, last=last, eager=eager)
    after = hoist(before, *fetch, sizes=sizes, budget_bytes=budget)
    assert Counter(after) == Counter(before), "nothing is lost or made up"
    for unit in UNITS:
        assert [step for step in after if step.unit == unit] == [step for step in before if step.unit == unit]
    for verb in Verb:
        lane = [step for step in before if step.verb is verb]
        assert [step for step in after if step.verb is verb] == lane, "a lane keeps its order"
    others = [step for step in before if (step.verb, step.kind) != fetch]
    assert [step for step in after if (step.verb, step.kind) != fetch] == others, "only fetches move"


@given(records(), placements, sizes_of(), st.sampled_from(FETCHES), st.integers(0, 400))
def test_hoisting_never_exceeds_its_budget_where_it_did_not_before(events, placed, sizes, fetch, budget):
    before = expand(events, placed, last=True, eager=False)
    after = hoist(before, *fetch, sizes=sizes, budget_bytes=budget)
    name, field = HELD[fetch]
    # Count every gather, also those of whole weights, which rest on the device and simulate() does not hold.
    held_before, held_after = (peak_of(steps, fetch, sizes, field) for steps in (before, after))
    assert held_after <= max(budget, held_before)
    if fetch != (Verb.GATHER, Kind.PARAM):
        assert simulate(after, placed, sizes).buffers[name] == held_after


def peak_of(steps, fetch, sizes, field) -> int:
    """An oracle: the most bytes between a unit's fetch and the step that gives them back."""
    closes = {
        (Verb.READ, Kind.PARAM): (Verb.LOAD, Kind.PARAM),
        (Verb.READ, Kind.OPTIM): (Verb.WRITE, Kind.OPTIM),
        (Verb.LOAD, Kind.PARAM): (Verb.GATHER, Kind.PARAM),
        (Verb.GATHER, Kind.PARAM): (Verb.RELEASE, Kind.PARAM),
    }[fetch]
    held: set[str] = set()
    peak = 0
    for verb, kind, unit in steps:
        if (verb, kind) == fetch:
            held.add(unit)
        peak = max(peak, sum(getattr(sizes[unit], field) for unit in held))
        if (verb, kind) == closes:
            held.discard(unit)
    return peak


@given(records(), placements, sizes_of(), st.integers(0, 400), st.integers(0, 400))
def test_keeping_drops_only_a_release_and_what_undoes_it(events, placed, sizes, live, reuse):
    before = expand(events, placed, last=True, eager=False)
    after = keep(before, sizes, live_bytes=live, reuse_bytes=reuse)
    dropped = Counter(before) - Counter(after)
    assert not Counter(after) - Counter(before)
    assert set(dropped) <= {
        Step(verb, Kind.PARAM, unit) for verb in (Verb.RELEASE, Verb.READ, Verb.LOAD, Verb.GATHER) for unit in UNITS
    }
    assert_every_use_is_gathered(after, placed)
    peaks = (peak_of(steps, (Verb.GATHER, Kind.PARAM), sizes, "weights") for steps in (before, after))
    unkept, kept = peaks
    assert kept <= max(live, unkept)


def assert_every_use_is_gathered(steps, placed) -> None:
    present = {unit for unit in UNITS if not placed[unit].optim.split}
    for verb, kind, unit in steps:
        if (verb, kind) == (Verb.GATHER, Kind.PARAM):
            assert unit not in present, "gathered twice"
            present.add(unit)
        elif verb is Verb.RELEASE:
            present.discard(unit)
        elif verb is Verb.USE:
            assert unit in present, "used while absent"


@given(records(), placements, sizes_of(), st.integers(0, 300), st.integers(0, 300), st.booleans(), st.booleans())
def test_a_compiled_plan_gathers_before_every_use_and_is_deterministic(events, placed, sizes, live, reuse, last, eager):
    budgets = Budgets(live, live, live, reuse)
    plan = compile_plan(events, placed, sizes, budgets=budgets, last=last, eager=eager)
    assert_every_use_is_gathered(plan.steps, placed)
    again = compile_plan(list(events), dict(reversed(placed.items())), dict(sizes), budgets=budgets, last=last, eager=eager)
    assert again == plan
    assert again.digest == plan.digest


@given(records(), placements)
def test_every_reduced_unit_is_updated_once_with_its_states_at_hand(events, placed):
    for eager in (False, True):
        steps = expand(events, placed, last=True, eager=eager)
        reduced = [step.unit for step in steps if step.verb is Verb.REDUCE]
        assert sorted(step.unit for step in steps if step.verb is Verb.UPDATE) == sorted(reduced)
        for unit in reduced:
            verbs = [(step.verb, step.kind) for step in steps if step.unit == unit]
            update = verbs.index((Verb.UPDATE, Kind.OPTIM))
            assert verbs.index((Verb.REDUCE, Kind.GRAD)) < update
            if placed[unit].optim.tier is Tier.DISK:
                assert verbs.index((Verb.READ, Kind.OPTIM)) < update < verbs.index((Verb.WRITE, Kind.OPTIM))


steps = st.lists(
    st.builds(Step, st.sampled_from(Verb), st.sampled_from(Kind), st.text(max_size=6) | st.sampled_from(['a","b', "a", "\n"])),
    max_size=12,
).map(tuple)


@given(steps, steps)
def test_the_digest_changes_when_and_only_when_the_plan_does(one, other):
    assert (Plan(one).digest == Plan(other).digest) == (one == other)


@given(steps, st.data())
def test_the_digest_sees_every_single_change(plan, data):
    if not plan:
        return
    at = data.draw(st.integers(0, len(plan) - 1))
    swapped = list(plan)
    swapped[at] = swapped[at]._replace(unit=swapped[at].unit + "x")
    assert Plan(tuple(swapped)).digest != Plan(plan).digest
    assert Plan(plan[:at] + plan[at + 1 :]).digest != Plan(plan).digest


def test_a_budget_of_two_blocks_yields_double_buffering():
    sizes = dict.fromkeys(UNITS, UnitBytes(100, 50, 100, 50, 300))
    placed = dict.fromkeys(UNITS, place_stage(3))
    plan = compile_plan(one_pass(UNITS), placed, sizes, budgets=Budgets(gather_bytes=200))
    shown = [f"{step.verb} {step.unit}" for step in plan.steps if step.verb in (Verb.GATHER, Verb.USE, Verb.RELEASE)]
    assert shown[:8] == ["gather a", "gather b", "use a", "release a", "gather c", "use b", "release b", "gather d"]
    assert simulate(plan.steps, placed, sizes).buffers["gathered weights"] == 200


def test_no_budget_fetches_only_what_is_needed():
    sizes = dict.fromkeys(UNITS, UnitBytes(100, 50, 100, 50, 300))
    placed = dict.fromkeys(UNITS, place_stage(3))
    plan = compile_plan(one_pass(UNITS), placed, sizes, budgets=Budgets())
    assert simulate(plan.steps, placed, sizes).buffers["gathered weights"] == 100
    for before, step in zip(plan.steps[1:], plan.steps[2:], strict=False):
        if step.verb is Verb.USE and step.unit != before.unit:
            assert before.verb in (Verb.COLLECT, Verb.GATHER)


@pytest.mark.parametrize(
    ("stage", "gathers", "reduces"),
    [(0, 0, 5), (1, 5, 5), (2, 5, 5), (3, 9, 5)],  # stage 3 keeps the last unit between forward and backward
)
def test_collectives_of_a_step_are_the_papers(stage, gathers, reduces):
    placed = dict.fromkeys(UNITS, place_stage(stage))
    sizes = dict.fromkeys(UNITS, UnitBytes(1, 1, 1, 1, 1))
    verbs = Counter(step.verb for step in compile_plan(one_pass(UNITS), placed, sizes, budgets=Budgets()).steps)
    assert (verbs[Verb.GATHER], verbs[Verb.REDUCE], verbs[Verb.UPDATE], verbs[Verb.NORM]) == (gathers, reduces, 5, 1)


def test_earlier_micro_batches_reduce_only_split_gradients_and_update_nothing():
    for stage, reduces in ((0, 0), (1, 0), (2, 5), (3, 5)):
        placed = dict.fromkeys(UNITS, place_stage(stage))
        verbs = Counter(step.verb for step in expand(one_pass(UNITS), placed, last=False, eager=False))
        assert (verbs[Verb.REDUCE], verbs[Verb.UPDATE], verbs[Verb.NORM]) == (reduces, 0, 0)


def test_updates_come_in_the_order_of_the_next_forward_unless_they_are_eager():
    placed = dict.fromkeys(UNITS, place_stage(2))
    late = [step.unit for step in expand(one_pass(UNITS), placed, last=True, eager=False) if step.verb is Verb.UPDATE]
    early = [step.unit for step in expand(one_pass(UNITS), placed, last=True, eager=True) if step.verb is Verb.UPDATE]
    assert late == list(UNITS)
    assert early == list(reversed(UNITS))


@pytest.mark.parametrize(("name", "device", "host"), [("stage2", 350, 0), ("stage3", 400, 0), ("infinity-host", 200, 250)])
def test_simulated_peaks_follow_by_hand(name, device, host):
    # Five units of 100 bytes on two ranks, one fetched at a time. Stage 2: the last gradient flat beside five owned
    # halves. Stage 3: a gathered unit and its gradient flat beside four owned halves, for the release comes before the
    # reduce. On the host: the owned halves leave at once, so a unit and its gradients are all.
    sizes = dict.fromkeys(UNITS, UnitBytes(weights=100, weight_shard=50, grads=100, grad_shard=50, state_shard=300))
    placed = dict.fromkeys(UNITS, PLACEMENTS[name])
    plan = compile_plan(one_pass(UNITS), placed, sizes, budgets=Budgets())
    peaks = simulate(plan.steps, placed, sizes)
    assert (peaks.tiers[Tier.DEVICE], peaks.tiers[Tier.HOST]) == (device, host)


def test_a_record_of_an_unknown_unit_is_refused():
    with pytest.raises(PlanError, match='names a unit "ghost"'):
        expand([Event(Moment.ENTER, "ghost")], {}, last=True, eager=False)


def test_the_pure_core_imports_no_torch():
    code = "import sys, naught.plan, naught.units, naught.advice, naught.papers, naught.config; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
