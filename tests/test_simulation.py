"""One rank of many that are not there: what the engine would send and hold is what it sends and holds."""

from __future__ import annotations

import json
import re
import time
from dataclasses import replace

import pytest
import torch
from test_offload import BF16, HOST, ON_GPU, SMALL
from test_parity import SOAK
from torch import nn
from torch.utils.checkpoint import checkpoint
from training import DEVICE, config_of, engine_of, my_rank

from naught.cli import main
from naught.comm import Ledger, World, imagine
from naught.config import load
from naught.errors import ModelError, PlacementError, UsageError
from naught.formulas import recipe
from naught.job import ActivationBytes, Job, transformer_activations
from naught.lanes import Lanes
from naught.limits import limits_here, limits_of_bytes
from naught.live_bytes import LiveBytes, activations_of
from naught.machine import Gpu, Machine, detect
from naught.pacing import Course, Work, pace
from naught.placement import PLACEMENTS, Kind, Tier, place_stage
from naught.precision import precision_of
from naught.rooms import LEAVING
from naught.shapes import Transformer
from naught.simulation import simulate
from naught.sizes import PlacedRun
from naught.steps import Step, UnitBytes, Verb, order_of_updates
from naught.traffic import traffic_of
from naught.trainer.gpt import Gpt
from naught.trainer.simulating import Batch, simulate_gpt

SHAPE = Transformer(layers=3, hidden=32, heads=2, vocab=96, positions=16)
IDS = torch.zeros(2, 16, dtype=torch.long, device="meta")
SPREAD = {"stage3_param_persistence_threshold": 0}
ONE_THREAD = {
    "aio": {"block_size": 4096 * 4, "queue_depth": 1, "intra_op_parallelism": 1}
}  # of several it is luck which have rooms


def cases(folder: str, size: int = 1) -> dict[str, tuple[int, dict, dict]]:
    """Stages with what is to rest elsewhere, and keys beside them."""
    disk = {"device": "nvme", "nvme_path": folder}
    below = disk | {"max_in_cpu": 0}
    everything = {"offload_optimizer": disk, "offload_param": below, **SPREAD}
    gpu, host = {1: ("420kB", "400kB"), 2: ("210kB", "320kB"), 4: ("260kB", "120kB")}[size]
    limits = {"placement": "auto", "gpu_memory": gpu, "activation_memory": 1000, "nvme_path": folder}
    return {
        "stage 0": (0, {}, {}),
        "stage 1": (1, {}, {}),
        "stage 2": (2, {}, {}),
        "stage 3": (3, SPREAD, {}),
        "stage 3, small units whole": (3, {}, {}),
        "updates in the backward": (1, {}, {"naught": {"update_in_backward": True}}),
        "updates in the backward on the host": (2, {"offload_optimizer": HOST}, {"naught": {"update_in_backward": True}}),
        "optimizer on the host": (2, {"offload_optimizer": HOST}, {}),
        "narrow gradients on the host": (2, {"offload_optimizer": HOST}, {"naught": {"wide_gradients": False}}),
        "everything on the host": (3, {"offload_optimizer": HOST, "offload_param": HOST, **SPREAD}, {}),
        "parameters on the host alone": (3, {"offload_param": HOST, **SPREAD}, {}),
        "optimizer on disk": (2, {"offload_optimizer": disk}, ONE_THREAD),
        "parameters on disk alone": (3, {"offload_param": below, **SPREAD}, ONE_THREAD),
        "optimizer on the host, parameters on disk": (
            3,
            {"offload_optimizer": HOST, "offload_param": below, **SPREAD},
            ONE_THREAD,
        ),
        "optimizer on disk, parameters on the host": (
            3,
            {"offload_optimizer": disk, "offload_param": HOST, **SPREAD},
            ONE_THREAD,
        ),
        "everything on disk": (3, everything, ONE_THREAD),
        "gradients on disk too": (3, {**everything, "gradients": "disk"}, ONE_THREAD),
        "checkpoints on the host": (1, {}, {"naught": {"activations": "host"}}),
        "checkpoints on disk": (1, {}, {"naught": {"activations": "disk", "nvme_path": folder}} | ONE_THREAD),
        "activations on the host": (3, SPREAD, {"naught": {"activations": "host", "saved_tensors": "all"}}),
        "a pool": (3, SPREAD, {"naught": limits | {"host_memory": "100MB"}}),
        "a pool with a disk": (3, SPREAD, {"naught": limits | {"host_memory": host}} | ONE_THREAD),
    }


def model(*, recomputes: bool) -> Gpt:
    made = Gpt(SHAPE)
    made.checkpointing = recomputes
    return made


def flows(report: dict) -> dict[str, int]:
    found: dict[str, int] = {}
    for name, nbytes in report["sent"].items():
        found[name.split()[0]] = found.get(name.split()[0], 0) + nbytes
    return found | report["moved"]


def settings(case: str, folder: str, size: int) -> dict:
    stage, zero, naught = cases(folder, size)[case]
    accumulation, more = {1: (1, {}), 2: (3, BF16), 4: (1, SMALL)}[size]
    more = more | naught | {"naught": {**more.get("naught", {}), **naught.get("naught", {})}}
    return config_of(stage, **steps_of(case, accumulation), more=more, **zero)


def steps_of(case: str, accumulation: int) -> dict[str, float]:
    """Updates in the backward wait neither for another micro-batch nor for the norm."""
    return {"accumulation": 1, "clip": 0.0} if case.startswith("updates") else {"accumulation": accumulation, "clip": 1.0}


def real(case: str, folder: str, size: int) -> tuple[dict[str, int], dict[str, int]]:
    torch.manual_seed(0)
    config = settings(case, folder, size)
    engine = engine_of(model(recomputes=recomputes(case, size)), config)
    before: dict[str, int] = {}
    for step in range(2):
        for micro in range(config["gradient_accumulation_steps"]):
            ids = torch.full((SAMPLES, 16), step + micro + my_rank(), device=DEVICE)
            engine.backward(engine(ids, ids))
            engine.step()
        for unit in engine.schedule.units.values():
            for segment in unit.segments:
                segment.settle()
        if step == 0:
            before = flows(engine.report())
    sent = {name: nbytes - before.get(name, 0) for name, nbytes in flows(engine.report()).items()}
    peak = engine.report()["peak"]
    engine.destroy()
    return sent, peak


def recomputes(case: str, size: int) -> bool:
    return case.startswith("checkpoints") or (size == 2 and not case.startswith("activations"))


SAMPLES = 65  # so many that activations are large enough to be put away, and fill no whole number of pages


@pytest.mark.skipif(ON_GPU, reason="the ranks of a GPU's tests talk by gloo, whose memory is not the device's")
@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("case", cases(""))
def test_it_is_what_a_real_run_sends_and_holds(worlds, case, size, tmp_path):
    machine = replace(detect()[0], ranks=size, ranks_per_node=1)
    for rank, (sent, peak) in enumerate(worlds[size].run(real, case, str(tmp_path), size)):
        with torch.device("meta"):
            ids, thought = torch.zeros(SAMPLES, 16, dtype=torch.long), model(recomputes=recomputes(case, size))
        world = World(size, rank, "gloo", machine)
        config = settings(case, str(tmp_path / "nowhere"), size)
        found = simulate(thought, config, world, lambda run, ids=ids: run(ids, ids))
        assert there(found.sent | found.moved) == there(sent)
        assert there(found.peak) == there(peak)
        if "pool" in case:
            assert {"host", *(["disk"] if "disk" in case else [])} <= {name.split()[0] for name in there(peak)}
        assert not (tmp_path / "nowhere").exists(), "a simulation writes nothing"


def there(found: dict[str, int]) -> dict[str, int]:
    return {name: nbytes for name, nbytes in found.items() if nbytes}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("again", [False, True])
def test_activations_are_those_of_a_real_model(dtype, again):
    """Made and let go by the same operations: to the byte. And with engines around, as many."""
    made, ids = model(recomputes=again).to(dtype), torch.zeros(64, 16, dtype=torch.long)
    real = activations_of(made.parameters(), lambda: made(ids, ids))
    assert real.most > real.kept > 0
    with torch.device("meta"):
        thought, none = model(recomputes=again), torch.zeros(64, 16, dtype=torch.long)
    config = config_of(3, more=BF16 if dtype is torch.bfloat16 else {}, **SPREAD)
    world = World(2, 1, "gloo", replace(detect()[0], ranks=2, ranks_per_node=1, unified=True))
    assert simulate(thought, config, world, lambda run: run(none, none)).activations == real


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_live_bytes_are_those_of_storages(device):
    x = torch.zeros(1000, device=device)
    with LiveBytes() as live:
        y = x + 1
        seen = y.view(10, 100)
        x.add_(1)
        assert (live.held, live.most) == (4000, 4000), "what was there, and what is seen of it, is nothing new"
        z = y * 2
        del y
        assert live.held == 8000, "somebody still sees it"
        del seen
        assert (live.held, live.most) == (4000, 8000)
    del z
    assert live.held == 0


def test_gradients_of_parameters_are_no_activations():
    layers = nn.Sequential(*(nn.Linear(100, 100, bias=False) for _ in range(8)))
    found = activations_of(layers.parameters(), lambda: layers(torch.zeros(1, 100)).sum())
    assert all(param.grad is None for param in layers.parameters())
    assert found.most < 2 * 100 * 100 * 4, "one at a time"


def test_checkpoints_that_rest_elsewhere_leave_the_device():
    def kept(**ours: str) -> int:
        with torch.device("meta"):
            thought, ids = model(recomputes=True), torch.zeros(64, 16, dtype=torch.long)
        config = config_of(1, more={"naught": ours})
        return simulate(thought, config, World(2), lambda run: run(ids, ids)).activations.kept

    each = 64 * 16 * SHAPE.hidden * 4
    near, far = kept(), kept(activations="host")
    assert near - far == (SHAPE.layers - LEAVING) * each, "those that left last may be on their way"
    assert kept(activations="disk", nvme_path="/nowhere") == far


@pytest.mark.parametrize("ranks", [8, 64, 512])
def test_bytes_are_those_of_the_formulas(ranks):
    """ZeRO's volumes: 2 Psi at stages 1 and 2, 3 Psi at stage 3; each with (N-1)/N, and one unit that is not gathered twice."""
    shape = Transformer(layers=8, hidden=512, heads=8, vocab=512, positions=64)
    for stage, volume in ((1, 2), (2, 2), (3, 3)):
        with torch.device("meta"):
            ids, thought = torch.zeros(1, 64, dtype=torch.long), Gpt(shape)
        config = config_of(stage, more={"bf16": {"enabled": True}}, **(SPREAD if stage == 3 else {}))
        found = simulate(thought, config, World(ranks), lambda run, ids=ids: run(ids, ids))
        total = sum(found.sent.values()) / (2 * found.numel) / ((ranks - 1) / ranks)
        # Shards are padded; the head, whose backward follows its forward, is not gathered anew.
        assert total == pytest.approx(volume, rel=0.06), stage
        assert found.peak == found.peak | {name: nbytes for name, nbytes in found.planned.items() if nbytes}


def test_a_trillion_parameters_on_4096_ranks():
    shape = Transformer(layers=128, hidden=25_600, heads=200, vocab=51_200, positions=2048)
    with torch.device("meta"):
        ids, thought = torch.zeros(1, 2048, dtype=torch.long), Gpt(shape)
        thought.checkpointing = True
    began = time.monotonic()
    found = simulate(thought, config_of(3, more={"bf16": {"enabled": True}}), World(4096), lambda run: run(ids, ids))
    assert found.numel > 10**12
    assert found.peak["states"] == pytest.approx(8 * found.numel / 4096, rel=0.001)
    assert time.monotonic() - began < 100, "it hangs on something that grows with the ranks"


def test_a_quarter_of_a_trillion_parameters_on_the_disks_of_512_ranks():
    """ZeRO-Infinity with everything on disk: nothing of it is written, and all of it is counted. A whole trillion where there is
    time."""
    shape = Transformer(layers=128 if SOAK else 32, hidden=25_600, heads=200, vocab=51_200, positions=2048)
    with torch.device("meta"):
        ids, thought = torch.zeros(1, 2048, dtype=torch.long), Gpt(shape)
        thought.checkpointing = True
    stage, zero, _ = cases("/nowhere")["gradients on disk too"]
    config = config_of(stage, more={"bf16": {"enabled": True}}, **zero)
    began = time.monotonic()
    found = simulate(thought, config, World(512), lambda run: run(ids, ids))
    mine = found.numel / 512
    # Of each element: 4 of a master and 8 of moments, a gradient of 2, and a weight of 2, which is read for both passes.
    assert found.moved["disk written"] == pytest.approx((12 + 2 + 2) * mine, rel=0.001)
    assert found.moved["disk read"] == pytest.approx((12 + 2 + 2 * 2) * mine, rel=0.01)
    resting = {name: nbytes for name, nbytes in found.peak.items() if name.startswith("disk ")}
    assert sum(resting.values()) == pytest.approx((12 + 2 + 2) * mine, rel=0.001)
    assert resting == {name: nbytes for name, nbytes in found.planned.items() if name.startswith("disk ")}
    assert time.monotonic() - began < 100


def test_mistakes_are_told():
    with torch.device("meta"):
        thought = Gpt(SHAPE)
    with pytest.raises(ModelError, match="the model has contents"):
        simulate(Gpt(SHAPE), config_of(1), World(2), lambda run: run())
    with pytest.raises(UsageError, match="rank 2 is none of 2"):
        simulate(thought, config_of(1), World(2, 2), lambda run: run())
    with pytest.raises(UsageError, match="the world has 64 ranks and its machine 8"):
        simulate(thought, config_of(1), World(64, machine=Machine(ranks=8)), lambda run: run())
    with pytest.raises(UsageError, match="nobody says what memory the ranks have"):
        simulate(thought, config_of(3, more={"naught": {"placement": "auto"}}), World(2), lambda run: run(IDS, IDS))
    full = Machine(ranks=2, disk_bytes=1000)
    disk = {"device": "nvme", "nvme_path": "/nowhere"}
    with pytest.raises(PlacementError, match=r"would go to /nowhere, and 1\.00 kB a rank are free there"):
        simulate(thought, config_of(3, offload_optimizer=disk), World(2, machine=full), lambda run: run(IDS, IDS))


def test_the_command_says_what_a_rank_sends_and_holds(capsys, tmp_path):
    assert main(["simulate", "gpt:layers=4,hidden=256,heads=4,vocab=1024", "--ranks", "64", "--stage", "3", "--seq", "64"]) == 0
    shown = capsys.readouterr().out
    for words in ("rank 0 of 64", "all-gather", "reduce-scatter", "gathered weights", "Psi"):
        assert words in shown
    assert main(["simulate", "gpt:layers=2,hidden=64,heads=2,vocab=128", "--ranks", "8", "--seq", "16", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["ranks"] == 8
    assert data["sent"]["reduce-scatter"] > 0
    assert max(data["busy_s"].values()) <= data["seconds"] <= sum(data["busy_s"].values())
    assert data["activations"]["most"] > data["activations"]["kept"] > 0
    assert main(["simulate", "nothing"]) == 2
    again = ["simulate", "0.01B", "--ranks", "2", "--seq", "16", "--timeline", str(tmp_path / "line.json")]
    assert [main(again), main(again)] == [0, 2], "nothing is overwritten"
    events = json.loads((tmp_path / "line.json").read_text())["traceEvents"]
    assert {event["args"]["name"] for event in events if event["ph"] == "M"} == {"network", "compute"}


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("case", [case for case in cases("") if "pool" not in case])
def test_the_timeline_moves_what_is_counted(case, accumulation):
    """Each lane is busy for as long as the bytes take that the engine has counted."""
    stage, zero, more = cases("/nowhere")[case]
    with torch.device("meta"):
        ids, thought = torch.zeros(SAMPLES, 16, dtype=torch.long), model(recomputes=recomputes(case, 1))
    config = config_of(stage, **steps_of(case, accumulation), more=BF16 | more, **zero)
    found = simulate(thought, config, World(4), lambda run: run(ids, ids))
    machine = Machine(ranks=4, gpu=Gpu(1, 1e12, 1e9, 1e9), network_bytes_s=1e9, host_bytes_s=4e9, disk_bytes_s=1e9)
    busy = {lane: seconds * 1e9 for lane, seconds in pace(found.course, machine).busy.items()}
    moved = found.moved.items()
    assert busy["network"] == pytest.approx(sum(found.sent.values()), rel=1e-6)
    assert busy.get("disk", 0) == pytest.approx(sum(nbytes for name, nbytes in moved if name.startswith("disk")), rel=1e-3)
    for lane, where in (("up", "to the device"), ("down", "to the host")):
        assert busy.get(lane, 0) == pytest.approx(sum(nbytes for name, nbytes in moved if name.endswith(where)), rel=1e-3), lane
    assert busy["compute"] > 0
    assert ("host" in busy) == (zero.get("offload_optimizer") is not None)


TINY = "gpt:layers=2,hidden=64,heads=2,vocab=128"


@pytest.mark.parametrize("offload", ["none", "optimizer", "both", "disk", "disk-all", "auto"])
def test_the_command_takes_every_tier(capsys, offload):
    asked = ["simulate", TINY, "--ranks", "4", "--gpu", "400MB", "--host", "1GB", "--disk", "1GB", "--offload", offload, "--json"]
    assert main([*asked, "--activations", "disk", "--seq", "512"]) == 0
    found = json.loads(capsys.readouterr().out)
    held = {name for name, nbytes in found["peak"].items() if nbytes}
    resting = {"none": "states", "auto": "states", "optimizer": "host states", "both": "host states"}
    assert {name for name in held if name.endswith("states")} == {resting.get(offload, "disk states")}
    assert ("disk gradients" in held) == (offload == "disk-all")
    assert ("disk weights" in held) == offload.startswith("disk")
    assert found["moved"]["activations to the host"] == found["moved"]["activations to the device"] > 0
    assert found["peak"]["disk activations"] > 0
    assert found["busy_s"]["disk"] > 0


def test_the_pool_of_the_command_is_that_of_its_machine(capsys):
    """Less of a GPU leaves less of the states there; nothing is known of the computer that this is."""
    found = []
    for gpu in ("400MB", "90MB"):
        asked = ["simulate", "gpt:layers=8,hidden=512,heads=8,vocab=512", "--ranks", "4", "--seq", "64", "--offload", "auto"]
        assert main([*asked, "--gpu", gpu, "--host", "1GB", "--disk", "1GB", "--json"]) == 0
        found.append(json.loads(capsys.readouterr().out)["peak"])
    large, small = found
    assert "host states" not in large
    assert small["host states"] > 0
    assert main([*asked, "--gpu", "1MB", "--host", "1MB", "--disk", "1GB"]) == 2
    assert "the model does not fit" in capsys.readouterr().err


def test_the_command_says_what_is_wrong_with_its_numbers(capsys):
    assert main(["simulate", TINY, "--ranks", "4", "--rank", "4"]) == 2
    assert "rank 4 is none of 4. Give a rank from 0 to 3" in capsys.readouterr().err
    for option in ("--batch", "--seq", "--accumulation"):
        with pytest.raises(SystemExit) as ended:
            main(["simulate", TINY, option, "0"])
        assert ended.value.code == 2
        assert f"argument {option}: must be a whole number of at least 1, is 0" in capsys.readouterr().err
    assert main(["simulate", TINY, "--real", "--offload", "disk"]) == 2
    assert "name a folder" in capsys.readouterr().err.lower()
    assert main(["simulate", "1.5B", "--ranks", "2", "--seq", "16", "--json"]) == 0, "its heads are odd"


def test_lanes_wait_for_each_other_as_the_plan_has_it():
    """Two units of 8 bytes on two ranks: half of a flat travels. The second is gathered while the first computes."""
    size = UnitBytes(weights=8, weight_shard=4, grads=8, grad_shard=4, state_shard=0)
    steps = [Step(Verb.GATHER, Kind.PARAM, "a"), Step(Verb.USE, Kind.PARAM, "a"), Step(Verb.GATHER, Kind.PARAM, "b")]
    steps += [Step(Verb.USE, Kind.PARAM, "b"), Step(Verb.USE, Kind.GRAD, "b"), Step(Verb.REDUCE, Kind.GRAD, "b")]
    machine = Machine(ranks=2, ranks_per_node=2, gpu=Gpu(1, 1.0, 1.0, 1.0), network_bytes_s=1.0, host_bytes_s=100.0)
    units = ("a", "b")
    works = {"a": Work(forward_flops=3.0), "b": Work(forward_flops=5.0, backward_flops=10.0)}
    course = Course(steps, dict.fromkeys(units, place_stage(3)), dict.fromkeys(units, size), works)
    near = pace(course, machine)
    assert [(bar.what, bar.start_s, bar.stop_s) for bar in near.bars] == [
        ("gather", 0, 4),
        ("forward", 4, 7),
        ("gather", 4, 8),
        ("forward", 8, 13),
        ("backward", 13, 23),
        ("reduce", 23, 27),
    ]
    assert (near.seconds, near.busy) == (27, {"network": 12, "compute": 18})
    host = dict.fromkeys(units, place_stage(3, optim=Tier.HOST, param=Tier.HOST))
    works = {name: replace(work, raised=4) for name, work in works.items()}
    far = pace(replace(course, placements=host, works=works), machine)
    assert [(bar.lane, bar.start_s, bar.stop_s) for bar in far.bars[:3]] == [
        ("up", 0, 4),
        ("network", 4, 8),
        ("compute", 8, 11),
    ]
    assert far.busy["compute"] == 3 + 5 + 10


def three(placement, **work) -> Course:
    """Three units that compute for a second each, and twice as long in the backward."""
    names, size = ("a", "b", "c"), UnitBytes(weights=8, weight_shard=4, grads=8, grad_shard=4, state_shard=0)
    steps = [Step(verb, Kind.PARAM, name) for name in names for verb in (Verb.GATHER, Verb.USE)]
    steps += [Step(Verb.USE, Kind.GRAD, name) for name in reversed(names)]
    works = dict.fromkeys(names, Work(forward_flops=1.0, backward_flops=2.0, **work))
    return Course(steps, dict.fromkeys(names, placement), dict.fromkeys(names, size), works)


def bars(course: Course, **rates: float) -> list[tuple[str, str, float, float]]:
    machine = Machine(gpu=Gpu(1, 1.0, 4.0, 1.0), host_bytes_s=100.0, **rates)
    return [(f"{bar.lane}: {bar.what}", bar.unit, bar.start_s, bar.stop_s) for bar in pace(course, machine).bars]


def offloaded(**work: int) -> Course:
    """Stage 2 with the optimizer on the host. At 4 bytes a second gradients of 12 go down for 3 seconds, and weights of 8 come up
    for 2; at an element a second a unit is updated for 4."""
    course = three(place_stage(2, optim=Tier.HOST), updated_numel=4, raised=8, lazy=True, **work)
    names, size = ("a", "b", "c"), UnitBytes(weights=8, weight_shard=8, grads=12, grad_shard=12, state_shard=0)
    forward = [step for step in course.steps if step.kind is Kind.PARAM]
    verbs = (Verb.USE, Verb.REDUCE, Verb.SETTLE, Verb.STORE)
    backward = [Step(verb, Kind.GRAD, name) for name in reversed(names) for verb in verbs]
    return replace(course, steps=[*forward, *backward], sizes=dict.fromkeys(names, size))


def test_an_optimizer_on_the_host_by_hand():
    """From one norm to the next, which is when the backward of a ends: nothing waits for the last gradients but their update.

    Before it the backwards of c, b and a have ended at -4, -2 and 0. The link has stored c from -4 to -1 and b from -1 to 2.
    down     store a 2-5
    host     c 0-4: it has arrived        a 5-9: it arrives at 5        b 9-13
    up       load c 4-6                   load a 9-11                   load b 13-15
    compute  forward a 11-12, b 15-16, c 16-17; backward c 17-19, b 19-21, a 21-23: the norm
    down     store c 19-22, store b 22-25: as above, 23 seconds later
    """
    course = offloaded()
    assert sorted(bars(course, update_numel_s=1.0), key=lambda bar: bar[2:]) == [
        ("host: update", "c", 0, 4),
        ("down: store", "a", 2, 5),
        ("up: load", "c", 4, 6),
        ("host: update", "a", 5, 9),
        ("up: load", "a", 9, 11),
        ("host: update", "b", 9, 13),
        ("compute: forward", "a", 11, 12),
        ("up: load", "b", 13, 15),
        ("compute: forward", "b", 15, 16),
        ("compute: forward", "c", 16, 17),
        ("compute: backward", "c", 17, 19),
        ("compute: backward", "b", 19, 21),
        ("down: store", "c", 19, 22),
        ("compute: backward", "a", 21, 23),
        ("down: store", "b", 22, 25),
    ]
    assert pace(course, Machine(gpu=Gpu(1, 1.0, 4.0, 1.0), host_bytes_s=100.0, update_numel_s=1.0)).seconds == 23


def test_updates_in_the_backward_by_hand():
    """From one norm to the next. Two sums have room on the host: that of a waits until the update of c is over, at 0, and with it
    the norm, which was due at -3. Before it c has been stored from -7 to -4 and b from -4 to -1.

    down     store a 0-3
    host     b 0-4        a 4-8
    up       load c 0-2, b 4-6, a 8-10
    compute  forward a 10-11, b 11-12, c 12-13; backward c 13-15, b 15-17, a 17-19
    down     store c 15-18, b 18-21
    host     c 18-22: the norm
    """
    course, steps = offloaded(), []
    for step in course.steps:
        steps += [step, Step(Verb.UPDATE, Kind.OPTIM, step.unit)] if step.verb is Verb.STORE else [step]
    assert sorted(bars(replace(course, steps=steps), update_numel_s=1.0), key=lambda bar: bar[2:]) == [
        ("up: load", "c", 0, 2),
        ("down: store", "a", 0, 3),
        ("host: update", "b", 0, 4),
        ("up: load", "b", 4, 6),
        ("host: update", "a", 4, 8),
        ("up: load", "a", 8, 10),
        ("compute: forward", "a", 10, 11),
        ("compute: forward", "b", 11, 12),
        ("compute: forward", "c", 12, 13),
        ("compute: backward", "c", 13, 15),
        ("compute: backward", "b", 15, 17),
        ("down: store", "c", 15, 18),
        ("compute: backward", "a", 17, 19),
        ("down: store", "b", 18, 21),
        ("host: update", "c", 18, 22),
    ]


def test_new_weights_that_are_not_due_keep_nobody_from_the_link():
    """b is due at 12: what is asked at 11 goes first, and b comes up behind it. What goes down keeps neither."""
    lanes = Lanes(Machine(gpu=Gpu(1, 1.0, 4.0, 1.0), host_bytes_s=100.0))
    lanes.load_at(12.0, "b", 8)
    assert lanes.up("bring back", "a", 8, after=11.0) == 13
    assert lanes.down("store", "a", 8, after=11.0) == 13
    assert lanes.arrival("b") == 15


def test_new_weights_come_up_in_the_order_of_their_updates():
    """The link is busy with a until 9, when c (4) and b (8) are both due."""
    lanes = Lanes(Machine(gpu=Gpu(1, 1.0, 1.0, 1.0), host_bytes_s=100.0))
    lanes.up("load", "a", 9, after=0.0)
    lanes.load_at(4.0, "c", 2)
    lanes.load_at(8.0, "b", 2)
    assert [lanes.arrival("b"), lanes.arrival("c"), lanes.arrival("a")] == [13, 11, 0]
    lanes.load_at(20.0, "c", 2)
    lanes.load_at(30.0, "c", 2)
    assert [bar.start_s for bar in lanes.bars] == [0, 9, 11, 20], "also those that nobody has waited for come up"
    assert lanes.arrival("c") == 32


def test_without_a_gpu_the_same_cores_compute_and_update_and_there_is_no_link():
    machine = Machine(gpu=Gpu(1, 1.0, 4.0, 1.0), host_bytes_s=100.0, update_numel_s=1.0, unified=True)
    found = pace(replace(offloaded(away_bytes=8), rest=Tier.HOST), machine)
    assert found.busy == {"compute": 3 * (4 + 1 + 2)}
    assert found.seconds == 21


def test_the_host_updates_the_last_unit_first():
    assert order_of_updates(["a", "b", "c"]) == ["c", "a", "b"]
    assert order_of_updates([]) == []


@pytest.mark.parametrize("apart", [False, True])
def test_what_is_computed_again_is_counted_where_it_is(apart):
    """A block: four projections of 32 x 32, up and down of 32 x 128, for 32 tokens; and attention of 2 samples and 2 heads with
    16 x 16 scores of 16 elements, which takes two products, and 5 in a backward. A product has two in a backward. The last one
    of a block, down, is not computed again: nobody needs what it gives."""
    projections, up, attention = 4 * 2 * 32 * 32 * 32, 2 * 32 * 32 * 128, 2 * 2 * (2 * 16 * 16 * 16)
    forward = projections + 2 * up + 2 * attention
    backward = 2 * (projections + 2 * up) + 5 * attention
    head = 2 * 32 * 32 * 96
    machine = Machine(ranks=2, unified=not apart)
    for again in (False, True):
        with torch.device("meta"):
            thought = model(recomputes=again)
        works = simulate(thought, config_of(2), World(2, machine=machine), lambda run: run(IDS, IDS)).course.works
        assert {(work.forward_flops, work.backward_flops) for name, work in works.items() if name.startswith("blocks")} == {
            (forward, backward + (forward - up if again else 0))
        }
        assert sum(work.forward_flops for work in works.values()) == 3 * forward + head
        assert sum(work.backward_flops for work in works.values()) == 3 * (backward + (forward - up if again else 0)) + 2 * head


class Outer(nn.Module):
    """A layer, and a product with a weight of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.own = nn.Linear(8, 8, bias=False), nn.Parameter(torch.zeros(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.inner(x) @ self.own).sum()


def test_a_root_is_told_what_it_computes_itself():
    """Products of 4 x 8 by 8 x 8. Nobody wants a gradient of the input, so the inner backward has one, and the root's two."""
    with torch.device("meta"):
        thought, x = Outer(), torch.zeros(4, 8)
    works = simulate(thought, config_of(1), World(2), lambda run: run(x)).course.works
    product = 2 * 4 * 8 * 8
    assert {name: (work.forward_flops, work.backward_flops) for name, work in works.items()} == {
        "": (product, 2 * product),
        "inner": (product, product),
    }


class TwoExps(nn.Module):
    """Two tensors of 1,000 elements, each of which its own backward needs."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.exp().exp()


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_activations_of_two_units_by_hand(device):
    x, each, scalars = nn.Parameter(torch.zeros(1000, device=device)), 4000, 2 * 4
    units = [TwoExps(), TwoExps()]
    # All four are kept, with a loss of 4 bytes. The first product of the backward finds them and makes a fifth, beside the loss
    # and its gradient; from then on each lets go of one and makes another.
    kept = activations_of([x], lambda: units[1](units[0](x)).sum())
    assert kept == (4 * each + 4, 5 * each + scalars)

    def again() -> torch.Tensor:
        return checkpoint(units[1], checkpoint(units[0], x, use_reentrant=False), use_reentrant=False).sum()

    # What goes from unit to unit is kept. The backward of the second computes its two again, and makes its first product: four.
    assert activations_of([x], again) == (each + 4, 4 * each + scalars)


def test_a_unit_waits_for_its_own_update_alone():
    """The host updates c, a, b, 10 seconds each; a computes while b is updated."""
    found = bars(three(place_stage(3, optim=Tier.HOST, param=Tier.HOST), updated_numel=10, raised=4), update_numel_s=1.0)
    assert [bar for bar in found if bar[0] == "host: update"] == [
        ("host: update", "c", 0, 10),
        ("host: update", "a", 10, 20),
        ("host: update", "b", 20, 30),
    ]
    assert ("up: load", "a", 20, 21) in found
    assert ("compute: forward", "a", 21, 22) in found
    assert ("up: load", "b", 30, 31) in found
    assert ("compute: forward", "b", 31, 32) in found
    assert ("compute: forward", "c", 32, 33) in found


@pytest.mark.parametrize(("disk_bytes_s", "each"), [(8.0, 10), (2.0, 22)])
def test_states_on_disk_are_read_updated_and_written_side_by_side(disk_bytes_s, each):
    """20 bytes read and written, and 4 of new weights: faster than the host updates them, or slower."""
    course = three(place_stage(3, optim=Tier.DISK, param=Tier.DISK), updated_numel=10, raised=4, state_bytes=20)
    found = bars(course, update_numel_s=1.0, disk_bytes_s=disk_bytes_s)
    took = 44 / disk_bytes_s
    assert ("disk: states", "c", 0, took) in found
    assert ("disk: states", "a", took, 2 * took) in found
    assert ("host: update", "c", 0, 10) in found
    assert ("host: update", "a", max(10, took), max(10, took) + 10) in found
    assert ("up: load", "a", 2 * each, 2 * each + 1) in found, "once both are done with it"


def test_an_update_on_the_device_comes_before_the_forward_and_new_weights_travel_beside_it():
    machine = Machine(ranks=2, gpu=Gpu(1, 1.0, 4.0, 1.0), network_bytes_s=1.0)
    course = three(place_stage(2), updated_numel=int(machine.device_update_numel_s))  # a second each
    found = [(bar.what, bar.unit, bar.start_s, bar.stop_s) for bar in pace(course, machine).bars if bar.start_s < 5]
    assert found == [
        ("update", "a", 0, 1),
        ("gather", "a", 1, 5),
        ("update", "b", 1, 2),
        ("update", "c", 2, 3),
    ]
    lazy = three(place_stage(2), updated_numel=1, lazy=True)
    assert [bar.what for bar in pace(lazy, machine).bars][3:5] == ["gather", "forward"]


def test_activations_that_are_away_come_back_before_their_backward():
    course = replace(three(place_stage(1), away_bytes=8), rest=Tier.DISK)
    found = bars(course, disk_bytes_s=8.0)
    assert ("down: put away", "a", 1, 3) in found
    assert ("disk: put away", "a", 3, 4) in found
    last = next(bar for bar in found if bar[:2] == ("down: put away", "c"))
    back = next(bar for bar in found if bar[:2] == ("disk: bring back", "c"))
    again = next(bar for bar in found if bar[:2] == ("compute: backward", "c"))
    assert last[3] + 1 <= back[2]
    assert back[3] + 2 <= again[2]


@pytest.mark.parametrize("parts", [4, 2, 1])  # the others have a model together
def test_ranks_of_a_host_without_a_gpu_share_its_memory_once(parts):
    four = Machine(ranks=4, ranks_per_node=4, gpu=Gpu(16 * 10**9, 1e11, 1e10), unified=True)
    config = load({"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}, "naught": {"placement": "auto"}})
    with imagine(World(4, machine=four)):
        limits = limits_of_bytes(
            config, precision_of(config, 1), 2, parts, torch.device("meta"), gpu=16 * 10**9, host=16 * 10**9, disk=0
        )
    assert limits.machine.capacity(Tier.DEVICE) == pytest.approx(0.96 * 4 * 10**9)
    assert limits.activation_bytes == pytest.approx(0.1 * 4 * 10**9)


def test_a_simulated_rank_has_what_its_machine_has_and_no_more():
    config = load({"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}, "naught": {"placement": "auto"}})
    world = World(4, machine=Machine(ranks=4, ranks_per_node=4, gpu=Gpu(16 * 10**9, 1e11, 1e10)))
    with imagine(world):
        group = world.group(Ledger(), torch.device("meta"), reduce_numel=1)
        limits = limits_here(config, precision_of(config, 1), 2, group, torch.device("meta"), own=10**9)
    assert limits is not None
    assert limits.machine.gpu.memory_bytes == 16 * 10**9


def test_a_model_can_be_asked_about_several_worlds():
    with torch.device("meta"):
        asked = model(recomputes=False)
    found = [simulate(asked, config_of(3), World(ranks), lambda engine: engine(IDS, IDS)) for ranks in (2, 8)]
    assert found[0].peak["states"] > 3 * found[1].peak["states"]
    with pytest.raises(UsageError, match="the loss is a NoneType"):
        simulate(asked, config_of(3), World(2), lambda engine: [engine(IDS, IDS), None][1])
    assert simulate(asked, config_of(3), World(8), lambda engine: engine(IDS, IDS)).peak == found[1].peak


def test_nothing_is_written_for_who_watches_real_runs(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    sink = {"enabled": True, "output_path": "seen"}
    document = config_of(2) | {"csv_monitor": sink, "flops_profiler": {"enabled": True, "output_file": "flops"}}
    (tmp_path / "ds.json").write_text(json.dumps(document), encoding="utf-8")
    assert main(["simulate", "gpt:layers=2,hidden=32,heads=2,vocab=64,positions=16", "--config", "ds.json", "--ranks", "2"]) == 0
    assert "in a step" in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["ds.json"]


def test_a_configuration_beside_options_that_say_the_same_is_refused(capsys, tmp_path):
    file = tmp_path / "ds.json"
    file.write_text(json.dumps({"zero_optimization": {"stage": 1}, "optimizer": {"type": "AdamW"}}))
    assert main(["simulate", TINY, "--ranks", "2", "--config", str(file), "--stage", "3", "--offload", "disk"]) != 0
    assert "--stage, --offload would not be heard" in capsys.readouterr().err
    assert main(["simulate", TINY, "--ranks", "2", "--config", str(file), "--batch", "2", "--json"]) == 0


@pytest.mark.parametrize(("gpu", "fits"), [("2GB", "yes"), ("300MB", "perhaps"), ("50MB", "no")])
def test_the_command_says_what_it_simulates_and_whether_it_fits(capsys, gpu, fits):
    assert main(["simulate", "gpt:layers=4,hidden=1024,heads=16,vocab=8192", "--ranks", "8", "--gpu", gpu]) == 0
    said = capsys.readouterr().out
    assert "stage 3, bf16, micro-batch 1 x 1024 tokens, accumulation 1" in said
    assert next(line for line in said.splitlines() if line.startswith("device ")).split()[5].strip(":") == fits


def test_a_model_that_writes_to_its_own_parameters_can_be_simulated():
    class Clamping(torch.nn.Linear):
        def forward(self, x):
            with torch.no_grad():
                self.weight.clamp_(max=0.5)
            return super().forward(x)

    x = torch.zeros(2, 8, dtype=torch.bfloat16, device="meta")
    found, plain = (
        simulate(
            torch.nn.Sequential(layer(8, 8, device="meta"), layer(8, 8, device="meta")),
            config_of(1, more=BF16),
            World(2),
            lambda engine: engine(x).float().mean(),
        )
        for layer in (Clamping, torch.nn.Linear)
    )
    assert found.peak == plain.peak


@pytest.mark.parametrize(("host", "fits"), [("2GB", "yes"), ("1GB", "no")])
def test_gradients_have_their_place_on_the_host_for_good(capsys, host, fits):
    """16 bytes for each of 60 million parameters: masters, moments and gradients; 12 of them would have room in either."""
    asked = ["simulate", "gpt:layers=4,hidden=1024,heads=16,vocab=8192", "--gpu", "10GB", "--host", host]
    assert main([*asked, "--stage", "2", "--offload", "optimizer"]) == 0
    (row,) = re.findall(r"^host .*(?:yes|no|perhaps)", capsys.readouterr().out, re.MULTILINE)
    assert row.split()[-1] == fits


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_the_planners_formula_holds_what_a_simulation_counts(dtype):
    """Where the logits are large, as they are in small models: most of what is held while a loss goes back."""
    shape = Transformer(layers=4, hidden=128, heads=2, vocab=20_000, positions=128)
    job = Job(micro_batch=4, seq=128, recipe=recipe(dtype))
    more = {} if dtype == "fp32" else BF16
    found = simulate_gpt(shape, config_of(3, more=more), World(4), Batch(4, 128, recomputes=True)).activations.most
    planned = transformer_activations(shape, job)
    assert found <= planned.working + planned.checkpoints < 1.1 * found


_DISK = {"device": "nvme", "nvme_path": "/not/looked/at"}
_ASKED = {
    "stage1-offload": (1, HOST, None),
    "stage2-offload": (2, HOST, None),
    "stage3-offload": (3, HOST, None),
    "infinity-host": (3, HOST, HOST),
    "infinity-disk": (3, _DISK, _DISK | {"max_in_cpu": 0}),
}


@pytest.mark.parametrize("name", _ASKED)
def test_the_planner_knows_what_goes_over_the_link(name):
    """To the byte where weights rest on the device; else the engine may keep other small units than the planner thinks."""
    stage, optim, param = _ASKED[name]
    zero = {"offload_optimizer": optim, **({"offload_param": param} if param else {}), **SPREAD}
    shape = Transformer(layers=4, hidden=128, heads=2, vocab=512, positions=128)
    found = simulate_gpt(shape, config_of(stage, more=BF16, **zero), World(4), Batch(2, 128, recomputes=True)).moved
    moved = sum(nbytes for where, nbytes in found.items() if where.startswith("to the"))
    placed = [PlacedRun(run, PLACEMENTS[name]) for run in shape.runs]
    planned = traffic_of(placed, ActivationBytes(0, 0, 0, ""), Machine(ranks=4), Job(recipe=recipe("bf16"))).link
    assert moved == (planned if param is None else pytest.approx(planned, rel=0.06))
