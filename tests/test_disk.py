"""States on disk: the same training to the last bit, nothing left behind, and errors that every rank is told."""

from __future__ import annotations

import errno
import os
import random
import subprocess
import sys
from itertools import pairwise, product
from pathlib import Path

import pytest
import torch
from menagerie import MODELS
from test_offload import BF16, HOST, NARROW, ON_GPU, SMALL
from test_offload import SELECTION as OFFLOADED
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
from naught.errors import ConfigError, NaughtError, PlacementError, StorageError
from naught.flat import Meter
from naught.formulas import recipe
from naught.fragments import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_grad,
)
from naught.job import Job
from naught.placement import Kind
from naught.rooms import room_bytes
from naught.shapes import Run
from naught.sizes import PlacedRun
from naught.spill import Desk, Room, Spill, Stored
from naught.spill_file import UnnamedFile
from naught.working_set import working_set

FLIPS, KILLS = (5_000, 500) if SOAK else (500, 50)


def places(folder: str) -> dict[str, tuple[int, dict]]:
    disk = {"device": "nvme", "nvme_path": folder}
    below = disk | {"max_in_cpu": 0}
    return {
        "stage1": (1, {"offload_optimizer": disk}),
        "stage2": (2, {"offload_optimizer": disk}),
        "stage3": (3, {"offload_optimizer": disk}),
        "optim": (3, {"offload_optimizer": disk, "offload_param": HOST}),
        "both": (3, {"offload_optimizer": disk, "offload_param": below}),
        "all": (3, {"offload_optimizer": disk, "offload_param": below, "gradients": "disk"}),
        "gradients": (2, {"offload_optimizer": disk, "gradients": "disk"}),
        "some": (3, {"offload_optimizer": disk, "offload_param": below | {"max_in_cpu": 10_000}}),
        "param": (3, {"offload_optimizer": HOST, "offload_param": below}),
        "param-only": (3, {"offload_param": below}),
    }


def near_of(place: str) -> dict:
    """What is the same to the last bit with all states near: on a GPU, what is updated on the host as well."""
    return {"offload_optimizer": HOST} if ON_GPU and place != "param-only" else {}


SPREAD = {"stage3_param_persistence_threshold": 0}  # the models here are small: all of their units are split
TINY_TILES = {"aio": {"block_size": 4096 * 4}}  # several tiles in a unit


# --- bit for bit ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_training_is_the_same_with_states_on_disk(two, name, tmp_path):
    for place in places("") if SOAK else ("stage2", "all"):
        stage, zero = places(str(tmp_path))[place]
        far = two.run(train, name, stage, clip=0.5, more=TINY_TILES, **SPREAD, **zero)
        assert_ranks_agree([far])
        assert far == two.reference(train, name, stage, clip=0.5, **SPREAD, **near_of(place)), place


# The models, ranks, micro-batches and precisions of offload, each with a place of its own.
_PLACES = ["both", "all", "optim", "param", "stage1", "param-only", "gradients", "all", "both", "all", "both", "param-only"]
_PLACES += ["stage1", "stage3", "gradients", "all", "optim"]
SELECTION = [(*case[:4], place, case[5]) for case, place in zip(OFFLOADED, _PLACES, strict=True)]
SELECTION += [("plain", 2, 3, 0.5, "some", BF16), ("plain", 2, 1, 0.5, "stage2", NARROW)]


@pytest.mark.parametrize(
    ("name", "size", "accumulation", "clip", "place", "more"),
    [(*case, place, more) for case, place, more in product(EVERYTHING, places(""), ({}, BF16, SMALL))] if SOAK else SELECTION,
)
def test_more_ranks_micro_batches_and_precisions(worlds, tmp_path, name, size, accumulation, clip, place, more):
    stage, zero = places(str(tmp_path))[place]
    options = {"accumulation": accumulation, "clip": clip, **SPREAD}
    near = worlds[size].reference(train, name, stage, **options, more=more, **near_of(place))
    assert worlds[size].run(train, name, stage, **options, more=TINY_TILES | more, **zero) == near


def groups_of(model: torch.nn.Module) -> list[dict]:
    """As scripts make them: no decay for what has one dimension."""
    small = [param for param in model.parameters() if param.dim() < 2]
    return [
        {"params": [param for param in model.parameters() if param.dim() >= 2], "weight_decay": 0.1},
        {"params": small, "weight_decay": 0.0, "lr": 2e-3},
    ]


def train_groups(stage: int, zero: dict) -> tuple[list[float], str]:
    torch.manual_seed(0)
    model = MODELS["plain"]().to(DEVICE)
    config = config_of(stage, clip=0.5, more=TINY_TILES, **SPREAD, **zero)
    engine = initialize(model=model, model_parameters=groups_of(model), config=config)[0]
    return take_steps(engine, 4), digest_in_32_bits(engine)


@pytest.mark.parametrize("place", ["stage2", "both"])
def test_several_groups_share_tiles(two, tmp_path, place):
    stage, zero = places(str(tmp_path))[place]
    assert two.run(train_groups, stage, zero) == two.run(train_groups, stage, near_of(place))


def bring_own(stage: int, zero: dict) -> tuple[list[float], str]:
    torch.manual_seed(0)
    model = MODELS["plain"]().to(DEVICE)
    config = config_of(stage, more=TINY_TILES, **SPREAD, **zero)
    del config["optimizer"]
    engine = initialize(model=model, optimizer=torch.optim.NAdam(model.parameters(), lr=1e-3), config=config)[0]
    return take_steps(engine, 4), digest_of_weights(engine)


@pytest.mark.skipif(ON_GPU, reason="the host's kernel is not the device's")
@pytest.mark.parametrize("place", ["stage1", "all"])
def test_an_optimizer_that_a_user_brings_works_from_disk(two, tmp_path, place):
    stage, zero = places(str(tmp_path))[place]
    assert two.run(bring_own, stage, zero) == two.run(bring_own, stage, {})


def write_between_steps(stage: int, zero: dict) -> tuple[list[float], str]:
    engine = start(stage, clip=0.5, more=SMALL | TINY_TILES, **SPREAD, **zero)
    losses = take_steps(engine, 2)
    first, *others = engine.module.parameters()
    with engine.gathered(), torch.no_grad():
        for param in others:
            param.mul_(1.01)
    safe_set_full_fp32_param(first, torch.full(first.shape, 0.3, device=first.device))
    read = [safe_get_full_fp32_param(first).sum().item(), safe_get_full_optimizer_state(first, "exp_avg").sum().item()]
    engine.backward(engine(batch_of(9, my_rank())))
    safe_set_full_grad(first, safe_get_full_grad(first) * 2)
    engine.step()
    engine.offload_states()
    engine.reload_states()
    return [*losses, *read, *take_steps(engine, 2, first=2)], digest_in_32_bits(engine)


@pytest.mark.parametrize("place", places(""))
def test_what_a_user_reads_and_writes_counts(two, tmp_path, place):
    stage, zero = places(str(tmp_path))[place]
    assert two.run(write_between_steps, stage, zero) == two.run(write_between_steps, stage, near_of(place))


# --- checkpoints ------------------------------------------------------------------------------------------------------


def save(place: str, folder: str, disk: str) -> str:
    stage, zero = places(disk)[place] if place in places("") else (2, {})
    engine = start(stage, more=BF16 | TINY_TILES, **SPREAD, **zero)
    take_steps(engine, 2)
    engine.save_checkpoint(folder)
    return digest_in_32_bits(engine)


def resume(place: str, folder: str, disk: str) -> tuple[str, list[float]]:
    stage, zero = places(disk)[place] if place in places("") else (2, {})
    engine = start(stage, more=BF16 | TINY_TILES, **SPREAD, **zero)
    take_steps(engine, 1)
    engine.load_checkpoint(folder)
    return digest_in_32_bits(engine), take_steps(engine, 2, first=2)


@pytest.mark.parametrize(("one", "other"), [("stage2", "device"), ("device", "all"), ("both", "optim"), ("optim", "param")])
def test_a_checkpoint_of_one_tier_loads_on_another(worlds, tmp_path, one, other):
    disk, folder = str(tmp_path / "disk"), str(tmp_path / "saved")
    (saved,) = set(worlds[2].run(save, one, folder, disk))
    for size in (1, 2):
        assert {found for found, _ in worlds[size].run(resume, other, folder, disk)} == {saved}
    if not ON_GPU:
        assert worlds[2].run(resume, other, folder, disk) == worlds[2].run(resume, one, folder, disk)


def save_and_load_a_tile_at_a_time(folder: str) -> bool:
    """Nobody has all of it in memory on the way."""
    stage, zero = places(folder)["all"]
    engine = start(stage, more=BF16 | TINY_TILES, **SPREAD, **zero)
    take_steps(engine, 2)
    before, whole = digest_in_32_bits(engine), Stored.whole
    take_steps(engine, 1, first=2)
    expected = digest_in_32_bits(engine)
    engine.save_checkpoint(f"{folder}/three", "three")
    take_steps(engine, 2, first=3)

    def refuse(_: Stored) -> None:
        raise AssertionError("all of it was read")

    Stored.whole = refuse
    try:
        engine.save_checkpoint(f"{folder}/five", "five")
        engine.save_checkpoint(f"{folder}/beside", "beside", asynchronous=True)
        engine.wait_for_checkpoint()
        engine.load_checkpoint(f"{folder}/three")
        take_steps(engine, 1, first=3)
        engine.load_checkpoint(f"{folder}/three")
    finally:
        Stored.whole = whole
    found = digest_in_32_bits(engine)
    engine.load_checkpoint(f"{folder}/five")
    five = digest_in_32_bits(engine)
    engine.load_checkpoint(f"{folder}/beside")
    return found == expected != before and five == digest_in_32_bits(engine)


def test_checkpoints_are_saved_and_loaded_a_tile_at_a_time(two, tmp_path):
    assert two.run(save_and_load_a_tile_at_a_time, str(tmp_path)) == [True, True]


# --- what is held, and what is left -----------------------------------------------------------------------------------


def held(place: str, folder: str) -> tuple[dict[str, int], dict[str, int]]:
    stage, zero = places(folder)[place]
    engine = start(stage, more=BF16, **SPREAD, **zero)
    take_steps(engine, 3)
    peak, planned = engine.report()["peak"], engine.planned()
    return {name: peak.get(name, 0) for name in planned}, planned


@pytest.mark.parametrize("place", places(""))
def test_what_was_planned_is_what_was_held(two, tmp_path, place):
    for peak, planned in two.run(held, place, str(tmp_path)):
        assert peak == planned
        assert sum(nbytes for name, nbytes in planned.items() if name.startswith("disk ")) > 0


def rooms(place: str, folder: str) -> tuple[int, int]:
    """Bytes on the host for tiles, as they are held and as they are planned."""
    stage, zero = places(folder)[place]
    engine = start(stage, more=BF16 | TINY_TILES, **SPREAD, **zero)
    take_steps(engine, 2)
    engine.save_checkpoint(f"{folder}/{place}")
    engine.load_checkpoint(f"{folder}/{place}")
    take_steps(engine, 1, first=2)
    held = engine.report()["peak"]["host rooms"]
    disk = {kind: any(unit.placement.of(kind).tier == "disk" for unit in engine.schedule.units.values()) for kind in Kind}
    updated, sunk, summed = disk[Kind.OPTIM], disk[Kind.PARAM], disk[Kind.GRAD]
    kinds = (3 + sunk + summed) if updated else int(sunk)
    largest = max(segment.layout.shard_numel for unit in engine.schedule.units.values() for segment in unit.segments)
    engine.destroy()
    return held, room_bytes(largest, kinds, 16, 4096 * 4, 1 + (updated and sunk))


@pytest.mark.parametrize("place", ["stage2", "gradients", "optim", "both", "all"])
def test_rooms_for_tiles_are_as_planned(two, tmp_path, place):
    for held, planned in two.run(rooms, place, str(tmp_path)):
        assert held <= planned


def test_rooms_that_weights_are_read_into_are_as_planned(tmp_path):
    """With a layer that is larger than blocks, at either end."""
    widths = [16, 512, *[16] * 12, 512, 16]
    model = nn.Sequential(*(nn.Linear(a, b) for a, b in pairwise(widths)))
    stage, zero = places(str(tmp_path))["both"]
    leaves = {"leaf_module": {"classes": ["Linear"]}}
    engine = engine_of(model, config_of(stage, stage3_prefetch_bucket_size=1, **SPREAD, **zero, **leaves))
    for _ in range(3):
        engine.backward(engine(torch.randn(4, 16, device=DEVICE)).square().mean())
        engine.step()
    held = engine.report()["peak"]["host shards"]
    units = {name: unit for name, unit in engine.schedule.units.items() if name}
    sizes = {name: sum(segment.layout.numel for segment in unit.segments) for name, unit in units.items()}
    placed = [PlacedRun(Run(name, sizes[name]), unit.placement) for name, unit in units.items()]
    planned = working_set(placed, 1, Job(recipe=recipe("fp32", "adamw"))).host_buffers
    engine.destroy()
    assert held == pytest.approx(planned, rel=0.03, abs=4096 * 8)


def flip_and_load(folder: str) -> bool:
    """A tile that is damaged is written anew by a load, also where several parameters share it."""
    stage, zero = places(folder)["both"]
    engine = start(stage, more=BF16, **SPREAD, **zero)
    take_steps(engine, 2)
    engine.save_checkpoint(f"{folder}/saved")
    before = digest_in_32_bits(engine)
    if my_rank() == 1:
        segment = next(segment for unit in engine.schedule.units.values() for segment in unit.trained)
        segment.kept.master.sums[0] ^= 1
        segment.kept.master.will_change()
    engine.load_checkpoint(f"{folder}/saved")
    mended = digest_in_32_bits(engine) == before
    take_steps(engine, 1, first=2)
    engine.destroy()
    return mended


def test_a_load_mends_what_is_damaged(two, tmp_path):
    assert two.run(flip_and_load, str(tmp_path)) == [True, True]


def spill_and_leave(folder: str) -> list[str]:
    stage, zero = places(folder)["both"]
    engine = start(stage, **SPREAD, **zero)
    take_steps(engine, 2)
    seen = [path.name for path in Path(folder).iterdir()]
    engine.destroy()
    return seen


def test_nothing_has_a_name_on_the_disk(two, tmp_path):
    assert two.run(spill_and_leave, str(tmp_path / "new")) == [[], []]
    assert not list((tmp_path / "new").iterdir())


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_an_engine_that_is_destroyed_closes_its_files(tmp_path):
    stage, zero = places(str(tmp_path))["both"]
    start(stage, **SPREAD, **zero).destroy()  # the first one starts the device, which keeps files of its own
    before = open_files()
    engine = start(stage, **SPREAD, **zero)
    take_steps(engine, 1)
    assert open_files() > before
    engine.destroy()
    assert open_files() == before


# In a process of its own, which has loaded torch once and forks: each child trains from disk until it is killed.
_VICTIMS = """
import os, random, signal, sys, time
from test_disk import SPREAD, places, start, take_steps
folder, kills = sys.argv[1], int(sys.argv[2])
dice = random.Random(0)
for _ in range(kills):
    child = os.fork()
    if not child:
        stage, zero = places(folder)["both"]
        engine = start(stage, **SPREAD, **zero)
        while True:
            take_steps(engine, 1)
    time.sleep(dice.uniform(0.02, 0.4))
    os.kill(child, signal.SIGKILL)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    assert os.listdir(folder) == [], "something is left"
print("killed", kills)
"""


@pytest.mark.skipif(ON_GPU, reason="a process that has used an accelerator cannot fork")
def test_nothing_is_left_of_a_process_that_is_killed(tmp_path):
    free = os.statvfs(tmp_path).f_bavail
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", _VICTIMS, str(tmp_path), str(KILLS)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert run.stdout == f"killed {KILLS}\n", run.stderr
    assert os.statvfs(tmp_path).f_bavail >= free - 2**15, "what was spilled is free again"


# --- the pool ---------------------------------------------------------------------------------------------------------


def pooled(gpu: str, host: str, folder: str | None) -> tuple[list[float], str, set[str]]:
    limits = {"gpu_memory": gpu, "host_memory": host, "activation_memory": 1, "placement": "auto", "nvme_path": folder}
    few = {"aio": TINY_TILES["aio"] | {"queue_depth": 2, "thread_count": 2}}
    engine = start(3, more=BF16 | few | {"naught": limits}, stage3_param_persistence_threshold=0)
    tiers = {str(unit.placement.of(kind).tier) for unit in engine.schedule.units.values() for kind in ("param", "grad", "optim")}
    return take_steps(engine, 3), digest_in_32_bits(engine), tiers


@pytest.mark.skipif(ON_GPU, reason="an accelerator hands out no less than 2 MB")
def test_the_pool_spills_to_disk_last(tmp_path):
    everything = pooled("100MB", "100MB", str(tmp_path))
    assert everything[2] == {"device"}
    little = pooled("420kB", "600kB", str(tmp_path))
    assert little[2] == {"device", "host", "disk"}
    assert little[:2] == everything[:2]
    with pytest.raises(PlacementError, match=r"the model does not fit.* name a folder for what has no room"):
        pooled("420kB", "600kB", None)


# --- what goes wrong --------------------------------------------------------------------------------------------------


def test_a_disk_that_is_too_small_is_told_before_anything_is_written(tmp_path, monkeypatch):
    real = os.statvfs(tmp_path)
    full = os.statvfs_result((*real[:4], 10, *real[5:]))  # blocks that are free to us
    monkeypatch.setattr(os, "statvfs", lambda _: full)
    stage, zero = places(str(tmp_path))["both"]
    with pytest.raises(PlacementError, match=r"states of .* a rank would go to .* a rank are free there .nvme_path."):
        start(stage, **SPREAD, **zero)


def test_a_folder_that_cannot_be_written_is_told(tmp_path):
    (tmp_path / "file").write_text("")
    stage, zero = places(str(tmp_path / "file" / "below"))["both"]
    with pytest.raises(NaughtError, match="below"):
        start(stage, **SPREAD, **zero)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"delay_update_after": 1}, "an update of states on disk brings its weights along"),
        ({"small_moments": True}, "moments of 8 bits rest on the device or the host"),
        ({"gradients": "disk", "nvme_path": "/"}, "gradients would rest farther away than the optimizer states"),
    ],
)
def test_what_cannot_be_on_disk_is_told(tmp_path, changes, words):
    device = "cpu" if "gradients" in changes else "nvme"
    config = config_of(2, offload_optimizer={"device": device, "nvme_path": str(tmp_path)}, more={"naught": changes})
    with pytest.raises(ConfigError, match=words):
        engine_of(MODELS["plain"](), config)


class _Failing:
    """The operating system's calls, of which the Nth that reads or writes fails, or all from there on."""

    def __init__(self, at: int, what: str, *, lasts: bool = False) -> None:
        self.at, self.what, self.lasts, self.count = at, what, lasts, 0
        self.real = os.preadv, os.pwritev

    def __enter__(self) -> None:
        os.preadv, os.pwritev = (self._failing(call) for call in self.real)

    def __exit__(self, *_: object) -> None:
        os.preadv, os.pwritev = self.real

    def _failing(self, call):
        def do(handle, buffers, offset):
            self.count += 1
            strikes = self.count == self.at or (self.lasts and self.count > self.at)
            if strikes and self.what == "short":
                return 0
            if strikes:
                raise OSError(getattr(errno, self.what), os.strerror(getattr(errno, self.what)))
            return call(handle, buffers, offset)

        return do


def let_go(engine) -> None:
    """Of what an engine that has failed still has: the error that was caught may keep it for as long as it is kept itself."""
    engine.watchdog.stop()
    next(iter(engine.schedule.units.values())).segments[0].home.disk.close()


def fail_at(place: str, folder: str, at: int, what: str) -> str:
    stage, zero = places(folder)[place]
    engine = start(stage, more=BF16, **SPREAD, **zero)
    take_steps(engine, 1)
    digest_in_32_bits(engine)  # all that was under way is over
    failing = _Failing(at if my_rank() == 1 else 10**9, what)
    try:
        with failing:
            take_steps(engine, 3, first=1)
        story = "nothing failed"
    except StorageError as error:
        story = f"StorageError: {error}"
    let_go(engine)
    return story


@pytest.mark.parametrize("what", ["EIO", "ENOSPC", "short"])
@pytest.mark.parametrize("place", ["stage2", "both", "all"])
def test_a_call_that_fails_on_one_rank_is_an_error_on_all(two, tmp_path, place, what):
    told = 0
    for at in (1, 4, 9, 16) if not SOAK else range(1, 60):
        stories = two.run(fail_at, place, str(tmp_path), at, what)
        if stories == ["nothing failed"] * 2:
            continue
        told += 1
        assert all(story.startswith("StorageError") and str(tmp_path) in story for story in stories), stories
    assert told >= 3


def fail_while_looking(folder: str) -> tuple[str, str, bool]:
    """A read fails while parameters are gathered: nothing is taken back, nothing is saved, and a load mends it."""
    stage, zero = places(folder)["both"]
    engine = start(stage, more=BF16, **SPREAD, **zero)
    take_steps(engine, 2)
    before = digest_in_32_bits(engine)
    engine.save_checkpoint(f"{folder}/saved")
    stories = []
    failing = _Failing(2 if my_rank() == 1 else 10**9, "EIO")
    for look in (lambda: engine.gathered().__enter__(), lambda: engine.save_checkpoint(f"{folder}/lost")):
        with pytest.raises(StorageError) as found, failing:
            look()
        stories.append(str(found.value))
    assert not Path(f"{folder}/lost").exists()
    engine.load_checkpoint(f"{folder}/saved")
    mended = digest_in_32_bits(engine) == before
    take_steps(engine, 1, first=2)
    engine.destroy()
    return *stories, mended


def test_what_cannot_be_read_is_not_taken_for_what_was_written(two, tmp_path):
    for first, second, mended in two.run(fail_while_looking, str(tmp_path)):
        assert "(EIO)" in first
        assert "(EIO)" in second
        assert mended


def fail_at_first(folder: str, at: int) -> str:
    """Calls that fail while the engine is made, or in its first step."""
    stage, zero = places(folder)["both"]
    with pytest.raises(StorageError) as found, _Failing(at if my_rank() == 1 else 10**9, "EIO", lasts=True):
        engine = start(stage, more=BF16, **SPREAD, **zero)
        take_steps(engine, 3)
    return str(found.value)


@pytest.mark.parametrize("at", [1, 5, 20])
def test_a_disk_that_fails_at_once_is_an_error_on_all_ranks(two, tmp_path, at):
    assert all("(EIO)" in story for story in two.run(fail_at_first, str(tmp_path), at))


def freeze_and_load(folder: str) -> bool:
    stage, zero = places(folder)["both"]
    saved = start(stage, "frozen", more=BF16, **SPREAD, **zero)
    with saved.gathered(), torch.no_grad():
        for param in saved.module.parameters():
            param.mul_(1.5)
    take_steps(saved, 1)
    saved.save_checkpoint(f"{folder}/saved")
    loaded = start(stage, "frozen", more=BF16, **SPREAD, **zero)
    loaded.load_checkpoint(f"{folder}/saved")
    with saved.gathered(), loaded.gathered():
        return all(map(torch.equal, saved.module.parameters(), loaded.module.parameters()))


def test_what_is_frozen_is_saved_and_loaded_too(two, tmp_path):
    assert two.run(freeze_and_load, str(tmp_path)) == [True, True]


def ahead(folder: str) -> list[str]:
    stage, zero = places(folder)["both"]
    engine = start(stage, **SPREAD, **zero)
    take_steps(engine, 3)
    (program,) = (program for (training, _), program in engine.schedule.programs.items() if training)
    return [f"{step.verb} {step.unit}" for step in program.steps if str(step.kind) == "param"]


def test_weights_are_read_ahead_of_the_unit_before(two, tmp_path):
    steps = two.run(ahead, str(tmp_path))[0]
    reads = [step.partition(" ")[2] for step in steps if step.startswith("read")]
    first, second, *_ = dict.fromkeys(reads)
    assert steps.index(f"read {second}") < steps.index(f"use {first}")


def test_rooms_are_given_back(tmp_path):
    stage, zero = places(str(tmp_path))["both"]
    engine = start(stage, **SPREAD, **zero)
    take_steps(engine, 2)
    engine.destroy()
    held = engine.report()["live"]
    assert {name: nbytes for name, nbytes in held.items() if name.startswith(("host ", "disk ")) and nbytes} == {}


def test_no_bit_that_flips_goes_unnoticed(tmp_path):
    dice = random.Random(0)
    file = UnnamedFile(str(tmp_path))
    spill = Spill(file)
    stored = Stored(spill, Desk(4096, Meter(), torch.device("cpu")), 3 * 4096 + 64, torch.float32, "states")
    values = torch.randn(stored.numel, generator=torch.Generator().manual_seed(0))
    stored.fill(values)
    handle = os.open(f"/proc/self/fd/{file.handle}", os.O_RDWR)  # not past the cache: single bytes
    noticed = 0
    for _ in range(FLIPS):
        tile = dice.choice(stored.tiles)
        at = tile.at + dice.randrange(tile.nbytes)
        (byte,) = os.pread(handle, 1, at)
        os.pwrite(handle, bytes([byte ^ 1 << dice.randrange(8)]), at)
        os.fsync(handle)
        stored.will_change()
        with pytest.raises(StorageError, match="does not have what was written to it"):
            stored.whole()
        noticed += 1
        os.pwrite(handle, bytes([byte]), at)
        os.fsync(handle)
    stored.will_change()
    assert noticed == FLIPS
    assert torch.equal(stored.whole(), values)
    os.close(handle)
    spill.close()


def test_a_tile_that_was_not_written_to_its_end_is_not_read_as_another(tmp_path):
    spill = Spill(UnnamedFile(str(tmp_path)))
    stored = Stored(spill, Desk(4096, Meter(), torch.device("cpu")), 4096, torch.float32, "states")
    assert torch.equal(stored.whole(), torch.zeros(4096)), "zeros at first"
    room = Room.make(4096 * 4, torch.device("cpu"))
    with pytest.raises(StorageError), _Failing(1, "EIO"):
        stored.write(0, room)
    stored.will_change()
    with pytest.raises(StorageError):
        stored.whole()
    spill.close()


def settle(engine) -> None:
    """Until no update is under way."""
    for unit in engine.schedule.units.values():
        for segment in unit.trained:
            segment.settle()


def read_in_parts(folder: str) -> dict[str, int]:
    """Bytes that this rank has read in a step in which every weight is read twice or so, and every state once."""
    stage, zero = places(folder)["both"]
    engine = start(stage, more=BF16, **SPREAD, **zero)
    take_steps(engine, 3)
    settle(engine)
    before = dict(engine.report()["moved"])
    take_steps(engine, 1, first=3)
    settle(engine)
    return {name: nbytes - before.get(name, 0) for name, nbytes in engine.report()["moved"].items()}


def test_every_rank_reads_its_own_part_and_no_more(worlds, tmp_path):
    found = {size: worlds[size].run(read_in_parts, str(tmp_path)) for size in (1, 2, 4)}
    alone = found[1][0]
    assert alone["disk read"] > 0
    for size in (2, 4):
        for rank in found[size]:
            assert rank["disk read"] == pytest.approx(alone["disk read"] / size, rel=0.25), "but for padding to pages"
            assert rank["disk written"] == pytest.approx(alone["disk written"] / size, rel=0.25)


def test_evaluation_reads_from_disk_as_well(tmp_path):
    stage, zero = places(str(tmp_path))["both"]
    engine = start(stage, **SPREAD, **zero)
    take_steps(engine, 2)
    engine.eval()
    with torch.no_grad():
        first, second = (engine(batch_of(5, 0)).item() for _ in range(2))
    engine.train()
    assert first == second
