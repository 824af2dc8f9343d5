"""The engine as its users treat it: what it moves and holds, in what order, and what happens when things go wrong."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from menagerie import MODELS, WIDTH, Plain, batch_of, my_rank
from torch import nn
from training import config_of, digest, digest_of_weights
from workers import WorkerError, World

import naught
from naught.engine import initialize
from naught.errors import ModelError, RankMismatch, UsageError
from naught.holding import Buffer, simulate
from naught.steps import Pass


@pytest.fixture(scope="module")
def two() -> Iterator[World]:
    world = World(2)
    yield world
    world.stop()


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """As many as the workers have: a matrix product rounds by its number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def start(stage: int, name: str = "plain", **options):
    torch.manual_seed(0)
    return initialize(model=MODELS[name](), config=config_of(stage, **options))[0]


def take_steps(engine, steps: int = 1, first: int = 0) -> list[float]:
    losses = []
    for step in range(first, first + steps):
        loss = engine(batch_of(step, my_rank()))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


# --- what is moved and held -------------------------------------------------------------------------------------------


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


def by_phase(stage: int) -> tuple[dict[str, int], dict[str, dict[str, int]], int, int]:
    engine = start(stage, overlap_comm=False)  # what is fetched ahead would count for the phase before
    take_steps(engine, 2)
    ledger = engine.schedule.group.ledger
    ledger.sent.clear()
    take_steps(engine, 1, first=2)
    sent = dict.fromkeys(("forward", "backward", "step"), 0)
    for (_, _, phase), nbytes in ledger.sent.items():
        sent[phase] += nbytes
    sizes = [unit.sizes().weights for unit in engine.schedule.units.values()]
    return sent, engine.report()["after"], sum(sizes), sizes[0] + sizes[-1]


@pytest.mark.parametrize("stage", range(4))
def test_the_table_of_the_how_it_works_page_does_not_lie(two, stage):
    page = (Path(__file__).parent.parent / "docs" / "how-it-works.md").read_text(encoding="utf-8")
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines() if line.startswith(f"| {stage} |")
    ]
    assert [row[1] for row in rows] == ["forward", "backward", "step"]
    for sent, after, whole, kept in two.run(by_phase, stage):
        for _, phase, params, grads, states, _, sends in rows:
            psi = int(sends.split()[0]) * whole - (kept if stage == 3 and phase == "backward" else 0)
            assert sent[phase] == psi // 2, phase
            cells = after[phase]
            split = {"weights": params.startswith("1/N") or (stage == 3), "states": states == "1/N"}
            assert cells["weights"] == whole // (2 if split["weights"] else 1)
            assert cells["states"] == 2 * whole // (2 if split["states"] else 1)
            found = sum(cells.get(buffer, 0) for buffer in (Buffer.WHOLE_GRADS, Buffer.OWNED_GRADS, Buffer.GRAD_FLATS))
            wanted = {"whole": whole, "-": 0, "let go": 0}.get(grads, whole // 2)
            assert found == wanted


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


def log_of(stage: int, name: str) -> list[tuple[str, str, str]]:
    engine = start(stage, name)
    take_steps(engine, 4)
    log = [tuple(map(str, step)) for step in engine.schedule.log if step.verb in ("gather", "reduce")]
    engine.destroy()
    return log


@pytest.mark.parametrize("name", ["plain", "checkpoint_reentrant", "block_skipped_on_one_rank", "experts_by_rank_and_batch"])
def test_every_rank_issues_the_same_collectives_in_the_same_order(two, name):
    for stage in (1, 3):
        one, other = two.run(log_of, stage, name)
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


# --- ways to train ----------------------------------------------------------------------------------------------------


def plain_calls(stage: int) -> tuple[list[float], str]:
    torch.manual_seed(0)
    engine, optimizer, *_ = initialize(model=MODELS["plain"](), config=config_of(stage))
    losses = []
    for step in range(3):
        loss = engine(batch_of(step, my_rank()))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, digest_of_weights(engine)


def engine_calls(stage: int) -> tuple[list[float], str]:
    engine = start(stage)
    return take_steps(engine, 3), digest_of_weights(engine)


@pytest.mark.parametrize("stage", range(4))
def test_plain_backward_and_optimizer_step_do_the_same(two, stage):
    assert two.run(plain_calls, stage) == two.run(engine_calls, stage)


def two_backwards(stage: int, *, unsynced: bool) -> str:
    """Two losses before one step: as good as their sum."""
    from contextlib import nullcontext

    engine = start(stage)
    for step in range(2):
        with engine.no_sync() if unsynced else nullcontext():
            engine(batch_of(2 * step, my_rank())).backward()
        engine(batch_of(2 * step + 1, my_rank())).backward()
        engine.optimizer.step()
    return digest_of_weights(engine)


@pytest.mark.parametrize("unsynced", [False, True])
def test_several_backwards_before_a_step_add_up_at_every_stage(two, unsynced):
    found = [two.run(two_backwards, stage, unsynced=unsynced)[0] for stage in range(4)]
    assert found[0] == found[1]
    assert found[2] == found[3]


def two_forwards(stage: int) -> str:
    engine = start(stage)
    for step in range(3):
        loss = engine(batch_of(2 * step, my_rank())) + engine(batch_of(2 * step + 1, my_rank()))
        engine.backward(loss)
        engine.step()
    return digest_of_weights(engine)


def test_two_forwards_before_one_backward(two):
    found = [two.run(two_forwards, stage)[0] for stage in range(4)]
    assert len(set(found)) == 1


def evaluates_between(stage: int) -> tuple[list[float], str]:
    engine = start(stage)
    losses = []
    for step in range(3):
        losses += take_steps(engine, 1, first=step)
        engine.eval()
        with torch.no_grad():
            for batch in range(2):
                losses.append(engine(batch_of(90 + batch, my_rank())).item())
            losses.append(float(engine.module.head(engine.module.norm(engine.module.tok(batch_of(99, 0)))).sum()))
        engine.train()
    return losses, digest_of_weights(engine)


def test_evaluation_and_calls_of_parts_between_steps_change_nothing(two):
    found = [two.run(evaluates_between, stage) for stage in range(4)]
    assert all(run == found[0] for run in found)
    assert found[0][0][1] == two.run(engine_calls, 0)[0][1]


def two_engines(stage: int) -> tuple[list[float], list[float]]:
    one, other = start(stage), start(3 - stage, "tied")
    losses: tuple[list[float], list[float]] = ([], [])
    for step in range(3):
        losses[0].extend(take_steps(one, 1, first=step))
        losses[1].extend(take_steps(other, 1, first=step))
    return losses


def test_two_engines_live_beside_each_other(two):
    both = two.run(two_engines, 3)
    assert both[0][0] == two.run(engine_calls, 3)[0][0]
    assert both[0] == two.run(two_engines, 0)[0]


def changing_rate(stage: int) -> str:
    engine = start(stage)
    for step in range(3):
        engine.optimizer.param_groups[0]["lr"] = 1e-2 / (step + 1)
        take_steps(engine, 1, first=step)
    return digest_of_weights(engine)


def test_the_learning_rate_can_be_changed_between_steps(two):
    assert len({two.run(changing_rate, stage)[0] for stage in range(4)} | {two.run(engine_calls, 0)[0][1]}) == 2


def compiled_blocks(stage: int) -> list[float]:
    import warnings

    torch.manual_seed(0)
    model = MODELS["plain"]()
    engine = initialize(model=model, config=config_of(stage))[0]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for block in model.blocks:
            block.forward = torch.compile(block.forward, backend="eager")
        return take_steps(engine, 3)


def test_a_users_own_compile_of_the_blocks(two):
    assert two.run(compiled_blocks, 3)[0] == pytest.approx(two.run(engine_calls, 3)[0][0], rel=1e-5)


# --- what goes wrong --------------------------------------------------------------------------------------------------


class Faulty(Plain):
    fault = ""

    def body(self, x):
        x = self.blocks[0](x)
        if self.fault == "forward":
            raise ValueError("bad batch")
        if self.fault == "backward":
            x.register_hook(lambda _: (_ for _ in ()).throw(ValueError("bad gradient")))
        return self.blocks[2](self.blocks[1](x))


def survives(stage: int, fault: str) -> tuple[list[float], str, dict]:
    torch.manual_seed(0)
    model = Faulty()
    engine = initialize(model=model, config=config_of(stage))[0]
    losses = take_steps(engine, 2)
    model.fault = fault
    if fault:
        with pytest.raises(ValueError, match="bad"):
            engine.backward(engine(batch_of(50, my_rank())))
        model.fault = ""
    losses += take_steps(engine, 2, first=2)
    live = {name: nbytes for name, nbytes in engine.report()["live"].items() if nbytes}
    return losses, digest_of_weights(engine), live


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("fault", ["forward", "backward"])
def test_an_exception_in_the_middle_of_a_pass_leaves_the_engine_as_it_was(two, stage, fault):
    assert two.run(survives, stage, fault) == two.run(survives, stage, "")


def poisoned(stage: int) -> tuple[str, str, int, str]:
    engine = start(stage, clip=0.5)
    take_steps(engine, 2)
    before = digest_of_weights(engine)
    loss = engine(batch_of(2, my_rank()))
    engine.backward(loss * (float("nan") if my_rank() == 1 else 1.0))
    engine.step()
    after = digest_of_weights(engine)
    take_steps(engine, 1, first=3)
    return before, after, engine.skipped_steps, digest_of_weights(engine)


def unpoisoned(stage: int) -> str:
    engine = start(stage, clip=0.5)
    take_steps(engine, 2)
    take_steps(engine, 1, first=3)
    return digest_of_weights(engine)


@pytest.mark.parametrize("stage", range(4))
def test_a_gradient_that_is_not_finite_on_one_rank_changes_nothing_on_any(two, stage):
    for before, after, skipped, later in two.run(poisoned, stage):
        assert before == after
        assert skipped == 1
        assert later == two.run(unpoisoned, stage)[0]


def starts_otherwise(what: str) -> str:
    torch.manual_seed(0)
    model = MODELS["plain"]()
    config = config_of(3)
    if my_rank() == 1:
        if what == "configuration":
            config["zero_optimization"]["stage"] = 2
        elif what == "shape":
            model.blocks[1].up = nn.Linear(WIDTH, 96)
        elif what == "trainability":
            model.norm.requires_grad_(False)
        elif what == "tie":
            model.head.weight = model.tok.weight
        elif what == "name":
            model.other = model.__dict__["_modules"].pop("head")
        elif what == "extra":
            model.extra = nn.Linear(2, 2)
    with pytest.raises(RankMismatch) as raised:
        initialize(model=model, config=config)
    return str(raised.value)


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("configuration", "configuration key zero_optimization.stage: 3 on rank 0, 2 on rank 1"),
        (
            "shape",
            '"blocks.1.up.weight" [128, 64] float32, trained on rank 0, "blocks.1.up.weight" [96, 64] float32, trained on rank 1',
        ),
        ("trainability", '"norm.weight" [64] float32, trained on rank 0, "norm.weight" [64] float32, frozen on rank 1'),
        ("tie", 'tied to "tok.weight" on rank 1'),
        ("name", '"other.weight" [64, 64] float32, trained on rank 1'),
        ("extra", 'none on rank 0, "extra.weight" [2, 2] float32, trained on rank 1'),
    ],
)
def test_ranks_that_differ_are_told_so_by_name_on_every_rank(two, what, words):
    messages = two.run(starts_otherwise, what)
    assert len(set(messages)) == 1
    assert words in messages[0]


class Wayward(Plain):
    """From the third pass on, one rank turns the order of two blocks around."""

    passes = 0

    def body(self, x):
        self.passes += 1
        order = [0, 2, 1] if self.passes > 2 and my_rank() == 1 else [0, 1, 2]
        for at in order:
            x = self.blocks[at](x)
        return x


def goes_astray() -> None:
    torch.manual_seed(0)
    engine = initialize(model=Wayward(), config=config_of(3))[0]
    engine.schedule.group.patience_s = 2.0
    take_steps(engine, 4)


def test_a_rank_that_runs_another_order_is_told_which_unit_and_nobody_hangs():
    world = World(2)
    try:
        with pytest.raises(WorkerError, match=r'ScheduleError.*of unit "blocks\.1" is not in the plan'):
            world.run(goes_astray)
    finally:
        world.stop()


def changes_together(stage: int) -> list[float]:
    """All ranks change their order at once: the plan is left and a new one is made."""

    class Changing(Plain):
        passes = 0

        def body(self, x):
            self.passes += 1
            for at in [2, 1, 0] if self.passes > 3 else [0, 1, 2]:
                x = self.blocks[at](x)
            return x

    torch.manual_seed(0)
    return take_steps(initialize(model=Changing(), config=config_of(stage))[0], 7)


def test_ranks_that_change_their_order_together_go_on(two):
    assert two.run(changes_together, 3) == two.run(changes_together, 0)


# --- parameters outside of a pass (one process is enough: the path is the same) ---------------------------------------


def test_a_released_parameter_reads_as_nan_of_its_true_shape_and_refuses_writes():
    engine = start(3)
    param = engine.module.blocks[0].up.weight
    assert param.shape == (128, WIDTH)
    assert param.numel() == 128 * WIDTH
    assert bool(param.isnan().all())
    with pytest.raises(RuntimeError), torch.no_grad():
        param.add_(1)
    with engine.gathered():
        assert not bool(param.isnan().any())
    assert bool(param.isnan().all())


def test_a_write_to_a_released_parameter_of_one_element_is_noticed():
    engine = start(3, "uneven_sizes_and_users_hooks")
    with torch.no_grad():
        engine.module.blocks[1].gain.fill_(3.0)
    with pytest.raises(UsageError, match=r'"blocks\.1\.gain" was written to while it was released'):
        take_steps(engine)


def test_what_was_read_inside_gathered_stays_valid_and_what_was_written_is_kept():
    found = []
    for stage in range(4):
        engine = start(stage)
        take_steps(engine, 2)
        with engine.gathered(), engine.gathered(), torch.no_grad():
            state = engine.module.state_dict()
            array = engine.module.blocks[0].up.weight.detach().numpy()
            engine.module.blocks[0].up.weight.mul_(0.5)
        assert all(bool(tensor.isfinite().all()) for tensor in state.values())
        assert bool(torch.from_numpy(array).isfinite().all())
        found.append((take_steps(engine, 2, first=2), digest_of_weights(engine)))
    assert all(run == found[0] for run in found)


def test_calls_and_state_dicts_at_the_wrong_place_are_refused_with_the_remedy():
    engine = start(3)
    with pytest.raises(UsageError, match=r"inside engine\.gathered\(\)"):
        engine.module.state_dict()
    with engine.gathered(), pytest.raises(UsageError, match="Call it outside"):
        engine(batch_of(0, 0))
    take_steps(engine)
    start(2).module.state_dict()


def test_a_fill_of_a_released_parameter_is_noticed():
    engine = start(3)
    nn.init.constant_(engine.module.head.weight, 0.1)
    with pytest.raises(UsageError, match=r'"head\.weight" was written to while it was released'):
        take_steps(engine)


class Attending(Plain):
    """A layer whose weights are read by another module, and parameters that belong to no layer."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.gains = nn.ParameterList([torch.ones(WIDTH), torch.zeros(WIDTH)])

    def body(self, x):
        return super().body(self.attention(x, x, x)[0] * self.gains[0] + self.gains[1])


class Uncalled(Plain):
    """Blocks that are used without being called: no hook sees them."""

    def body(self, x):
        for block in self.blocks:
            x = block.forward(x)
        return x


class InPlace(Plain):
    def body(self, x):
        for block in self.blocks:
            x = block(x)
            x += 1
        return x.relu_()


class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        x += self.fc(x.clone())
        return x


class InPlaceBlocks(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Own() for _ in range(3))

    def body(self, x):
        return super().body(x + 0)


class Penalised(Plain):
    def forward(self, ids):
        x = self.tok(ids)
        loss = self.loss(self.body(x), ids)
        (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        return loss + slope.square().sum()


AWKWARD = {kind.__name__: kind for kind in (Attending, Uncalled, InPlace, InPlaceBlocks, Penalised)}


def awkward(name: str, stage: int) -> tuple[list[float], str]:
    torch.manual_seed(0)
    engine = initialize(model=AWKWARD[name](), config=config_of(stage))[0]
    return take_steps(engine, 4), digest_of_weights(engine)


@pytest.mark.parametrize("name", AWKWARD)
def test_awkward_ways_to_use_a_module(two, name):
    found = [two.run(awkward, name, stage) for stage in range(3 if name == "Uncalled" else 4)]
    assert all(run == found[0] for run in found)
    losses = found[0][0][0]
    assert len(set(losses)) == len(losses), "it trains"


def test_a_parameter_used_outside_of_its_module_is_warned_about(caplog):
    torch.manual_seed(0)
    engine = initialize(model=Uncalled(), config=config_of(3))[0]
    take_steps(engine)
    assert engine.skipped_steps == 1
    assert "name a module around both in leaf_module" in caplog.text


def test_gradients_and_types_that_the_engine_does_not_train_are_refused():
    with pytest.raises(UsageError, match=r'"weight" is torch\.float64'):
        initialize(model=nn.Linear(4, 4).double(), config=config_of(0))
    model = nn.Sequential(nn.Embedding(8, 4, sparse=True), nn.Linear(4, 1))
    engine = initialize(model=model, config=config_of(1))[0]
    with pytest.raises(UsageError, match=r'gradient of "0\.weight" is sparse'):
        engine.backward(engine(torch.zeros(2, dtype=torch.long)).sum())


def test_destroy_gives_the_model_back_and_leaves_nothing_behind():
    torch.manual_seed(0)
    model = MODELS["plain"]()
    engine = initialize(model=model, config=config_of(3))[0]
    take_steps(engine, 2)
    wanted = digest_of_weights(engine)
    engine.destroy()
    assert digest(list(model.parameters())) == wanted
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    model(batch_of(0, 0)).backward()
    assert all(param.grad is not None for param in model.parameters())
    copy.deepcopy(model)
    again = initialize(model=model, config=config_of(2))[0]
    take_steps(again, 1)
    ghost = weakref.ref(engine)
    del engine
    gc.collect()
    assert ghost() is None


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}, "on the device so far"),
        ({"bf16": {"enabled": True}}, "fp32 so far"),
        ({"optimizer": {"type": "Lion"}}, "AdamW and SGD so far"),
        ({"optimizer": None}, "names no optimizer"),
        ({"scheduler": {"type": "WarmupLR"}}, "no scheduler so far"),
        ({"gradient_clipping": "auto"}, '"auto" is left in gradient_clipping'),
        (
            {"gradient_allreduce_op": "sum", "prescale_gradients": True},
            "cannot do this yet: prescale_gradients, gradient_allreduce_op",
        ),
        ({"activation_checkpointing": {"cpu_checkpointing": True}}, "activation_checkpointing.cpu_checkpointing"),
        ({"tensorboard": {"enabled": True}}, "tensorboard.enabled"),
        ({"naught": {"gradients": "device"}}, "naught.gradients"),
    ],
)
def test_what_the_engine_cannot_do_yet_it_refuses(changes, words):
    with pytest.raises(UsageError, match=words):
        initialize(model=MODELS["plain"](), config=config_of(2) | changes)


def test_keys_that_only_tune_are_remarked_and_defaults_are_not(caplog):
    zero = {"stage": 2, "reduce_bucket_size": 1000, "allgather_bucket_size": 5e8, "contiguous_gradients": False}
    initialize(model=MODELS["plain"](), config=config_of(2) | {"zero_optimization": zero, "prescale_gradients": False})
    assert [record.getMessage() for record in caplog.records] == [
        "no effect yet, but on memory and speed only: zero_optimization.reduce_bucket_size"
    ]


def test_a_model_without_anything_to_train_is_refused():
    with pytest.raises(ModelError, match="no parameters to train"):
        initialize(model=nn.Linear(2, 2).requires_grad_(False), config=config_of(0))


def test_the_package_has_the_engine():
    assert naught.initialize is initialize
