"""Faults in the middle of things: what a backward leaves late, memory that runs out at the worst place, an engine that is dropped
while it is busy. Nothing is lost, nothing is half done without a word, and what can go on does."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from menagerie import DEVICE, MODELS, VOCAB, WIDTH, batch_of
from torch import Tensor, nn
from training import config_of, digest_of_weights, start, take_steps

from naught import host_update
from naught.comm import rehearse
from naught.comm.wires import Pending
from naught.engine import Engine
from naught.errors import CheckpointError, HalfUpdated, ModelError, UsageError
from naught.ferry import Ferry
from naught.flat import Meter
from naught.gradients import DeviceSum
from naught.shelves import DeviceShelf
from naught.staging import Staging
from naught.start import initialize
from naught.streams import here

pytestmark = pytest.mark.usefixtures("one_thread")

HOST = {"device": "cpu"}
rehearsed = pytest.mark.skipif(DEVICE.type != "cpu", reason="the ranks of a rehearsal are on the CPU")


def ids() -> Tensor:
    return torch.arange(8, device=DEVICE).view(2, 4) % VOCAB


# --- gradients that come late ---


def backwards(engine: Engine, between: str, *, late: bool = True) -> tuple[float, str]:
    """Two losses of one forward, with something between their backwards."""
    losses: list[Tensor] = []
    engine.module.norm.register_forward_hook(lambda *args: losses.append(args[-1]))
    engine.backward(engine(ids()), retain_graph=True)
    if between == "eval":
        with torch.no_grad():
            engine(ids().flip(1))
    elif between == "norms":
        engine.grad_norms()
    if late:
        engine.backward(losses[0].abs().mean())
    engine.step()
    return engine.get_global_grad_norm(), digest_of_weights(engine)


@pytest.mark.parametrize("between", ["eval", "norms"])
@pytest.mark.parametrize(
    ("stage", "zero"),
    [
        (1, {}),
        (2, {}),
        (1, {"offload_optimizer": HOST}),
        (2, {"offload_optimizer": HOST}),
        (3, {"stage3_param_persistence_threshold": 10**6}),
    ],
)
def test_small_gradients_that_come_after_a_pass_was_closed_count(stage, zero, between):
    """All that is trained is small: nothing tells that they have come."""
    wanted = backwards(start(stage, "lora", **zero), "nothing")
    assert backwards(start(stage, "lora", **zero), between) == wanted
    assert wanted != backwards(start(stage, "lora", **zero), "nothing", late=False)


@rehearsed
@pytest.mark.parametrize("stage", [1, 2])
def test_gradients_that_come_late_on_one_rank_alone_count_on_all(stage):
    def work(rank: int) -> tuple[float, str]:
        engine = start(stage, "lora")
        return backwards(engine, "norms", late=rank == 1)

    first, second = rehearse(work, ranks=2)
    assert first == second
    assert first != rehearse(lambda _: backwards(start(stage, "lora"), "norms", late=False), ranks=2)[0]


@rehearsed
@pytest.mark.parametrize("late", [False, True])
def test_a_rank_may_evaluate_alone_in_the_middle_of_a_step(late):
    """Which closes its pass before that of the others."""

    def work(rank: int) -> tuple[float, str]:
        return backwards(start(2, "lora"), "eval" if rank == 1 else "nothing", late=late)

    first, second = rehearse(work, ranks=2)
    assert first == second
    wanted = rehearse(lambda _: backwards(start(2, "lora"), "nothing", late=late), ranks=2)[0]
    assert first[0] == pytest.approx(wanted[0], rel=1e-6)  # in two sums or in one: the last bits differ
    assert late or first == wanted


# --- no memory ---


class Exhausted:
    """Memory that is there, or not."""

    left = True

    def __call__(self) -> None:
        if not self.left:
            raise torch.OutOfMemoryError("no memory is left")

    def runs_out(self, *_: object) -> None:
        self.left = False
        self()


@pytest.mark.parametrize("stage", [2, 3])
def test_a_backward_that_runs_out_of_memory_leaves_nothing_though_there_is_none_to_tidy_up_with(monkeypatch, stage):
    memory, add = Exhausted(), DeviceSum.add
    monkeypatch.setattr(DeviceSum, "add", lambda self, part: (memory(), add(self, part)))

    def run(*, fails: bool) -> str:
        engine = start(stage)
        take_steps(engine, 3)  # the plan has a reduce under way while the next unit computes
        if fails:
            hook = engine.module.blocks[0].register_full_backward_pre_hook(memory.runs_out)
            loss = engine(ids())
            with pytest.raises(torch.OutOfMemoryError, match="no memory is left"):
                engine.backward(loss)
            hook.remove()
            memory.left = True
        take_steps(engine, 2, first=3)
        return digest_of_weights(engine)

    assert run(fails=True) == run(fails=False)


def test_an_update_that_has_no_memory_for_its_moments_changes_nothing(monkeypatch):
    taken, take = [], DeviceShelf.take

    def fourth_fails(self, numel, dtype, category, *, travels=False):
        taken.extend([category] * (category == "states"))
        if len(taken) == 4:
            taken.append("more than there is")
            raise torch.OutOfMemoryError("no room for moments")
        return take(self, numel, dtype, category, travels=travels)

    wanted = start(2)
    take_steps(wanted, 2)
    monkeypatch.setattr(DeviceShelf, "take", fourth_fails)
    engine = start(2)
    before = digest_of_weights(engine)
    with pytest.raises(torch.OutOfMemoryError, match="no room for moments"):
        take_steps(engine, 1)
    assert digest_of_weights(engine) == before
    take_steps(engine, 2)
    assert digest_of_weights(engine) == digest_of_weights(wanted)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, KeyboardInterrupt])
def test_an_update_that_fails_halfway_says_so(monkeypatch, error):
    engine = start(2)
    take_steps(engine, 1)
    rule = engine.optimizer.rule
    monkeypatch.setattr(type(rule), "update", lambda *_: (_ for _ in ()).throw(error("in the rule")))
    with pytest.raises(error, match="in the rule") as caught:
        take_steps(engine, 1, first=1)
    assert any("load a checkpoint before you go on" in note for note in caught.value.__notes__)
    with pytest.raises(HalfUpdated):
        engine(ids())


@pytest.mark.parametrize(
    ("stage", "zero"), [(1, {}), (2, {}), (3, {}), (3, {"offload_param": HOST, "stage3_param_persistence_threshold": 0})]
)
def test_weights_that_could_not_come_up_once_come_again(monkeypatch, tmp_path, stage, zero):
    """Their masters are what they should be: nothing is wrong but that there was no memory for a moment."""
    options = {"more": {"bf16": {"enabled": True}}, "offload_optimizer": HOST, **zero}
    wanted = start(stage, **options)
    take_steps(wanted, 4)
    engine, memory, bring = start(stage, **options), Exhausted(), Ferry.bring

    def once(self, *args):
        fails, memory.left = not memory.left, True
        if fails:
            raise torch.OutOfMemoryError("no room to round in")
        return bring(self, *args)

    monkeypatch.setattr(Ferry, "bring", once)
    take_steps(engine, 2)
    memory.left = False
    try:
        take_steps(engine, 1, first=2)
    except torch.OutOfMemoryError:  # weights that are made for a gather alone: the step is done again
        take_steps(engine, 1, first=2)
    take_steps(engine, 1, first=3)
    engine.save_checkpoint(tmp_path)
    assert memory.left
    assert digest_of_weights(engine) == digest_of_weights(wanted)


# --- an update that is ended in the middle ---


def test_nobody_goes_on_with_an_update_that_was_ended_in_the_middle_until_a_checkpoint_is_loaded(tmp_path):
    def saved_again() -> None:
        engine.save_checkpoint(tmp_path)

    engine = start(1)
    take_steps(engine, 2)
    engine.save_checkpoint(tmp_path)
    wanted = take_steps(engine, 2, first=2), digest_of_weights(engine)
    engine.load_checkpoint(tmp_path)
    engine.backward(engine(ids()))
    group = engine.optimizer.param_groups[0]
    rate, group["lr"] = group["lr"], "fast"
    with pytest.raises(TypeError) as caught:
        engine.step()
    assert "Some weights are new and some are old" in caught.value.__notes__[0]
    group["lr"] = rate
    for refused in (lambda: engine(ids()), saved_again, lambda: engine.gathered().__enter__()):
        with pytest.raises(HalfUpdated, match="load_checkpoint"):
            refused()
    with pytest.raises(CheckpointError):  # what cannot be loaded mends nothing
        engine.load_checkpoint(tmp_path, tag="absent")
    with pytest.raises(HalfUpdated):
        engine(ids())
    engine.load_checkpoint(tmp_path)
    assert (take_steps(engine, 2, first=2), digest_of_weights(engine)) == wanted


@contextmanager
def damaged(folder: Path) -> Iterator[None]:
    """One byte of every rank's file of the checkpoints in a folder is another, for a while."""
    files = {path: path.read_bytes() for path in folder.glob("*/*.safetensors")}
    for path, whole in files.items():
        path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    yield
    for path, whole in files.items():
        path.write_bytes(whole)


BELOW = {"offload_optimizer": {"device": "nvme"}, "stage3_param_persistence_threshold": 0}


@pytest.mark.parametrize("more", [{}, {"bf16": {"enabled": True}}], ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    ("stage", "zero"),
    [
        (1, {"offload_optimizer": HOST}),
        (2, {"offload_optimizer": HOST, "naught": {"delay_update_after": 1}}),
        (3, {"offload_optimizer": HOST, "offload_param": HOST}),
        (2, BELOW),
        (3, BELOW | {"offload_param": {"device": "nvme", "max_in_cpu": 0}, "naught": {"gradients": "disk"}}),
    ],
    ids=["stage1-offload", "delayed", "infinity-host", "stage2-disk", "infinity-disk"],
)
def test_a_checkpoint_mends_an_engine_whose_update_beside_training_has_failed(tmp_path, stage, zero, more):
    for key in ("offload_optimizer", "offload_param"):
        if zero.get(key, HOST) != HOST:
            zero = zero | {key: zero[key] | {"nvme_path": str(tmp_path)}}
    zero = dict(zero)
    engine = start(stage, more=more | {"naught": zero.pop("naught", {})}, **zero)
    take_steps(engine, 2)
    engine.save_checkpoint(tmp_path)
    wanted = take_steps(engine, 2, first=2), digest_of_weights(engine)
    group = engine.optimizer.param_groups[0]
    rate, group["lr"] = group["lr"], "fast"
    with pytest.raises(TypeError) as caught:
        take_steps(engine, 2, first=4)
        engine.save_checkpoint(tmp_path)
    assert any("load a checkpoint before you go on" in note for note in caught.value.__notes__)
    group["lr"] = rate
    with pytest.raises(TypeError):  # it is told every time
        engine.save_checkpoint(tmp_path)
    with pytest.raises(CheckpointError):
        engine.load_checkpoint(tmp_path, tag="absent")
    with pytest.raises(TypeError):  # what could not be found has changed nothing
        engine.save_checkpoint(tmp_path)
    with damaged(tmp_path), pytest.raises(CheckpointError):
        engine.load_checkpoint(tmp_path)
    with pytest.raises(HalfUpdated):  # and what could not be loaded has mended nothing
        engine(ids())
    engine.load_checkpoint(tmp_path)
    assert (take_steps(engine, 2, first=2), digest_of_weights(engine)) == wanted


def test_states_that_come_back_mend_nothing():
    engine = start(1)
    group = engine.optimizer.param_groups[0]
    engine.backward(engine(ids()))
    group["lr"] = "fast"
    with pytest.raises(TypeError):
        engine.step()
    engine.reload_states()
    with pytest.raises(HalfUpdated):
        engine(ids())


class NoRoom:
    """The Nth copy of a tensor from here on finds no memory; None: every one does."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.left: int | None = None
        copy = Tensor.to

        def copy_or_fail(tensor: Tensor, *args: Any, **more: Any) -> Tensor:
            if more.get("copy") and self.left is not None:
                self.left -= 1
                if self.left < 0:
                    self.left = None
                    raise MemoryError("no room")
            return copy(tensor, *args, **more)

        monkeypatch.setattr(Tensor, "to", copy_or_fail)


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("more", [{"bf16": {"enabled": True}}, {"naught": {"small_moments": True}}], ids=["masters", "8 bits"])
def test_states_that_cannot_all_step_aside_stay_and_those_that_cannot_all_come_back_come_later(monkeypatch, stage, more):
    """Whichever copy finds no memory, in the middle of a step."""
    wanted, engine = (start(stage, accumulation=2, more=more) for _ in range(2))
    for each in (wanted, engine):
        take_steps(each, 3)
    here, room = Counter(engine.report()["live"]), NoRoom(monkeypatch)
    for way, failures in ((engine.offload_states, 0), (engine.reload_states, 0)):
        while True:
            room.left = failures
            try:
                way()
            except MemoryError:
                failures += 1
            else:
                break
            if way == engine.offload_states:
                assert Counter(engine.report()["live"]) == here
            else:
                assert Counter(engine.report()["live"]).total() == here.total()
                with pytest.raises(UsageError, match="reload_states"):
                    engine(batch_of(3, 0))
                engine.reload_states()
                engine.offload_states()
        assert failures > 3
    room.left = None
    assert +Counter(engine.report()["live"]) == +here
    assert take_steps(engine, 3, first=3) == take_steps(wanted, 3, first=3)
    assert digest_of_weights(engine) == digest_of_weights(wanted)


# --- what is under way ---


def test_what_has_failed_behind_a_collective_fails_whenever_somebody_waits():
    begun = []

    def then() -> None:
        begun.append(True)
        raise ValueError("lost")

    under_way = Pending(then=then)
    for _ in range(2):
        with pytest.raises(ValueError, match="lost"):
            under_way.wait()
    assert under_way.fails()
    assert len(begun) == 1, "what sends to others must not be begun again"


@rehearsed
def test_weights_of_a_gather_that_failed_are_gathered_again():
    class Lost:
        def wait(self) -> None:
            raise RuntimeError("the collective was lost")

    def work(_: int) -> list[float]:
        engine = start(1)
        wire, losses = engine.schedule.group.wire, []
        for step in range(3):
            engine.backward(engine(ids()))
            if step == 1:
                gather, wire.gather = wire.gather, lambda *_: Pending(then=Lost().wait)
                with pytest.raises(RuntimeError, match="was lost"):
                    engine.step()
                wire.gather = gather
            else:
                engine.step()
            losses.append(engine(ids()).item())
            engine.zero_grad()
        return losses

    first, second = rehearse(work, ranks=2)
    assert first == second


def test_bytes_that_a_collector_lets_go_in_the_middle_of_a_count_are_counted():
    meter = Meter()

    class Left:
        def __init__(self) -> None:
            self.itself = self
            meter.change("left", 8)

        def __del__(self) -> None:
            meter.change("left", -8)

    class Collecting(Counter):
        def __missing__(self, key: str) -> int:
            gc.collect()
            return 0

    Left()
    meter.live = Collecting(meter.live)
    meter.change("other", 1)
    assert dict(meter.live) == {"left": 0, "other": 1}


@pytest.mark.skipif(DEVICE.type != "cuda", reason="a CPU has one order only")
def test_a_ferry_that_nobody_has_any_more_arrives_first():
    ferry = Ferry(Staging(DEVICE, 64, 4, 64), Meter(), apart=True)
    work, into = torch.ones(2048, 2048, device=DEVICE), torch.zeros(64, dtype=torch.bfloat16, device=DEVICE)

    def slowly(place: Tensor, source: Tensor) -> None:
        for _ in range(100):
            torch.matmul(work, work)
        place.copy_(source)

    arrived = ferry.bring(torch.ones(64), into, here(into.device), slowly)
    del ferry
    gc.collect()
    assert arrived.reached


# --- engines that are let go, and models that cannot be had ---


def test_an_engine_whose_update_has_failed_lets_go_of_everything(monkeypatch):
    model = MODELS["plain"]()
    optimizer = torch.optim.Adam(model.parameters(), fused=True)
    config = config_of(2, optimizer=None, offload_optimizer=HOST)
    config.pop("optimizer", None)
    engine = initialize(model=model, optimizer=optimizer, config=config)[0]
    monkeypatch.setattr(host_update, "_take", lambda *_: (_ for _ in ()).throw(MemoryError("no memory for it")))
    take_steps(engine, 1)  # its update fails beside what comes next
    with pytest.raises(MemoryError, match="no memory for it"):
        engine.destroy()
    assert "step" not in vars(optimizer), "the script's optimizer is its own again"
    with pytest.raises(ModelError, match="could not give them back"):
        initialize(model=model, config=config_of(2))


class Shared(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        if how == "data":
            self.other.weight.data = self.one.weight.data
        elif how == "wrapped":
            self.other.weight = nn.Parameter(self.one.weight)
        elif how == "part":
            self.other.weight = nn.Parameter(self.one.weight.data[1:3])
        elif how == "beside":
            both = torch.randn(2 * WIDTH, WIDTH)
            self.one.weight, self.other.weight = nn.Parameter(both[:WIDTH]), nn.Parameter(both[WIDTH:])
        elif how == "columns":
            both = torch.randn(WIDTH, 2 * WIDTH)
            self.one.weight, self.other.weight = nn.Parameter(both[:, :WIDTH]), nn.Parameter(both[:, WIDTH:])

    def forward(self, x: Tensor) -> Tensor:
        return self.other(self.one(x))


@pytest.mark.parametrize("how", ["data", "wrapped", "part"])
def test_parameters_that_are_tied_by_their_memory_are_refused(how):
    with pytest.raises(ModelError, match=r'"one.weight" and "other.weight" are two parameters with the same memory'):
        initialize(model=Shared(how), config=config_of(1))
    frozen = Shared(how).requires_grad_(False)
    frozen.trained = nn.Linear(WIDTH, WIDTH)
    initialize(model=frozen, config=config_of(1))  # nobody would train them apart


@pytest.mark.parametrize("how", ["apart", "beside", "columns"])
def test_parameters_that_lie_beside_each_other_are_trained(how):
    assert initialize(model=Shared(how), config=config_of(1))[0] is not None


def test_an_expanded_parameter_is_refused():
    model = MODELS["plain"]()
    model.head.weight.data = torch.ones(1, 1).expand(model.head.weight.shape)
    with pytest.raises(ModelError, match=r'"head.weight" was expanded'):
        initialize(model=model, config=config_of(1))
