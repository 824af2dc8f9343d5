"""What a step sends and holds: the papers' bytes, the plan's peaks, one order on all ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from training import start, take_steps

from naught.holding import Buffer, simulate
from naught.steps import Pass

pytestmark = pytest.mark.usefixtures("one_thread")


def volume(stage: int) -> tuple[int, int, int, int, int]:
    engine = start(stage)
    take_steps(engine, 2)
    ledger = engine.schedule.group.ledger
    before = {name: ledger.total(name) for name in ("all-gather", "reduce-scatter")}
    take_steps(engine, 1, first=2)
    whole = sum(segment.weights.flat.nbytes for unit in engine.schedule.units.values() for segment in unit.segments)
    last = list(engine.schedule.units.values())[-1].sizes().weights
    root = engine.schedule.units[""].sizes().weights
    moved = {name: ledger.total(name) - before[name] for name in before}
    engine.destroy()
    return moved["all-gather"], moved["reduce-scatter"], whole, last, root


@pytest.mark.parametrize(("stage", "gathers"), [(0, 1), (1, 1), (2, 1), (3, 2)])
def test_a_step_sends_what_the_papers_say_with_the_exact_factor(two, stage, gathers):
    for gathered, reduced, whole, last, root in two.run(volume, stage):
        assert reduced == whole // 2
        kept = last + root if stage == 3 else 0  # the plan keeps the last unit and the root between forward and backward
        assert gathered == (gathers * whole - kept) // 2


def by_phase(stage: int) -> tuple[dict[str, int], dict[str, dict[str, int]], int, int, Counter[tuple[str, str]]]:
    engine = start(stage, overlap_comm=False)  # what is fetched ahead would count for the phase before
    take_steps(engine, 2)
    ledger = engine.schedule.group.ledger
    ledger.sent.clear()
    take_steps(engine, 1, first=2)
    sent = dict.fromkeys(("forward", "backward", "step"), 0)
    collectives: Counter[tuple[str, str]] = Counter()
    for (collective, _, phase), nbytes in ledger.sent.items():
        sent[phase] += nbytes
        collectives[phase, collective] += nbytes
    sizes = [unit.sizes().weights for unit in engine.schedule.units.values()]
    return sent, engine.report()["after"], sum(sizes), sizes[0] + sizes[-1], collectives


# What the words of the page's table mean: on how many ranks weights are split, and which collectives there are.
RANKS_OF_WEIGHTS = {
    **{(stage, "whole"): 1 for stage in (0, 1, 2)},
    (0, "whole, updated by every rank"): 1,
    (1, "each rank updates its slice, then whole"): 1,
    (2, "each rank updates its slice, then whole"): 1,
    (3, "1/N, a unit whole at a time"): 2,
    (3, "each rank updates its slice"): 2,
}
COLLECTIVES = {
    "-": set(),
    "all-gather of parameters": {"all-gather"},
    "reduce-scatter of gradients": {"reduce-scatter"},
    "reduce-scatter and all-gather of gradients": {"all-gather", "reduce-scatter"},
    "all-gather of parameters, reduce-scatter of gradients": {"all-gather", "reduce-scatter"},
}


@pytest.mark.parametrize("stage", range(4))
def test_the_table_of_the_how_it_works_page_does_not_lie(two, stage):
    page = (Path(__file__).parent.parent / "docs" / "how-it-works.md").read_text(encoding="utf-8")
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines() if line.startswith(f"| {stage} |")
    ]
    assert [row[1] for row in rows] == ["forward", "backward", "step"]
    for sent, after, whole, kept, collectives in two.run(by_phase, stage):
        for _, phase, params, grads, states, moves, sends in rows:
            psi = int(sends.split()[0]) * whole - (kept if stage == 3 and phase == "backward" else 0)
            assert sent[phase] == psi // 2, phase
            cells = after[phase]
            assert cells["weights"] == whole // RANKS_OF_WEIGHTS[stage, params]
            assert cells["states"] == 2 * whole // {"whole": 1, "1/N": 2}[states]
            assert {name for name in ("all-gather", "reduce-scatter") if collectives[phase, name]} == COLLECTIVES[moves]
            found = sum(cells.get(buffer, 0) for buffer in (Buffer.WHOLE_GRADS, Buffer.OWNED_GRADS, Buffer.GRAD_FLATS))
            assert found == {"whole": whole, "-": 0, "let go": 0, "1/N, a unit whole at a time": whole // 2}[grads]


def held(stage: int) -> tuple[dict, dict, int]:
    engine = start(stage)
    take_steps(engine, 2)
    engine.meter.peak.clear()
    take_steps(engine, 1, first=2)
    report = engine.report()
    units = engine.schedule.units
    whole = sum(segment.weights.flat.nbytes for unit in units.values() for segment in unit.segments)
    plan = engine.schedule.programs[True, Pass()]
    sizes = {name: unit.sizes() for name, unit in units.items()}
    peaks = simulate(plan.steps, {name: unit.placement for name, unit in units.items()}, sizes)
    planned = {buffer.value: nbytes for buffer, nbytes in peaks.buffers.items()}
    measured = {name: report["peak"].get(name, 0) for name in planned}
    engine.destroy()
    return report["after"], {name: (planned[name], measured[name]) for name in planned}, whole


@pytest.mark.parametrize("stage", range(4))
def test_bytes_after_each_phase_are_whole_or_split_as_the_stage_says(two, stage):
    splits = [(0, 0, 0), (0, 0, 1), (0, 1, 1), (1, 1, 1)][stage]
    for after, _, whole in two.run(held, stage):
        weights, grads, states = (
            size // (2 if split else 1) for size, split in zip((whole, whole, 2 * whole), splits, strict=True)
        )
        for phase, gradients in (("forward", 0), ("backward", grads), ("step", 0)):
            cells = after[phase]
            found = cells.get(Buffer.WHOLE_GRADS, 0) + cells.get(Buffer.OWNED_GRADS, 0) + cells.get(Buffer.GRAD_FLATS, 0)
            assert (cells["weights"], found, cells["states"]) == (weights, gradients, states)


@pytest.mark.parametrize("stage", range(4))
def test_planned_peaks_are_the_measured_ones_to_the_byte(two, stage):
    for _, peaks, _ in two.run(held, stage):
        for name in (Buffer.GATHERED, Buffer.GRAD_FLATS, Buffer.WHOLE_GRADS, Buffer.OWNED_GRADS, Buffer.SCRATCH):
            planned, measured = peaks[name]
            assert planned == measured, name


def order_of(stage: int, name: str) -> list[tuple[str, str]]:
    engine = start(stage, name)
    take_steps(engine, 4)
    order = list(engine.watch.ledger.order)
    engine.destroy()
    return order


@pytest.mark.parametrize("name", ["plain", "checkpoint_reentrant", "block_skipped_on_one_rank", "experts_by_rank_and_batch"])
def test_every_rank_issues_the_same_collectives_in_the_same_order(two, name):
    for stage in (1, 3):
        one, other = two.run(order_of, stage, name)
        assert one == other
        assert one


def prefetches() -> list[str]:
    engine = start(3)
    take_steps(engine, 3)
    plan = engine.schedule.programs[True, Pass()]
    engine.destroy()
    return [f"{step.verb} {step.unit}" for step in plan.steps if step.verb in ("gather", "use") and step.unit]


def test_the_next_block_is_gathered_before_this_one_is_used(two):
    order = two.run(prefetches)[0]
    assert order.index("gather blocks.1") < order.index("use blocks.0")
    assert order.index("gather blocks.2") < order.index("use blocks.1")


def leaves_early() -> list[str]:
    engine = start(3, "frozen")
    take_steps(engine, 2)
    steps = engine.schedule.programs[True, Pass()].steps
    return [f"{step.verb} {step.unit}" for step in steps]


def test_a_frozen_layer_that_no_backward_reaches_is_released_after_its_forward(two):
    order = two.run(leaves_early)[0]
    assert order.count("gather tok") == 1
    assert order.index("release tok") < order.index("use blocks.1")


def test_the_kernels_counters_of_an_interface_confirm_the_ledger():
    namespace = ["unshare", "--map-root-user", "--net"]
    try:
        subprocess.run([*namespace, "true"], check=True, capture_output=True, timeout=20)
    except (FileNotFoundError, subprocess.CalledProcessError):
        pytest.skip("no network namespace can be made here")
    script = str(Path(__file__).parent / "in_namespace.py")
    environment = {**os.environ, "NAUGHT_DEVICE": "cpu"}  # bytes are bytes
    done = subprocess.run(
        [*namespace, sys.executable, script], env=environment, check=True, capture_output=True, text=True, timeout=120
    )
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [row["stage"] for row in rows] == [0, 1, 2, 3]
    for row in rows:
        # Two ranks send half of each flat: gradients and weights once, at stage 3 weights twice but for the last unit.
        kept = row["parameters"] // 6 if row["stage"] == 3 else 0
        payload = (3 if row["stage"] == 3 else 2) * row["parameters"] - kept
        assert row["ledger"] == row["steps"] * payload
        # Beyond the payload: headers of packets, acknowledgements, and the few numbers that ranks agree on.
        assert row["ledger"] < row["interface"] < 1.02 * row["ledger"]
