"""Training that was saved goes on bit for bit: in the same world, and from any world, stage and precision into any other."""

from __future__ import annotations

import json
import math
import random
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from menagerie import DEVICE, MODELS, Noisy, batch_of, my_rank
from safetensors.torch import load_file
from test_parity import SOAK
from torch import Tensor, nn
from training import config_of, digest, digest_of_moments, digest_of_weights, engine_of, take_steps

from naught import utils
from naught.checkpoints import RealDisk, Store
from naught.cli import main
from naught.engine import Engine
from naught.errors import CheckpointDamaged, CheckpointError, NaughtError, StorageError, UsageError
from naught.saves.saving import Asked, begin, write
from naught.saves.snapshot import bytes_of
from naught.start import initialize

pytestmark = pytest.mark.usefixtures("one_thread")

RECIPES: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 2, "hysteresis": 1}},
}


class Reached(NamedTuple):
    """Where training is, as far as it must be the same anywhere."""

    weights: str
    moments: str
    updates: list[int]
    counts: tuple[int, int, int]


def reached(engine: Engine) -> Reached:
    updates = [count for unit in engine.schedule.units.values() for segment in unit.segments for count in segment.states.steps]
    counts = (engine.global_steps, engine.skipped_steps, engine.global_samples)
    return Reached(digest_of_weights(engine), digest_of_moments(engine), updates, counts)


def make(stage: int, name: str, recipe: str, *, seed: int = 0, accumulation: int = 1) -> Engine:
    torch.manual_seed(seed)
    warm_up = {"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-2, "warmup_num_steps": 4}}}
    model = Noisy() if name == "noisy" else MODELS[name]()
    return engine_of(model, config_of(stage, clip=0.5, accumulation=accumulation, more=RECIPES[recipe] | warm_up))


def saves(folder: Path, stage: int, name: str, recipe: str) -> Reached:
    engine = make(stage, name, recipe)
    take_steps(engine, 3)
    engine.save_checkpoint(str(folder), client_state={"epoch": 2, "names": ["a"]})
    return reached(engine)


def loads(folder: Path, stage: int, name: str, recipe: str) -> tuple[Reached, list[float]]:
    engine = make(stage, name, recipe, seed=1)
    path, client_state = engine.load_checkpoint(str(folder))
    assert path.endswith("global_step3")
    assert client_state == {"epoch": 2, "names": ["a"]}
    before = reached(engine)
    return before, take_steps(engine, 1, first=3)


# (from: world, stage), (to: world, stage), model, recipe; NAUGHT_SOAK=1 runs the product.
SELECTION = [
    ((1, 0), (2, 3), "plain", "fp32"),
    ((2, 3), (1, 0), "tied", "bf16"),
    ((2, 1), (3, 2), "frozen", "fp32"),
    ((3, 2), (2, 1), "uneven_sizes_and_users_hooks", "bf16"),
    ((4, 3), (3, 0), "lora", "fp16"),
    ((3, 0), (4, 3), "unused_parameters", "fp32"),
    ((2, 2), (4, 1), "block_used_twice", "fp16"),
    ((4, 1), (1, 3), "experts_by_rank_and_batch", "bf16"),
    ((1, 3), (3, 3), "checkpoint_reentrant", "fp16"),
]
WORLDS_AND_STAGES = list(product((1, 2, 3, 4), (0, 1, 2, 3)))
EVERYTHING = list(product(WORLDS_AND_STAGES, WORLDS_AND_STAGES, ("tied", "uneven_sizes_and_users_hooks", "frozen"), RECIPES))


@pytest.mark.parametrize(("before", "after", "name", "recipe"), EVERYTHING if SOAK else SELECTION)
def test_a_checkpoint_loads_at_any_world_and_stage(worlds, tmp_path, before, after, name, recipe):
    saved = worlds[before[0]].run(saves, tmp_path, before[1], name, recipe)
    found = worlds[after[0]].run(loads, tmp_path, after[1], name, recipe)
    for (there, losses), _ in zip(found, range(after[0]), strict=True):
        assert there.weights == saved[0].weights
        assert there.moments == saved[0].moments
        assert there.updates == saved[0].updates
        assert there.counts == saved[0].counts
        assert math.isfinite(losses[0]), "and it trains"
    again = worlds[after[0]].run(loads, tmp_path, 3 - after[1], name, recipe)
    if name not in ("experts_by_rank_and_batch", "unused_parameters"):
        assert [losses for _, losses in again] == [losses for _, losses in found], "alike from there on at another stage"


def bytes_of_tensors(folder: Path, stage: int) -> int:
    engine = make(stage, "plain", "bf16")
    take_steps(engine, 1)
    engine.save_checkpoint(folder / str(stage))
    store = Store(RealDisk(), str(folder / str(stage)))
    saved = store.find("global_step1")
    tables = [store.table(saved, rank) for rank in range(saved.manifest.world)]
    return sum(run.stop - run.start for table in tables for run in table.runs if run.kind != "own")


def test_every_element_is_written_once_at_every_stage(two, tmp_path):
    sizes = {two.run(bytes_of_tensors, tmp_path, stage)[0] for stage in range(4)}
    numel = sum(param.numel() for param in MODELS["plain"]().parameters())
    assert len(sizes) == 1
    assert sizes.pop() == pytest.approx(12 * numel, rel=0.02), "masters and two moments, and some padding"


def into_another_precision(folder: Path, recipe: str) -> str:
    engine = make(2, "plain", recipe, seed=1)
    engine.load_checkpoint(str(folder))
    return digest([utils.safe_get_full_fp32_param(param) for param in engine.module.parameters()])


@pytest.mark.parametrize(("before", "after"), [("fp32", "bf16"), ("bf16", "fp32"), ("fp16", "bf16")])
def test_masters_go_from_any_precision_into_any_other(two, tmp_path, before, after):
    two.run(saves, tmp_path, 3, "plain", before)
    assert two.run(into_another_precision, tmp_path, after) == two.run(into_another_precision, tmp_path, before)


# --- the same world -----------------------------------------------------------------------------------------------------


def without_a_stop(stage: int, name: str, recipe: str) -> tuple[list[float], Reached, list[float]]:
    engine = make(stage, name, recipe, accumulation=2)
    random.seed(my_rank())
    losses = take_steps(engine, 12)
    return losses[6:], reached(engine), [random.random(), torch.rand(()).item(), *engine.get_lr()]


def with_a_stop(folder: Path, stage: int, name: str, recipe: str) -> tuple[list[float], Reached, list[float]]:
    engine = make(stage, name, recipe, accumulation=2)
    random.seed(my_rank())
    take_steps(engine, 6)
    engine.save_checkpoint(folder)
    engine.destroy()
    random.seed(99)
    engine = make(stage, name, recipe, accumulation=2, seed=7)
    engine.load_checkpoint(folder, tag="global_step3")
    losses = take_steps(engine, 6, first=6)
    return losses, reached(engine), [random.random(), torch.rand(()).item(), *engine.get_lr()]


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_stop_changes_nothing(two, tmp_path, stage, recipe):
    """Dropout, running statistics, the schedule of the rate and the scale of the loss included."""
    name = "noisy" if recipe == "fp32" else "tied"
    assert two.run(with_a_stop, tmp_path, stage, name, recipe) == two.run(without_a_stop, stage, name, recipe)


def foreign(folder: Path, *, stop: bool) -> str:
    """An optimizer of the user's with numbers of its own, two groups, and a scheduler of torch's."""

    def engine_anew() -> Engine:
        torch.manual_seed(0)
        model = MODELS["plain"]().to(DEVICE)
        groups = [
            {"params": [p for p in model.parameters() if p.ndim > 1]},
            {"params": [p for p in model.parameters() if p.ndim < 2]},
        ]
        optimizer = torch.optim.NAdam(groups, lr=1e-2)
        rates = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
        config = config_of(2)
        del config["optimizer"]
        return initialize(model=model, config=config, optimizer=optimizer, lr_scheduler=rates)[0]

    engine = engine_anew()
    take_steps(engine, 3)
    if stop:
        engine.save_checkpoint(folder)
        engine.destroy()
        engine = engine_anew()
        engine.load_checkpoint(folder)
    take_steps(engine, 3, first=3)
    return digest_of_weights(engine)


def test_users_optimizers_and_schedulers_go_on_too(two, tmp_path):
    assert two.run(foreign, tmp_path, stop=True) == two.run(foreign, tmp_path, stop=False)


# --- parts of it ----------------------------------------------------------------------------------------------------------


def test_weights_alone_and_models_that_have_grown(tmp_path):
    saves(tmp_path, 1, "plain", "fp32")
    engine = make(1, "plain", "fp32", seed=3)
    engine.load_checkpoint(tmp_path, load_module_only=True)
    assert (engine.global_steps, engine.report()["live"].get("states", 0)) == (0, 0)
    assert digest_of_weights(engine) == saved_weights(tmp_path)
    engine = make(1, "plain", "fp32", seed=3)
    engine.load_checkpoint(tmp_path, load_optimizer_states=False, load_lr_scheduler_states=False)
    assert engine.global_steps == 3
    assert engine.get_lr() == make(1, "plain", "fp32").get_lr()

    model = MODELS["plain"]()
    model.extra = nn.Linear(2, 2)
    engine = engine_of(model, config_of(1))
    with pytest.raises(CheckpointError, match=r'another model: 2 tensors missing in it \("extra.weight", "extra.bias"\)'):
        engine.load_checkpoint(tmp_path)
    engine.load_checkpoint(tmp_path, load_module_strict=False)


def saved_weights(folder: Path) -> str:
    engine = make(0, "plain", "fp32", seed=5)
    engine.load_checkpoint(folder)
    return digest_of_weights(engine)


def test_frozen_parameters_can_be_left_out(tmp_path):
    engine = make(3, "lora", "bf16")
    take_steps(engine, 1)
    engine.save_checkpoint(tmp_path, tag="all")
    engine.save_checkpoint(tmp_path, tag="thin", exclude_frozen_parameters=True)
    sizes = {tag: sum(path.stat().st_size for path in (tmp_path / tag).glob("*.safetensors")) for tag in ("all", "thin")}
    assert sizes["thin"] < sizes["all"] / 2
    assert (tmp_path / "latest").read_text() == "thin\n"


# --- mistakes and failures --------------------------------------------------------------------------------------------------


def test_mistakes_with_checkpoints(tmp_path):
    engine = make(2, "plain", "fp32", accumulation=2)
    with pytest.raises(CheckpointError, match="there is no whole checkpoint in"):
        engine.load_checkpoint(tmp_path)
    take_steps(engine, 1)
    with pytest.raises(UsageError, match="a step that is not over"):
        engine.save_checkpoint(tmp_path)
    take_steps(engine, 1)
    with pytest.raises(CheckpointError, match="cannot be written as JSON"):
        engine.save_checkpoint(tmp_path, client_state={"model": engine})
    engine.save_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match="never overwritten"):
        engine.save_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match=r"no checkpoint .*other. Whole ones here: global_step1"):
        engine.load_checkpoint(tmp_path, tag="other")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["global_step1", "latest"]


def one_rank_fails(folder: Path, what: str) -> tuple[str, list[str], str, list[float]]:
    engine = make(3, "plain", "fp32")
    take_steps(engine, 1)
    engine.save_checkpoint(folder)
    take_steps(engine, 1, first=1)
    path = folder / "global_step1" / "rank-00001.safetensors"
    before = reached(engine)
    try:
        if what == "tag":
            engine.save_checkpoint(folder, tag=f"by{my_rank()}")
        elif what == "damage":
            if my_rank() == 0:
                raw = bytearray(path.read_bytes())
                raw[-50] ^= 4
                path.write_bytes(raw)
            torch.distributed.barrier()
            engine.load_checkpoint(folder)
        elif what == "beside":
            engine.save_checkpoint(folder, asynchronous=my_rank() == 1)
        elif what == "other tag":
            engine.load_checkpoint(folder, tag=f"a{my_rank()}")
        else:
            engine.save_checkpoint(folder, client_state={"fine": my_rank} if my_rank() == 1 else {})
    except NaughtError as error:
        said = f"{type(error).__name__}: {error}"
    else:
        said = "nothing"
    assert reached(engine) == before
    return said, sorted(path.name for path in folder.iterdir()), before.weights, take_steps(engine, 1, first=2)


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("tag", "different saves: tag is by0, by1"),
        ("damage", "rank-00001.safetensors is damaged"),
        ("client", "cannot be written as JSON"),
        ("beside", "different saves: beside is False, True"),
        ("other tag", "want to load different tags: a0, a1"),
    ],
)
def test_what_fails_on_one_rank_fails_on_all_and_changes_nothing(two, tmp_path, what, words):
    for said, names, *_ in two.run(one_rank_fails, tmp_path, what):
        assert words in said
        assert names == ["global_step1", "latest"]


class FullDisk(RealDisk):
    """A disk that has room for nothing more at one of its calls."""

    def __init__(self, at: int) -> None:
        self.left = at

    def create(self, path: str, nbytes: int) -> Any:
        self.left -= 1
        if self.left < 0:
            raise StorageError(f"cannot find room for {nbytes} bytes in {path}: No space left on device (ENOSPC)")
        return super().create(path, nbytes)


def save_to(engine: Engine, store: Store) -> None:
    begun = begin(engine, store, Asked(f"global_step{engine.global_steps}"), {})
    write(begun, engine.schedule.group, lambda: bytes_of(begun.tensors))


def fills_up(folder: Path, at: int) -> tuple[str, list[str]]:
    engine = make(2, "plain", "fp32")
    take_steps(engine, 1)
    disk = FullDisk(at) if my_rank() == 1 else RealDisk()
    try:
        save_to(engine, Store(disk, str(folder)))
    except NaughtError as error:
        names = sorted(path.name for path in folder.iterdir())
        save_to(engine, Store(RealDisk(), str(folder)))  # there is room again
        return str(error), names
    return "nothing", []


@pytest.mark.parametrize("at", [0, 1])
def test_a_disk_that_is_full_on_one_rank_leaves_nothing_and_the_next_save_works(two, tmp_path, at):
    for said, names in two.run(fills_up, tmp_path, at):
        assert "ENOSPC" in said
        assert names == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["global_step1", "latest"]
    Store(RealDisk(), str(tmp_path)).verify(Store(RealDisk(), str(tmp_path)).find("global_step1"))


def test_a_disk_that_fails_between_the_two_readings_leaves_an_engine_that_says_so(tmp_path, monkeypatch):
    saves(tmp_path, 1, "plain", "fp32")
    engine = make(1, "plain", "fp32", seed=1)
    calls = iter(range(10_000))
    fine = RealDisk.read

    def failing(disk: RealDisk, path: str, start: int, stop: int, into: memoryview | None = None) -> memoryview:
        if path.endswith(".safetensors") and next(calls) == failing_at:
            raise CheckpointDamaged(f"{path} is damaged now")
        return fine(disk, path, start, stop, into)

    failing_at = -1
    monkeypatch.setattr(RealDisk, "read", failing)
    make(1, "plain", "fp32").load_checkpoint(tmp_path)
    failing_at = next(calls) - 1
    calls = iter(range(10_000))
    with pytest.raises(CheckpointDamaged):
        engine.load_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match="were being loaded when this happened"):
        engine(batch_of(0, 0))


# --- what models, schedules and callers have ---------------------------------------------------------------------------------


class Odd(nn.Module):
    """Buffers of every kind."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("strided", torch.arange(8.0)[::2])
        self.register_buffer("column", torch.arange(12.0).reshape(3, 4)[:, 1])
        self.register_buffer("spread", torch.full((1,), 3.0).expand(4))
        self.register_buffer("turns", torch.polar(torch.ones(4), torch.arange(4.0)))
        self.register_buffer("flags", torch.tensor([True, False]))
        self.register_buffer("large", torch.arange(600_000.0))
        self.register_buffer("none", torch.zeros(0))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).square().mean()


def buffers_of(module: nn.Module) -> dict[str, list[Any]]:
    return {name: buffer.tolist() for name, buffer in module.named_buffers()}


@pytest.mark.parametrize("beside", [False, True])
def test_buffers_of_every_kind_come_back(tmp_path, beside):
    engine = engine_of(Odd(), config_of(2))
    wanted = buffers_of(engine.module)
    engine.save_checkpoint(tmp_path, asynchronous=beside)
    engine.wait_for_checkpoint()
    fresh = engine_of(Odd(), config_of(0))
    with torch.no_grad():
        for name, buffer in fresh.module.named_buffers():
            if name != "spread":
                buffer.zero_()
    fresh.module.spread = torch.zeros(1, device=DEVICE).expand(4)
    fresh.load_checkpoint(tmp_path)
    assert buffers_of(fresh.module) == wanted
    engine.save_16bit_model(tmp_path / "whole")
    other = engine_of(Odd(), config_of(3))
    other.module.strided.zero_()
    other.module.spread = torch.zeros(1, device=DEVICE).expand(4)
    other.load_weights(tmp_path / "whole")
    assert buffers_of(other.module) == wanted


def test_a_type_that_cannot_be_saved_is_named(tmp_path):
    model = Odd()
    model.register_buffer("wide", torch.zeros(2, dtype=torch.complex128))
    with pytest.raises(CheckpointError, match=r'"buffer:wide" is of the type torch.complex128'):
        engine_of(model, config_of(1)).save_checkpoint(tmp_path)


def damaged_buffer_on_one_rank(folder: Path) -> tuple[str, bool, list[float]]:
    engine = engine_of(Odd(), config_of(1))
    engine.backward(engine(torch.ones(2, 4, device=DEVICE)))
    engine.step()
    engine.save_checkpoint(folder)
    path = folder / "global_step1" / "rank-00001.safetensors"
    if my_rank() == 0:
        raw = bytearray(path.read_bytes())
        raw[len(raw) // 2] ^= 4
        path.write_bytes(raw)
    engine.schedule.group.meet()
    torch.manual_seed(5)
    other = engine_of(Odd(), config_of(1))
    before = digest_of_weights(other)
    try:
        other.load_checkpoint(folder)
    except CheckpointDamaged as error:
        said = str(error)
    else:
        said = "nothing"
    assert other.report()["live"].get("states", 0) == 0, "what was made for it is gone"
    loss = other(torch.ones(2, 4, device=DEVICE))
    other.backward(loss)
    return said, digest_of_weights(other) == before, [loss.item()]


def test_a_buffer_that_is_damaged_on_one_rank_changes_nothing_on_any(two, tmp_path):
    for said, same, losses in two.run(damaged_buffer_on_one_rank, tmp_path):
        assert "rank-00001.safetensors is damaged" in said
        assert same
        assert math.isfinite(losses[0])


def with_schedule(make_rates: Any) -> Engine:
    torch.manual_seed(0)
    model = MODELS["plain"]().to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    config = config_of(1)
    del config["optimizer"]
    return initialize(model=model, config=config, optimizer=optimizer, lr_scheduler=make_rates(optimizer))[0]


rate = torch.optim.lr_scheduler
SCHEDULES = {
    "sequential": lambda o: rate.SequentialLR(o, [rate.ConstantLR(o, 0.5, 2), rate.MultiStepLR(o, [1, 3])], [2]),
    "several steps": lambda o: rate.MultiStepLR(o, [1, 3], 0.5),
    "cosine": lambda o: rate.CosineAnnealingWarmRestarts(o, 3),
    "cycle": lambda o: rate.OneCycleLR(o, 0.2, 10),
}


@pytest.mark.parametrize("kind", SCHEDULES)
def test_schedules_of_torch_go_on(tmp_path, kind):
    engine = with_schedule(SCHEDULES[kind])
    take_steps(engine, 2)
    engine.save_checkpoint(tmp_path)
    rates = [take_steps(engine, 1, first=2 + at) and engine.get_lr() for at in range(4)]
    fresh = with_schedule(SCHEDULES[kind])
    fresh.load_checkpoint(tmp_path)
    assert [take_steps(fresh, 1, first=2 + at) and fresh.get_lr() for at in range(4)] == rates


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("schedule", "the checkpoint's schedule is a MultiStepLR, and the engine's a SequentialLR"),
        ("optimizer", "of another optimizer: it has exp_avg, exp_avg_sq"),
        ("groups", "has 1 parameter groups, and the optimizer 2"),
    ],
)
def test_another_optimizer_or_schedule_is_told_before_anything_changes(tmp_path, how, words):
    engine = with_schedule(SCHEDULES["several steps"])
    take_steps(engine, 1)
    engine.save_checkpoint(tmp_path)
    if how == "schedule":
        other = with_schedule(SCHEDULES["sequential"])
    elif how == "optimizer":
        other = engine_of(MODELS["plain"](), config_of(1, optimizer="SGD", params={"lr": 0.1}))
    else:
        model = MODELS["plain"]().to(DEVICE)
        first, *rest = model.parameters()
        config = config_of(1)
        del config["optimizer"]
        optimizer = torch.optim.AdamW([{"params": [first]}, {"params": rest}], lr=0.1)
        other = initialize(model=model, config=config, optimizer=optimizer)[0]
    before = reached(other)
    with pytest.raises(CheckpointError, match=words):
        other.load_checkpoint(tmp_path)
    assert reached(other) == before
    take_steps(other, 1)
    other.load_checkpoint(tmp_path, load_lr_scheduler_states=False, load_optimizer_states=False)
    assert digest_of_weights(other) == digest_of_weights(engine)


@pytest.mark.parametrize(
    "state",
    [
        {"best": math.inf, "worst": -math.inf, "counts": {1: (2, 3), "1": 4, None: [True]}, "text": "ä", "$": 5},
        {"deep": [[[[{"a": [1.5]}]]]], "large": 2**80, "nothing": {}},
    ],
)
def test_what_a_caller_wants_to_remember_comes_back_as_it_was(tmp_path, state):
    engine = make(0, "plain", "fp32")
    engine.save_checkpoint(tmp_path, client_state=state)
    assert engine.load_checkpoint(tmp_path)[1] == state


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ({"x": "\ud800"}, "cannot be written as UTF-8"),
        ({"a": {"b": [object()]}}, r"client_state.a.b\[0\] is a object, which cannot be written as JSON"),
        ({"tensor": torch.zeros(2)}, "client_state.tensor is a Tensor"),
    ],
)
def test_what_cannot_be_remembered_is_refused_by_name(tmp_path, state, words):
    engine = make(0, "plain", "fp32")
    with pytest.raises(CheckpointError, match=words):
        engine.save_checkpoint(tmp_path, client_state=state)
    deep: list[Any] = []
    for _ in range(5000):
        deep = [deep]
    with pytest.raises(CheckpointError, match="nested too deeply"):
        engine.save_checkpoint(tmp_path, client_state={"deep": deep})


def test_a_tag_need_not_be_a_text(tmp_path):
    engine = make(0, "plain", "fp32")
    engine.save_checkpoint(tmp_path, 0.693)
    assert engine.load_checkpoint(tmp_path, 0.693)[0].endswith("/0.693")


def test_a_damaged_manifest_is_told_though_an_older_one_is_whole(tmp_path, caplog, capsys):
    engine = make(1, "plain", "fp32")
    for step in range(2):
        take_steps(engine, 1, first=step)
        engine.save_checkpoint(tmp_path)
    path = tmp_path / "global_step2" / "manifest.json"
    raw = bytearray(path.read_bytes())
    raw[200] ^= 1
    path.write_bytes(raw)
    assert engine.load_checkpoint(tmp_path)[0].endswith("global_step1")
    assert "a checkpoint is passed over" in caplog.text
    assert main(["ckpt", "verify", str(tmp_path)]) == 1
    assert "manifest.json does not have the digest" in capsys.readouterr().out
    with pytest.raises(CheckpointError, match="is a checkpoint itself"):
        engine.load_checkpoint(tmp_path / "global_step1")


def resumed_epoch(folder: Path, *, stop: bool) -> list[str]:
    """Dropout and shuffled data, stopped in the middle of an epoch."""

    def anew() -> Any:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(1, 8), nn.Dropout(0.3), nn.Linear(8, 1)).to(DEVICE)
        return initialize(model=model, config=config_of(1), training_data=[torch.full((1,), float(at)) for at in range(20)])

    losses: list[str] = []
    engine, _, loader, _ = anew()
    while engine.global_steps < 9:
        for batch in loader:
            loss = engine(batch.to(DEVICE)).square().mean()
            engine.backward(loss)
            engine.step()
            losses.append(loss.item().hex())
            if engine.global_steps == 7 and stop:
                engine.save_checkpoint(folder)
                engine, _, loader, _ = anew()
                engine.load_checkpoint(folder)
                break
            if engine.global_steps == 9:
                break
    return losses


def test_losses_go_on_in_the_middle_of_an_epoch(two, tmp_path):
    assert two.run(resumed_epoch, tmp_path, stop=True) == two.run(resumed_epoch, tmp_path, stop=False)


def test_going_back_while_the_data_is_being_iterated(tmp_path):
    data = [torch.full((1,), float(at)) for at in range(12)]
    model = nn.Linear(1, 1).to(DEVICE)
    engine, _, loader, _ = initialize(model=model, config=config_of(0), training_data=data)
    engine.save_checkpoint(tmp_path)
    for at, _ in enumerate(loader):
        if at == 2:
            engine.load_checkpoint(tmp_path)
    assert loader.state_dict() == {"epoch": 0, "samples": 0}
    assert len(list(loader)) == 6


# --- weights for others -----------------------------------------------------------------------------------------------------


def exports(folder: Path, stage: int) -> tuple[list[str], str, str]:
    engine = make(stage, "tied", "bf16")
    take_steps(engine, 2)
    state = engine.module_state_dict()
    engine.save_16bit_model(folder, f"stage{stage}.bin")
    with engine.gathered():
        plain = engine.module.state_dict()
        assert list(state) == list(plain)
        assert all(torch.equal(state[name], plain[name].cpu()) for name in plain)
    other = make(stage, "tied", "bf16", seed=4)
    other.load_module_state_dict(state)
    assert digest_of_weights(other) == digest_of_weights(engine)
    loaded = load_file(folder / f"stage{stage}.safetensors")
    fresh = MODELS["tied"]().bfloat16()
    missing, unexpected = fresh.load_state_dict(loaded, strict=False)
    assert not unexpected
    assert digest([tensor.cpu() for tensor in fresh.state_dict().values()]) == digest(list(state.values())), missing
    return (
        list(loaded),
        digest(list(state.values())),
        str(loaded["head.weight" if "head.weight" in loaded else "tok.weight"].dtype),
    )


def test_whole_weights_can_be_had_and_written_as_safetensors(two, tmp_path):
    runs = [two.run(exports, tmp_path, stage) for stage in range(4)]
    assert all(run == runs[0] for run in runs)
    assert runs[0][0][2] == "torch.bfloat16"


# --- the command ------------------------------------------------------------------------------------------------------------


def test_the_command_tells_what_is_there_and_what_is_damaged(tmp_path, capsys):
    saves(tmp_path, 2, "lora", "bf16")
    assert main(["ckpt", "info", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "global_step3" in shown
    assert "exp_avg F32, exp_avg_sq F32, weights BF16, weights F32" in shown
    assert main(["ckpt", "info", str(tmp_path / "global_step3"), "--json"]) == 0
    (facts,) = json.loads(capsys.readouterr().out)
    model = MODELS["lora"]()
    assert facts["parameters"] == sum(param.numel() for param in model.parameters())
    assert facts["trained"] == sum(param.numel() for param in model.parameters() if param.requires_grad)
    assert facts["client_state"] == {"epoch": 2, "names": ["a"]}
    assert main(["ckpt", "verify", str(tmp_path), "global_step3"]) == 0
    assert "every byte is what was written" in capsys.readouterr().out
    path = tmp_path / "global_step3" / "rank-00000.safetensors"
    raw = bytearray(path.read_bytes())
    raw[1000] ^= 1
    path.write_bytes(raw)
    assert main(["ckpt", "verify", str(tmp_path)]) == 1
    assert "rank-00000.safetensors is damaged in chunk 0" in capsys.readouterr().out


def test_mistakes_with_the_command_get_one_line(tmp_path, capsys):
    assert main(["ckpt", "info", str(tmp_path / "nowhere")]) == 2
    assert main(["ckpt", "verify", str(tmp_path)]) == 2
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 2
    assert "is not a folder" in said[0]
    assert "there is no whole checkpoint" in said[1]


@pytest.mark.parametrize("tag", ["global_step5", None])
def test_pickles_of_others_are_refused_with_the_way_to_convert_them(tmp_path, tag, capsys):
    folder = tmp_path / "global_step5"
    folder.mkdir()
    (tmp_path / "latest").write_text("global_step5")
    (folder / "mp_rank_00_model_states.pt").write_bytes(b"\x80\x04.")
    with pytest.raises(CheckpointError, match=r"pickles, which can run any code: .* zero_to_fp32\.py"):
        make(0, "plain", "fp32").load_checkpoint(tmp_path, tag=tag)
    assert main(["ckpt", "info", str(tmp_path)]) == 2
    assert "pickles" in capsys.readouterr().err
