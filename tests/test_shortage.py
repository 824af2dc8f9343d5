"""Out of memory: the exception says where, what was held, what was planned and what would help. Plans say what will be held."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from menagerie import DEVICE, Plain
from training import config_of, engine_of, start, take_steps

from naught.devices import Room, is_out_of_memory
from naught.engine import Engine
from naught.shortage import Change, Held, Setup, Whole, changes_of, note_of, step_bytes

pytestmark = pytest.mark.usefixtures("one_thread")

MB = 10**6

# --- what is planned --------------------------------------------------------------------------------------------------


def of_the_menagerie(stage: int, name: str, accumulation: int, more: dict[str, Any]) -> tuple[dict[str, int], dict[str, int]]:
    return planned_and_held(start(stage, name, accumulation=accumulation, more=more), accumulation)


def planned_and_held(engine: Engine, accumulation: int) -> tuple[dict[str, int], dict[str, int]]:
    take_steps(engine, 2 * accumulation)
    engine.meter.peak.clear()
    take_steps(engine, accumulation, first=2 * accumulation)
    report, planned = engine.report(), engine.planned()
    held = {name: max(report["peak"].get(name, 0), report["live"].get(name, 0)) for name in {*planned, *report["peak"]}}
    engine.destroy()
    return planned, held


@pytest.mark.parametrize("more", [{}, {"naught": {"reduce_every_micro_batch": True}}, {"bf16": {"enabled": True}}], ids=str)
@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("stage", range(4))
def test_what_is_planned_is_what_is_held_to_the_byte(two, stage, accumulation, more):
    for planned, held in two.run(of_the_menagerie, stage, "plain", accumulation, more):
        assert planned == held
        assert planned["weights"] > 0
        assert planned["states"] > 0


@pytest.mark.parametrize("name", ["tied", "frozen", "lora", "checkpoint_reentrant", "block_used_twice"])
def test_awkward_models_hold_what_is_planned_too(two, name):
    for stage in (1, 3):
        for planned, held in two.run(of_the_menagerie, stage, name, 2, {}):
            assert planned == held


class Alternating(Plain):
    """Its micro-batches use different blocks: what they leave adds up."""

    calls = 0

    def body(self, x):
        self.calls += 1
        return self.blocks[1 + self.calls % 2](self.blocks[0](x))


def alternating(stage: int) -> tuple[dict[str, int], dict[str, int]]:
    return planned_and_held(engine_of(Alternating(), config_of(stage, accumulation=2)), 2)


def test_what_the_passes_of_a_step_leave_is_added_up(two):
    for stage in (1, 2):
        for planned, held in two.run(alternating, stage):
            assert planned == held


def test_before_the_first_step_states_are_planned_and_passes_are_not():
    engine = start(3)
    before = engine.planned()
    take_steps(engine, 1)
    after = engine.planned()
    assert before["states"] == after["states"] == engine.report()["live"]["states"]
    assert before["gradient flats"] == 0 < after["gradient flats"]  # a rank alone gathers nothing


# --- the arithmetic ---------------------------------------------------------------------------------------------------

UNITS = [Whole(100, 100, 200), Whole(400, 400, 800), Whole(400, 400, 800)]


@pytest.mark.parametrize(
    ("stage", "world", "nbytes"),
    [
        (0, 4, 900 + 900 + 1800),
        (1, 4, 900 + 900 + 450),
        (2, 4, 900 + 225 + 450 + 800),
        (3, 4, 225 + 225 + 450 + 800 + 800),
        *((stage, 1, 3600) for stage in range(4)),
    ],
)
def test_a_step_holds_its_share_and_two_units_of_what_is_split(stage, world, nbytes):
    assert step_bytes(UNITS, stage, world) == nbytes


def setup(**more: Any) -> Setup:
    return Setup(**{"units": UNITS, "stage": 0, "world": 4, "micro": 8, "wide": True, "recomputes": False, **more})


def kinds(changes: list[Change]) -> list[tuple[str, int]]:
    return [(change.what.partition(" (")[0], change.saves) for change in changes]


def test_changes_are_ranked_by_what_they_save():
    assert kinds(changes_of(setup(micro=3), 1000)) == [
        ("stage 1 instead of 0", 3600 - 2250),  # of stages 2 and 3 two large units are a large part
        ("a micro-batch of 1 instead of 3", 667),
        # Half of weights, gradients and activations go, and masters come.
        ("bf16 instead of fp32", 450 + 450 + 500 - 900),
    ]
    assert kinds(changes_of(setup(micro=3), 4000))[0] == ("a micro-batch of 1 instead of 3", 2667)


@pytest.mark.parametrize(
    ("more", "activations", "left"),
    [
        ({"stage": 3, "micro": 1, "wide": False}, 1000, [("torch.utils.checkpoint around each block", 500)]),
        ({"stage": 3, "micro": 3, "wide": False, "recomputes": True}, 900, [("a micro-batch of 1 instead of 3", 600)]),
        ({"world": 1, "stage": 0, "micro": 1, "recomputes": True}, 0, []),
        ({"stage": 3, "world": 2, "recomputes": True}, 0, [("bf16 instead of fp32", 225 + 225 + 400 + 400 - 450)]),
        ({"units": UNITS[1:] * 9, "wide": False, "recomputes": True, "micro": 1}, 0, [("stage 3 instead of 0", 28800 - 8800)]),
        ({"units": UNITS[:2], "stage": 3, "micro": 1, "wide": False}, 1000, []),
    ],
)
def test_only_changes_are_named_that_can_be_made_and_help(more, activations, left):
    assert kinds(changes_of(setup(**more), activations)) == left


def test_the_note_has_the_largest_first_and_nothing_that_is_not_there():
    held = Held({"weights": 2 * MB, "states": 4 * MB, "masters": 0}, 10 * MB, Room(80 * MB, 5 * MB, kept=3 * MB))
    assert note_of("backward of step 57", held, {"states": 4 * MB}, [Change("this", 5 * MB), Change("that", MB)]) == (
        "naught: out of memory in the backward of step 57\n"
        "  held: activations and other 10.0 MB, states 4.00 MB, weights 2.00 MB\n"
        "  memory: 5.00 MB of 80.0 MB are free; torch keeps 3.00 MB more, in pieces that may be too small; others and the driver "
        "have 56.0 MB\n"
        "  peaks of the plan: states 4.00 MB\n"
        "  what would help: this saves about 5.00 MB; that saves about 1.00 MB"
    )
    assert note_of("update of step 1", Held({}, None, Room(80 * MB, 5 * MB, limit=9 * MB)), None, []) == (
        "naught: out of memory in the update of step 1\n"
        "  held: nothing\n"
        "  memory: 5.00 MB of 80.0 MB are free; this process may have no more than 9.00 MB of addresses (ulimit -v)\n"
        "  peaks of the plan: there is none yet\n"
        "  what would help: more memory, or a smaller model"
    )


# --- in earnest -------------------------------------------------------------------------------------------------------

SCRIPT = """
import resource, sys
from pathlib import Path
import torch
from torch import nn
from training import config_of, engine_of

torch.set_num_threads(1)

class Greedy(nn.Module):
    fault = ""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(2000, 2000, bias=False) for _ in range(2))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        self.take("forward")
        x.register_hook(lambda _: self.take("backward"))
        return x.square().mean()

    def take(self, where):
        if self.fault == where:
            kept = torch.empty(20_000_000, dtype=torch.uint8)
            torch.empty(10**9)

def limit(nbytes):
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + nbytes if nbytes else -1, -1))

def fill():
    limit(1_000_000)
    try:
        while True:
            hog.append(torch.empty(4_000_000, dtype=torch.uint8))
    except RuntimeError:
        del hog[-2:]  # less than a state needs, and enough to talk about it

def made():
    torch.manual_seed(0)
    return engine_of(Greedy(), config_of(3, accumulation=2, more={"train_micro_batch_size_per_gpu": 8}))

def micro(engine):
    loss = engine(torch.ones(8, 2000))
    engine.backward(loss)
    if engine.module.fault == "step":
        fill()
    engine.step()
    return loss.item()

hog = []
engine, fault = made(), sys.argv[1]
losses = [micro(engine) for _ in range(0 if fault == "step" else 4)]
micro(engine)  # it goes with the step that will be given up
engine.module.fault = fault
if fault != "step":
    limit(1_000_000_000)
try:
    micro(engine)
except RuntimeError as error:
    assert type(error) is RuntimeError and "DefaultCPUAllocator" in str(error)
    print(*error.__notes__, sep="\\n")
limit(0)
hog.clear()
engine.module.fault = ""
if fault != "step":
    losses += [micro(engine) for _ in range(2)]
    other = made()
    assert losses == [micro(other) for _ in range(6)]
"""


def note_after(fault: str) -> list[str]:
    here = Path(__file__).parent
    paths = f"{here}:{here.parent}:{os.environ.get('PYTHONPATH', '')}"
    env = {**os.environ, "PYTHONPATH": paths, "DS_ACCELERATOR": "cpu", "NAUGHT_DEVICE": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, fault], env=env, capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines()


@pytest.mark.skipif(sys.platform != "linux", reason="another system has other limits")
@pytest.mark.parametrize("fault", ["forward", "backward"])
def test_a_pass_that_finds_no_memory_says_so_and_the_engine_goes_on_as_if_it_had_not_been(fault):
    where, held, memory, plan, helps = note_after(fault)
    assert where == f"naught: out of memory in the {fault} of step 3 (micro-batch 2 of 2)"
    assert re.fullmatch(
        r"  held: states 64\.0 MB, (gathered weights 32\.0 MB, )?(owned gradients 32\.0 MB, )?weights 32\.0 MB.*"
        r"activations and other 2\d\.\d MB.*",
        held,
    ), held
    assert "ulimit -v" in memory
    assert plan.startswith("  peaks of the plan: states 64.0 MB, ")
    assert "a micro-batch of 4 instead of 8" in helps
    assert "bf16 instead of fp32" in helps
    assert "stage" not in helps


def test_an_update_that_finds_no_memory_is_not_helped_by_fewer_activations():
    where, _, _, plan, helps = note_after("step")
    assert where == "naught: out of memory in the update of step 1 (micro-batch 2 of 2)"
    assert plan.startswith("  peaks of the plan: states 64.0 MB, ")
    assert "micro-batch" not in helps
    assert "checkpoint" not in helps


@pytest.mark.parametrize(
    ("error", "is_one"),
    [
        (MemoryError(), True),
        (torch.OutOfMemoryError("CUDA out of memory"), True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes"), True),
        (RuntimeError("shapes do not match"), False),
        (ValueError("bad batch"), False),
    ],
)
def test_only_a_shortage_is_one(error, is_one):
    assert is_out_of_memory(error) == is_one


def test_other_errors_get_no_note():
    engine = start(0)
    with pytest.raises(TypeError) as raised:
        engine("no tokens")
    assert not getattr(raised.value, "__notes__", [])


@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a GPU")
def test_a_gpu_that_is_full_says_who_has_its_memory():
    engine = start(3)
    take_steps(engine, 2)
    whole = torch.cuda.mem_get_info()[1]

    def greedy(*_: object) -> None:
        torch.empty(2 * whole, dtype=torch.uint8, device=DEVICE)

    handle = engine.module.blocks[1].register_forward_hook(greedy)
    with pytest.raises(torch.OutOfMemoryError) as raised:
        take_steps(engine, 1)
    handle.remove()
    (note,) = raised.value.__notes__
    assert note.startswith("naught: out of memory in the forward of step 3\n  held: ")
    assert re.search(r"GB are free; torch keeps .* more, .*; others and the driver have [0-9.]+ [MG]B\n", note)
    assert take_steps(engine, 1)
