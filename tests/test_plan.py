"""Plans: every verb finds its bytes, hoisting keeps the orders that matter and its budgets, and lists are as expected."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from naught.errors import PlanError
from naught.expansion import expand
from naught.holding import Buffer, simulate
from naught.moving import Budgets, hoist, keep
from naught.placement import PLACEMENTS, Kind, Place, Placement, Tier, place_stage
from naught.plan import Plan, compile_plan
from naught.steps import EVERY_UNIT, Event, Moment, Pass, Step, UnitBytes, Verb

UNITS = ("", "b", "c", "d", "e")  # "" is the root's name
ANCHORS = (Verb.USE, Verb.LEAVE)
FETCHES = (Verb.READ, Verb.LOAD, Verb.GATHER)
EVEN = dict.fromkeys(UNITS, UnitBytes(weights=100, weight_shard=50, grads=100, grad_shard=50, state_shard=300))

# Every valid placement of split states, and the named ones with whole states.
EVERY = [
    *PLACEMENTS.values(),
    *(Placement(Place(True, p), Place(True, g), Place(True, o)) for p in Tier for g in Tier for o in Tier),
]


def one_pass(units) -> list[Event]:
    forward = [Event(moment, unit) for unit in units for moment in (Moment.ENTER, Moment.EXIT)]
    return forward + [Event(moment, unit) for unit in reversed(units) for moment in (Moment.GRAD, Moment.DONE)]


@st.composite
def sizes_of(draw) -> dict[str, UnitBytes]:
    return {unit: UnitBytes(*draw(st.tuples(*[st.integers(0, 100)] * 6)), trained=draw(st.integers(0, 5)) > 0) for unit in UNITS}


@st.composite
def records(draw) -> list[Event]:
    """Anything that hooks may say: units skipped, used twice, nested; recomputes; late gradients; no backward at all."""
    order = draw(st.lists(st.sampled_from(UNITS), min_size=1, max_size=8))
    events: list[Event] = []
    for unit in order:
        inner = draw(st.sampled_from([*UNITS, None, None, None]))
        within = [Event(Moment.ENTER, inner), Event(Moment.EXIT, inner)] if inner is not None else []
        events += [Event(Moment.ENTER, unit), *within, Event(Moment.EXIT, unit)]
    if draw(st.booleans()):
        return events
    for unit in draw(st.permutations(list(dict.fromkeys(event.unit for event in events)))):
        recompute = [Event(Moment.ENTER, unit)] + [Event(Moment.EXIT, unit)] * draw(st.integers(0, 1))
        events += [Event(Moment.GRAD, unit), *(recompute * draw(st.integers(0, 1)))]
        if draw(st.integers(0, 3)):
            events.append(Event(Moment.DONE, unit))
    late = draw(st.lists(st.sampled_from(UNITS), max_size=2))
    return events + [Event(Moment.DONE, unit) for unit in late]


placements = st.fixed_dictionaries({unit: st.sampled_from(EVERY) for unit in UNITS})
passes = st.builds(Pass, st.booleans(), st.booleans(), st.booleans())
budgets_of = st.builds(Budgets, *[st.integers(0, 400)] * 6, st.booleans())


class World:
    """An oracle: where the bytes of each unit are. A verb that does not find what it needs fails."""

    def __init__(self, placed, sizes, which: Pass) -> None:
        self.placed, self.sizes, self.which = placed, sizes, which
        self.fresh = {(Kind.PARAM, unit): {place.param.tier} for unit, place in placed.items()}
        self.gathered = {u for u, place in placed.items() if not place.param.split and not (place.optim.split and which.first)}
        self.collected: set[str] = set()
        self.grads: dict[str, set] = {unit: set() for unit in placed}
        if not which.first:
            self.grads = {unit: {place.grad.tier} if place.grad.split else set() for unit, place in placed.items()}
        self.states = {unit: {place.optim.tier} for unit, place in placed.items()}
        self.updated: Counter[str] = Counter()
        self.in_backward: set[str] = set()
        self.under_way: set[str] = set()

    def issue(self, step: Step) -> None:
        verb, kind, unit = step
        if verb is Verb.NORM:
            assert unit == EVERY_UNIT
            return
        where = {
            Kind.PARAM: self.fresh[kind, unit] if kind is Kind.PARAM else set(),
            Kind.GRAD: self.grads[unit],
            Kind.OPTIM: self.states[unit],
        }[kind]
        place = self.placed[unit]
        if verb in (Verb.READ, Verb.LOAD, Verb.STORE, Verb.WRITE):
            source, target = {
                Verb.READ: (Tier.DISK, Tier.HOST),
                Verb.LOAD: (Tier.HOST, Tier.DEVICE),
                Verb.STORE: (Tier.DEVICE, Tier.HOST),
                Verb.WRITE: (Tier.HOST, Tier.DISK),
            }[verb]
            assert source in where, f"{step} finds nothing on {source}"
            where.add(target)
        elif verb is Verb.GATHER:
            assert unit not in self.gathered, f"{step} of what is there"
            assert where & {Tier.DEVICE, Tier.HOST}, f"{step} has no shard to send"
            self.gathered.add(unit)
        elif verb is Verb.RELEASE:
            assert unit in self.gathered and place.param.split
            self.gathered.discard(unit)
        elif verb is Verb.USE:
            assert unit in self.gathered, f"{step} of absent or stale weights"
            if kind is Kind.GRAD:
                self.in_backward.add(unit)
        elif verb is Verb.LEAVE and kind is Kind.GRAD:
            self.in_backward.discard(unit)
        elif verb is Verb.COLLECT:
            assert self.sizes[unit].trained
            self.collected.add(unit)
        elif verb is Verb.REDUCE:
            assert unit not in self.under_way
            self.under_way.add(unit)
        elif verb is Verb.SETTLE:
            assert unit in self.under_way, "nothing to wait for"
            self.under_way.discard(unit)
            if place.grad.tier is Tier.DISK and Tier.DISK in where:
                assert Tier.HOST in where, "the sum so far was not read back"
            if not place.grad.split:
                assert Tier.DEVICE not in where, "whole gradients summed twice"
            where.clear()
            where.add(Tier.DEVICE)
        elif verb is Verb.UPDATE:
            runs_on = Tier.DEVICE if place.optim.tier is Tier.DEVICE else Tier.HOST
            assert runs_on in self.grads[unit], f"{step} misses its gradient"
            assert runs_on in self.states[unit], f"{step} misses its states"
            self.states[unit] = {runs_on}
            self.fresh[Kind.PARAM, unit] = {runs_on}
            self.grads[unit] = set()
            self.updated[unit] += 1
            if place.optim.split:
                self.gathered.discard(unit)

    def at_end(self) -> None:
        assert not self.under_way
        for unit, place in self.placed.items():
            assert place.param.tier in self.fresh[Kind.PARAM, unit], f"new weights of {unit} are not where they rest"
            assert place.optim.tier in self.states[unit], f"new states of {unit} are not where they rest"
            assert self.updated[unit] <= 1


def assert_every_verb_finds_its_bytes(steps, placed, sizes, which) -> None:
    world = World(placed, sizes, which)
    for at, step in enumerate(steps):
        if step.verb is Verb.RELEASE and step.unit in world.in_backward:
            anchor = next(later for later in steps[at:] if later.unit == step.unit and later.verb in ANCHORS)
            assert anchor == Step(Verb.LEAVE, Kind.GRAD, step.unit), "freed in the middle of a backward"
        world.issue(step)
    world.at_end()


@given(records(), placements, sizes_of(), passes, budgets_of)
def test_every_verb_of_a_compiled_plan_finds_its_bytes(events, placed, sizes, which, budgets):
    assert_every_verb_finds_its_bytes(expand(events, placed, sizes, which), placed, sizes, which)
    plan = compile_plan(events, placed, sizes, budgets=budgets, which=which)
    assert_every_verb_finds_its_bytes(plan.steps, placed, sizes, which)


@given(records(), placements, sizes_of(), passes, budgets_of)
def test_every_event_leaves_one_anchor_in_its_order(events, placed, sizes, which, budgets):
    plan = compile_plan(events, placed, sizes, budgets=budgets, which=which)
    wanted = {
        Moment.ENTER: (Verb.USE, Kind.PARAM),
        Moment.EXIT: (Verb.LEAVE, Kind.PARAM),
        Moment.GRAD: (Verb.USE, Kind.GRAD),
        Moment.DONE: (Verb.LEAVE, Kind.GRAD),
    }
    anchors = [step for step in plan.steps if step.verb in ANCHORS]
    assert anchors == [Step(*wanted[moment], unit) for moment, unit in events]


@given(records(), placements, sizes_of(), passes, budgets_of)
def test_a_plan_is_deterministic(events, placed, sizes, which, budgets):
    plan = compile_plan(events, placed, sizes, budgets=budgets, which=which)
    again = compile_plan(list(events), dict(reversed(placed.items())), dict(sizes), budgets=replace(budgets), which=which)
    assert again == plan
    assert again.digest == plan.digest


@given(records(), placements, sizes_of(), passes, budgets_of, st.sampled_from(FETCHES))
def test_hoisting_never_breaks_an_order_that_matters(events, placed, sizes, which, budgets, verb):
    before = expand(events, placed, sizes, which)
    after = hoist(before, verb, placed, sizes, budgets)
    assert Counter(after) == Counter(before), "nothing is lost or made up"
    for unit in UNITS:
        assert [step for step in after if step.unit == unit] == [step for step in before if step.unit == unit]
    assert [step for step in after if step.verb is verb] == [step for step in before if step.verb is verb], "a lane"
    assert [step for step in after if step.verb is not verb] == [step for step in before if step.verb is not verb]


@given(records(), placements, sizes_of(), passes, budgets_of, st.sampled_from(FETCHES))
def test_hoisting_never_exceeds_a_budget_where_it_was_not_exceeded_before(events, placed, sizes, which, budgets, verb):
    before = expand(events, placed, sizes, which)
    after = hoist(before, verb, placed, sizes, budgets)
    states = budgets.read_state_bytes
    limits = {
        Verb.READ: {
            Buffer.READ_WEIGHTS: budgets.read_weight_bytes,
            Buffer.READ_STATES: states,
            Buffer.READ_GRADS: states,
        },
        Verb.LOAD: {Buffer.LOADED_GRADS: budgets.load_bytes},
        Verb.GATHER: {Buffer.AHEAD: budgets.ahead_bytes, Buffer.GATHERED: budgets.live_bytes},
    }[verb]
    old, new = simulate(before, placed, sizes).buffers, simulate(after, placed, sizes).buffers
    for buffer, limit in limits.items():
        assert new[buffer] <= max(limit, old[buffer])
    for buffer in set(Buffer) - set(limits):
        assert new[buffer] <= old[buffer], "what others hold does not grow"


@given(records(), placements, sizes_of(), passes, budgets_of)
def test_keeping_drops_only_releases_and_what_undoes_them_within_its_budgets(events, placed, sizes, which, budgets):
    before = expand(events, placed, sizes, which)
    after = keep(before, placed, sizes, budgets)
    dropped = Counter(before) - Counter(after)
    assert not Counter(after) - Counter(before)
    assert {(step.verb, step.kind) for step in dropped} <= {(verb, Kind.PARAM) for verb in (Verb.RELEASE, *FETCHES)}
    assert sum(dropped[step] for step in dropped if step.verb is Verb.RELEASE) == sum(
        dropped[step] for step in dropped if step.verb is Verb.GATHER
    )
    assert_every_verb_finds_its_bytes(after, placed, sizes, which)
    old, new = (simulate(steps, placed, sizes).buffers[Buffer.GATHERED] for steps in (before, after))
    assert new <= max(budgets.live_bytes, old)


@pytest.mark.parametrize(("reuse", "kept"), [(99, 0), (100, 1), (200, 2)])
def test_a_unit_is_kept_just_when_no_more_than_the_reuse_distance_lies_between(reuse, kept):
    units = ("b", "c", "d")
    placed = dict.fromkeys(units, place_stage(3))
    steps = expand(one_pass(units), placed, EVEN, Pass())
    after = keep(steps, placed, EVEN, Budgets(live_bytes=10**6, reuse_bytes=reuse))
    # The last unit is kept in any case: nothing is gathered between. Then c lies behind one gather, b behind two.
    assert Counter(step.verb for step in after)[Verb.GATHER] == 6 - 1 - kept


def test_keeping_respects_the_live_budget():
    units = ("b", "c", "d")
    placed = dict.fromkeys(units, place_stage(3))
    steps = expand(one_pass(units), placed, EVEN, Pass())
    for live, gathers in ((100, 5), (199, 5), (200, 4), (300, 3)):
        after = keep(steps, placed, EVEN, Budgets(live_bytes=live, reuse_bytes=10**6))
        assert Counter(step.verb for step in after)[Verb.GATHER] == gathers


def test_nothing_is_kept_over_its_own_update():
    events = [Event(moment, "b") for moment in (Moment.ENTER, Moment.EXIT, Moment.GRAD, Moment.DONE, Moment.ENTER, Moment.EXIT)]
    for stage, gathers in ((2, 2), (3, 2)):
        placed = {"b": place_stage(stage)}
        plan = compile_plan(events, placed, EVEN, budgets=Budgets(10**6, 10**6, 0, 0, 0, 10**6), which=Pass(early=True))
        verbs = [step.verb for step in plan.steps]
        assert verbs.count(Verb.GATHER) == gathers
        assert verbs.index(Verb.UPDATE) < len(verbs) - 1 - verbs[::-1].index(Verb.GATHER)


def words(steps) -> str:
    return " ".join(f"{step.verb}.{step.kind[0]}.{step.unit}" for step in steps)


# Two blocks, no prefetching: what each placement does, step by step.
GOLDEN = {
    "stage0": (
        "use.p.b leave.p.b use.p.c leave.p.c collect.g.c use.g.c reduce.g.c settle.g.c leave.g.c collect.g.b use.g.b "
        "reduce.g.b settle.g.b leave.g.b norm.g.* update.o.b update.o.c"
    ),
    "stage1": (
        "gather.p.b use.p.b leave.p.b gather.p.c use.p.c leave.p.c collect.g.c use.g.c reduce.g.c settle.g.c leave.g.c "
        "collect.g.b use.g.b reduce.g.b settle.g.b leave.g.b norm.g.* update.o.b update.o.c"
    ),
    "stage3": (
        "gather.p.b use.p.b release.p.b leave.p.b gather.p.c use.p.c leave.p.c collect.g.c use.g.c release.p.c "
        "reduce.g.c settle.g.c leave.g.c gather.p.b collect.g.b use.g.b release.p.b reduce.g.b settle.g.b leave.g.b "
        "norm.g.* update.o.b update.o.c"
    ),
    "stage1-offload": (
        "gather.p.b use.p.b leave.p.b gather.p.c use.p.c leave.p.c collect.g.c use.g.c reduce.g.c settle.g.c store.g.c "
        "leave.g.c collect.g.b use.g.b reduce.g.b settle.g.b store.g.b leave.g.b norm.g.* update.o.b load.p.b "
        "update.o.c load.p.c"
    ),
    "stage2-offload": (
        "gather.p.b use.p.b leave.p.b gather.p.c use.p.c leave.p.c collect.g.c use.g.c reduce.g.c settle.g.c store.g.c "
        "leave.g.c collect.g.b use.g.b reduce.g.b settle.g.b store.g.b leave.g.b norm.g.* update.o.b load.p.b "
        "update.o.c load.p.c"
    ),
    "infinity-host": (
        "gather.p.b use.p.b release.p.b leave.p.b gather.p.c use.p.c leave.p.c collect.g.c use.g.c "
        "release.p.c reduce.g.c settle.g.c store.g.c leave.g.c gather.p.b collect.g.b use.g.b release.p.b "
        "reduce.g.b settle.g.b store.g.b leave.g.b norm.g.* update.o.b update.o.c"
    ),
    "infinity-disk-all": (
        "read.p.b gather.p.b use.p.b release.p.b leave.p.b read.p.c gather.p.c use.p.c leave.p.c "
        "collect.g.c use.g.c release.p.c reduce.g.c settle.g.c store.g.c write.g.c leave.g.c read.p.b "
        "gather.p.b collect.g.b use.g.b release.p.b reduce.g.b settle.g.b store.g.b write.g.b leave.g.b norm.g.* "
        "read.g.b read.o.b update.o.b write.o.b write.p.b read.g.c read.o.c update.o.c write.o.c write.p.c"
    ),
}


@pytest.mark.parametrize("name", GOLDEN)
def test_the_steps_of_a_placement_are_these(name):
    placed = dict.fromkeys(("b", "c"), PLACEMENTS[name])
    assert words(compile_plan(one_pass(("b", "c")), placed, EVEN, budgets=Budgets(), which=Pass()).steps) == GOLDEN[name]


def test_an_update_on_the_device_brings_its_gradient_back_and_its_weights_home():
    placed = {"b": Placement(Place(True, Tier.DISK), Place(True, Tier.DISK), Place(True, Tier.DEVICE))}
    steps = words(expand(one_pass(("b",)), placed, EVEN, Pass()))
    assert steps.endswith("norm.g.* read.g.b load.g.b update.o.b store.p.b write.p.b")


def test_a_budget_of_two_blocks_yields_double_buffering():
    units = ("b", "c", "d", "e")
    for stage in (1, 2, 3):
        placed = dict.fromkeys(units, place_stage(stage))
        plan = compile_plan(one_pass(units), placed, EVEN, budgets=Budgets(ahead_bytes=200, live_bytes=200), which=Pass())
        shown = [f"{step.verb} {step.unit}" for step in plan.steps if step.verb in (Verb.GATHER, Verb.USE)]
        order = ["gather b", "gather c", "use b", "gather d", "use c", "gather e", "use d"]
        assert shown[:7] == order, "the next unit is gathered before this one is used, at every stage"
        if stage == 3:
            assert simulate(plan.steps, placed, EVEN).buffers[Buffer.GATHERED] == 200


def test_a_reduce_is_waited_for_before_the_next_one_and_its_sum_before_it_is_needed():
    placed = dict.fromkeys(("b", "c"), place_stage(2))
    budgets = Budgets(overlap_reduce=True)
    steps = compile_plan(one_pass(("b", "c")), placed, EVEN, budgets=budgets, which=Pass()).steps
    shown = words(step for step in steps if step.kind is Kind.GRAD)
    assert shown == (
        "collect.g.c use.g.c reduce.g.c leave.g.c collect.g.b use.g.b settle.g.c reduce.g.b leave.g.b settle.g.b norm.g.*"
    )
    placed = dict.fromkeys(("b", "c"), PLACEMENTS["stage2-offload"])
    steps = compile_plan(one_pass(("b", "c")), placed, EVEN, budgets=budgets, which=Pass()).steps
    shown = words(step for step in steps if step.kind is Kind.GRAD)
    assert "reduce.g.c leave.g.c collect.g.b use.g.b settle.g.c store.g.c reduce.g.b leave.g.b settle.g.b store.g.b norm" in shown
    steps = compile_plan(one_pass(("b", "c")), placed, EVEN, budgets=budgets, which=Pass(early=True)).steps
    assert "use.g.b settle.g.c store.g.c update.o.c load.p.c reduce.g.b" in words(steps), "an early update follows its sum"
    again = [Event(Moment.GRAD, "c"), Event(Moment.DONE, "c")]
    steps = compile_plan([*one_pass(("b", "c")), *again], placed, EVEN, budgets=budgets, which=Pass()).steps
    assert "settle.g.b store.g.b" in words(steps).partition("collect.g.c")[2]


def test_states_are_read_one_unit_ahead_of_their_update():
    units = ("b", "c", "d")
    placed = dict.fromkeys(units, PLACEMENTS["infinity-disk-all"])
    budgets = Budgets(read_state_bytes=600)
    steps = compile_plan(one_pass(units), placed, EVEN, budgets=budgets, which=Pass()).steps
    shown = [f"{step.verb} {step.unit}" for step in steps if step.kind is Kind.OPTIM]
    assert shown == ["read b", "read c", "update b", "write b", "read d", "update c", "write c", "update d", "write d"]
    assert steps.index(Step(Verb.READ, Kind.OPTIM, "c")) < steps.index(Step(Verb.NORM, Kind.GRAD, EVERY_UNIT))


def test_no_budget_fetches_only_what_is_needed():
    placed = dict.fromkeys(UNITS, place_stage(3))
    plan = compile_plan(one_pass(UNITS), placed, EVEN, budgets=Budgets(), which=Pass())
    assert simulate(plan.steps, placed, EVEN).buffers[Buffer.GATHERED] == 100
    for at, step in enumerate(plan.steps):
        if step.verb is Verb.GATHER:
            following = [later for later in plan.steps[at + 1 :] if later.verb is not Verb.COLLECT]
            assert following[0].verb is Verb.USE
            assert following[0].unit == step.unit


@pytest.mark.parametrize(
    ("stage", "gathers", "reduces"),
    [(0, 0, 5), (1, 5, 5), (2, 5, 5), (3, 9, 5)],  # stage 3 keeps the last unit between forward and backward
)
def test_collectives_of_a_step_are_the_papers(stage, gathers, reduces):
    placed = dict.fromkeys(UNITS, place_stage(stage))
    verbs = Counter(step.verb for step in compile_plan(one_pass(UNITS), placed, EVEN, budgets=Budgets(), which=Pass()).steps)
    assert (verbs[Verb.GATHER], verbs[Verb.REDUCE], verbs[Verb.UPDATE], verbs[Verb.NORM]) == (gathers, reduces, 5, 1)


def test_earlier_micro_batches_reduce_only_split_gradients_and_later_ones_find_whole_weights_fresh():
    for stage, reduces in ((0, 0), (1, 0), (2, 5), (3, 5)):
        placed = dict.fromkeys(UNITS, place_stage(stage))
        early = Counter(step.verb for step in expand(one_pass(UNITS), placed, EVEN, Pass(last=False)))
        assert (early[Verb.REDUCE], early[Verb.UPDATE], early[Verb.NORM]) == (reduces, 0, 0)
        later = Counter(step.verb for step in expand(one_pass(UNITS), placed, EVEN, Pass(first=False)))
        assert later[Verb.GATHER] == (10 if stage == 3 else 0)
        assert later[Verb.REDUCE] == 5


def test_gradients_on_disk_are_read_before_more_is_added():
    placed = {"b": PLACEMENTS["infinity-disk-all"]}
    later = [step for step in expand(one_pass(("b",)), placed, EVEN, Pass(first=False, last=False)) if step.kind is Kind.GRAD]
    assert words(later) == "collect.g.b use.g.b read.g.b reduce.g.b settle.g.b store.g.b write.g.b leave.g.b"


def test_a_recompute_releases_nothing():
    events = [Event(m, "b") for m in (Moment.ENTER, Moment.EXIT, Moment.GRAD, Moment.ENTER, Moment.EXIT, Moment.DONE)]
    steps = words(expand(events, {"b": place_stage(3)}, EVEN, Pass(last=False)))
    assert steps == (
        "gather.p.b use.p.b release.p.b leave.p.b gather.p.b collect.g.b use.g.b use.p.b leave.p.b "
        "release.p.b reduce.g.b settle.g.b leave.g.b"
    )


def test_a_unit_within_itself_is_released_once_at_its_end():
    events = [Event(m, "b") for m in (Moment.ENTER, Moment.ENTER, Moment.EXIT, Moment.EXIT)]
    assert (
        words(expand(events, {"b": place_stage(3)}, EVEN, Pass())) == "gather.p.b use.p.b use.p.b leave.p.b release.p.b leave.p.b"
    )


def test_a_late_gradient_reduces_split_gradients_again_and_whole_ones_once():
    events = [Event(m, "b") for m in (Moment.ENTER, Moment.EXIT, Moment.GRAD, Moment.DONE, Moment.DONE)]
    for stage, reduces in ((0, 1), (1, 1), (2, 2), (3, 2)):
        for early in (False, True):
            verbs = Counter(step.verb for step in expand(events, {"b": place_stage(stage)}, EVEN, Pass(early=early)))
            assert (verbs[Verb.REDUCE], verbs[Verb.UPDATE]) == (reduces, 1)


def test_a_frozen_unit_is_gathered_and_never_reduced():
    sizes = {"b": replace(EVEN["b"], trained=False)}
    verbs = Counter(step.verb for step in expand(one_pass(("b",)), {"b": place_stage(3)}, sizes, Pass()))
    assert verbs == {Verb.GATHER: 2, Verb.USE: 2, Verb.LEAVE: 2, Verb.RELEASE: 2}


def test_a_forward_without_a_backward_updates_nothing():
    forward = one_pass(UNITS)[: 2 * len(UNITS)]
    verbs = {step.verb for step in expand(forward, dict.fromkeys(UNITS, place_stage(3)), EVEN, Pass())}
    assert verbs == {Verb.GATHER, Verb.USE, Verb.LEAVE, Verb.RELEASE}


def test_updates_come_in_the_order_of_the_next_forward_unless_they_are_early():
    placed = dict.fromkeys(UNITS, place_stage(2))
    late, early = (
        [step.unit for step in expand(one_pass(UNITS), placed, EVEN, Pass(early=early)) if step.verb is Verb.UPDATE]
        for early in (False, True)
    )
    assert late == list(UNITS)
    assert early == list(reversed(UNITS))


# Five units of 100 bytes on two ranks, one fetched at a time. Stage 2: the last gradient flat beside five owned halves.
# Stage 3: a gathered unit and its gradient flat beside four owned halves, for the release comes before the reduce. On the
# host: the owned halves leave at once, so a unit and its gradients are all. On disk: states, gradient and new weights of
# one unit pass through the host.
@pytest.mark.parametrize(
    ("name", "device", "host"),
    [
        ("stage0", 500, 0),
        ("stage2", 350, 0),
        ("stage3", 400, 0),
        ("infinity-host", 200, 250),
        ("infinity-disk-all", 200, 50),  # states pass in tiles, in rooms of a constant size
    ],
)
def test_simulated_peaks_follow_by_hand(name, device, host):
    placed = dict.fromkeys(UNITS, PLACEMENTS[name])
    plan = compile_plan(one_pass(UNITS), placed, EVEN, budgets=Budgets(), which=Pass())
    peaks = simulate(plan.steps, placed, EVEN)
    assert (peaks.tiers[Tier.DEVICE], peaks.tiers[Tier.HOST]) == (device, host)


def test_scratch_is_held_for_one_reduce_and_gradients_over_all_passes():
    sizes = dict.fromkeys(UNITS, replace(EVEN["b"], reduce_scratch=70))
    placed = dict.fromkeys(UNITS, place_stage(3))
    steps = [step for last in (False, True) for step in expand(one_pass(UNITS), placed, sizes, Pass(first=not last, last=last))]
    peaks = simulate(steps, placed, sizes)
    assert peaks.buffers[Buffer.SCRATCH] == 70
    assert peaks.tiers[Tier.DEVICE] == 100 + 100 + 5 * 50, "the second pass finds every owned half there"
    assert peaks.passing[Tier.DEVICE] == 200


def test_a_walk_ends_with_nothing_held():
    for placement in EVERY:
        placed = dict.fromkeys(UNITS, placement)
        steps = expand(one_pass(UNITS), placed, EVEN, Pass())
        assert simulate([*steps, *steps], placed, EVEN) == simulate(steps, placed, EVEN)


steps_of = st.lists(
    st.builds(Step, st.sampled_from(Verb), st.sampled_from(Kind), st.text(max_size=6) | st.sampled_from(['a","b', "a", "\n"])),
    max_size=12,
).map(tuple)


@given(steps_of, steps_of)
def test_the_digest_changes_when_and_only_when_the_plan_does(one, other):
    assert (Plan(one).digest == Plan(other).digest) == (one == other)


@given(steps_of.filter(bool), st.data())
def test_the_digest_sees_every_single_change(plan, data):
    at = data.draw(st.integers(0, len(plan) - 1))
    swapped = list(plan)
    swapped[at] = swapped[at]._replace(unit=swapped[at].unit + "x")
    assert Plan(tuple(swapped)).digest != Plan(plan).digest
    assert Plan(plan[:at] + plan[at + 1 :]).digest != Plan(plan).digest


def test_a_record_of_an_unknown_unit_is_refused():
    with pytest.raises(PlanError, match='names a unit "ghost"'):
        expand([Event(Moment.ENTER, "ghost")], {}, {}, Pass())


def test_the_pure_core_imports_no_torch():
    """Nor do commands that may have to tell of a mistake first."""
    names = ("plan", "units", "advice", "papers", "config", "seats", "cli.train", "cli.launch")
    code = f"import sys, {', '.join(f'naught.{name}' for name in names)}; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
