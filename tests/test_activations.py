"""What a backward needs may rest elsewhere until then: the gradients are the same to the last bit."""

from __future__ import annotations

import weakref
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint as torchs_checkpoint
from training import DEVICE, config_of, digest_in_32_bits, engine_of, my_rank

from naught import checkpointing
from naught.activation_disk import OnDisk
from naught.disk_side import DiskSide
from naught.errors import ConfigError, StorageError, UsageError
from naught.flat import Meter
from naught.host_crew import HostCrew
from naught.spill import Desk, Spill
from naught.spill_file import UnnamedFile

LAYERS, WIDTH, TOKENS = 4, 96, 256  # a checkpoint has 96 kB: what is under 64 kB stays
ONE = TOKENS * WIDTH * 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH), nn.Dropout(0.25)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.down(torch.tanh(self.up(x))))


class Tower(nn.Module):
    """Blocks whose activations are kept, or computed again by torch's checkpoint of either kind, or by ours."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.how = how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            if self.how == "kept":
                x = block(x)
            elif self.how == "ours":
                x = checkpointing.checkpoint(block, x)
            else:
                x = torchs_checkpoint(block, x, use_reentrant=self.how == "reentrant")
        return x.square().mean()


def batch(step: int, rank: int) -> torch.Tensor:
    return torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank)).to(DEVICE)


def train(how: str, stage: int, naught: dict, block: dict, zero: dict) -> tuple[list[float], str, dict[str, int], dict[str, int]]:
    torch.manual_seed(0)
    more = {"naught": naught, "activation_checkpointing": block}
    engine = engine_of(Tower(how), config_of(stage, more=more, stage3_param_persistence_threshold=0, **zero))
    losses = []
    for step in range(3):
        torch.manual_seed(step)
        loss = engine(batch(step, my_rank()))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    report = engine.report()
    digest = digest_in_32_bits(engine)
    engine.destroy()
    return losses, digest, report["moved"], report["peak"]


def asked(where: str, folder: str) -> tuple[dict, dict]:
    return {
        "cpu_checkpointing": ({}, {"cpu_checkpointing": True}),
        "host": ({"activations": "host"}, {}),
        "disk": ({"activations": "disk", "nvme_path": folder}, {}),
        "contiguous": ({}, {"contiguous_memory_optimization": True, "number_checkpoints": LAYERS}),
        "all on the host": ({"activations": "host", "saved_tensors": "all"}, {}),
        "all on disk": ({"activations": "disk", "saved_tensors": "all", "nvme_path": folder}, {}),
    }[where]


@pytest.mark.parametrize(
    ("how", "where", "stage"),
    [
        ("reentrant", "cpu_checkpointing", 1),
        ("non-reentrant", "cpu_checkpointing", 3),
        ("non-reentrant", "host", 0),
        ("reentrant", "disk", 3),
        ("non-reentrant", "disk", 2),
        ("ours", "host", 3),
        ("non-reentrant", "contiguous", 3),
        ("kept", "all on the host", 3),
        ("kept", "all on disk", 1),
        ("non-reentrant", "all on the host", 2),
    ],
)
def test_training_is_the_same_wherever_activations_rest(two, tmp_path, how, where, stage):
    near = [found[:2] for found in two.reference(train, how, stage, {}, {}, {})]
    far = two.run(train, how, stage, *asked(where, str(tmp_path)), {})
    assert [found[:2] for found in far] == near
    for _, _, moved, peak in far:
        if where == "contiguous":
            assert peak["kept activations"] == LAYERS * ONE
        elif not where.startswith("all"):
            assert moved["activations to the host"] == moved["activations to the device"] == 3 * LAYERS * ONE
        else:
            assert moved["activations to the host"] == moved["activations to the device"] > 3 * LAYERS * ONE
        if "disk" in where:
            assert moved["disk written"] == moved["disk read"] == moved["activations to the host"]


def test_it_goes_with_states_on_other_tiers(two, tmp_path):
    disk = {"device": "nvme", "nvme_path": str(tmp_path)}
    zero = {"offload_optimizer": disk, "offload_param": disk | {"max_in_cpu": 0}}
    near = two.run(train, "non-reentrant", 3, {}, {}, zero)
    far = two.run(train, "non-reentrant", 3, {"activations": "disk"}, {}, zero)
    assert [found[:2] for found in far] == [found[:2] for found in near]


def test_checkpoints_on_the_host_leave_nothing_on_the_device():
    """What autograd holds of a forward is what it would hold of a model without activations."""
    model = Tower("ours").to(DEVICE)
    checkpointing.configure(checkpoint_in_cpu=True)
    seen: list[weakref.ref[torch.Tensor]] = []
    for block in model.blocks:
        block.register_forward_pre_hook(lambda _, args: seen.append(weakref.ref(args[0])))
    with checkpointing_reset():
        loss = model(batch(0, 0))
        assert checkpointing.report()["peak"] == {"host activations": LAYERS * ONE}
        assert [ref() for ref in seen[1:]] == [None] * (LAYERS - 1)
        leaving = checkpointing._NOW()[0].saves.rest.lanes.leaving
        held = [len(leaving)]  # memory that the device may not use for something else yet
        model.blocks[-1].down.weight.register_hook(lambda _: held.append(len(leaving)))
        loss.backward()
        assert held == [2, 0], "the latest are let go when the backward begins"


class checkpointing_reset:  # noqa: N801  # a context
    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None:
        checkpointing.reset()


class Mpu:
    """Two ranks that compute the same."""

    def get_model_parallel_world_size(self) -> int:
        return torch.distributed.get_world_size()

    def get_model_parallel_group(self) -> None:
        return None


def partitioned(on_host: bool, steps: int = 2) -> tuple[bool, dict[str, dict[str, int]]]:
    found = []
    for ours in (False, True):
        torch.manual_seed(0)
        model = Tower("ours" if ours else "non-reentrant").to(DEVICE)
        if ours:
            checkpointing.configure(Mpu(), partition_activations=True, checkpoint_in_cpu=on_host)
        for step in range(steps):
            torch.manual_seed(step)
            model(batch(step, 0)).backward()
        found.append([param.grad for param in model.parameters()])
    report = checkpointing.report()
    checkpointing.reset()
    return all(map(torch.equal, *found)), report


@pytest.mark.parametrize("on_host", [False, True])
def test_ranks_that_have_the_same_keep_a_part_each(worlds, on_host):
    for size in (2, 3):
        part = -(-TOKENS * WIDTH // size) * 4
        for alike, report in worlds[size].run(partitioned, on_host):
            assert alike
            assert report["sent"] == {"all-gather": 2 * LAYERS * (size - 1) * part}  # one for each checkpoint
            if on_host:
                assert report["peak"] == {"host activations": LAYERS * part}
                assert report["moved"]["activations to the host"] == 2 * LAYERS * part


def test_rooms_are_used_again(tmp_path):
    """However many steps: as much as one needs."""
    for where in ("host", "disk", "all on the host"):
        torch.manual_seed(0)
        ours, block = asked(where, str(tmp_path))
        engine = engine_of(Tower("non-reentrant"), config_of(1, more={"naught": ours, "activation_checkpointing": block}))
        peaks = []
        for step in range(4):
            engine.backward(engine(batch(step, 0)))
            engine.step()
            peaks.append({name: nbytes for name, nbytes in engine.report()["peak"].items() if "activations" in name})
        if where == "disk":  # the first step finds no rooms of one before
            assert peaks[-1]["host activations"] <= 6 * ONE
            peaks.pop(0)
        assert peaks[0] == peaks[-1], where
        engine.eval()
        with torch.no_grad():
            engine(batch(9, 0))
        engine.destroy()
        assert not any(nbytes for name, nbytes in engine.report()["live"].items() if "activations" in name), where


def test_a_forward_without_a_backward_gives_everything_back(tmp_path):
    ours, _ = asked("disk", str(tmp_path))
    engine = engine_of(Tower("non-reentrant"), config_of(1, more={"naught": ours}))
    for step in range(3):
        engine(batch(step, 0))
    loss = engine(batch(0, 0))
    engine.backward(loss, retain_graph=True)
    engine.step()
    del loss
    engine.destroy()
    assert engine.report()["live"]["disk activations"] == 0


@pytest.mark.parametrize(
    ("naught", "words"),
    [
        ({"activations": "disk"}, "no nvme_path is set"),
        ({"saved_tensors": "all"}, "all that is saved stays on the device"),
        ({"activations": "gpu"}, "activations"),
    ],
)
def test_mistakes_in_a_configuration_are_told(naught, words):
    with pytest.raises(ConfigError, match=words):
        engine_of(Tower("kept"), config_of(1, more={"naught": naught}))


@pytest.mark.parametrize("where", ["cpu_checkpointing", "disk", "contiguous"])
def test_rooms_are_as_many_as_are_in_use_whatever_their_sizes(tmp_path, where):
    naught, block = asked(where, str(tmp_path))
    engine = engine_of(Tower("non-reentrant"), config_of(1, more={"naught": naught, "activation_checkpointing": block}))
    for tokens in (200, 256, 190, 230, 250, 180, 240, 256, 210):
        engine.backward(engine(torch.randn(tokens, WIDTH, device=DEVICE)))
        engine.step()
    peak = engine.report()["peak"]
    engine.destroy()
    rooms = peak["kept activations" if where == "contiguous" else "host activations"]
    most = 2 * LAYERS if where == "contiguous" else LAYERS + 2  # those side by side go together, when the last one is too small
    assert rooms <= most * (ONE + 4096)
    if where == "disk":
        assert peak["disk activations"] <= LAYERS * (ONE + 4096)


@pytest.mark.parametrize("how", ["kept", "reentrant", "non-reentrant"])
def test_a_forward_that_nobody_goes_back_through_leaves_nothing(how):
    engine = engine_of(Tower(how), config_of(1, more={"activation_checkpointing": {"cpu_checkpointing": True}}))
    for step in range(5):
        input_ = batch(step, 0).requires_grad_()
        gone = weakref.ref(input_)  # the graph would keep it
        engine(input_)
        del input_
        assert gone() is None
        engine.backward(engine(batch(step, 0)))
        engine.step()
    assert engine.report()["live"].get("host activations", 0) <= LAYERS * (ONE + 4096)
    engine.destroy()


class TwoInputs(nn.Module):
    """Blocks that are given two tensors, one of which goes on."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y, half = x, None
        for at, block in enumerate(self.blocks):
            x, y = torchs_checkpoint(lambda x, y, block=block: (torch.tanh(block(x) + y), x * 0.5), x, y, use_reentrant=False)
            half = x.square().mean() if at == LAYERS // 2 else half
        return x.square().mean(), half


@pytest.mark.parametrize("where", ["cpu_checkpointing", "disk"])
def test_nothing_comes_back_that_was_back_already(tmp_path, where):
    def train(naught: dict, block: dict) -> tuple[str, list[tuple[int, int]]]:
        torch.manual_seed(0)
        engine = engine_of(TwoInputs(), config_of(1, more={"naught": naught, "activation_checkpointing": block}))
        moved = []
        for step in range(3):
            whole, half = engine(batch(step, 0).requires_grad_())
            engine.backward(half if step == 1 else whole)  # of some of what was put away nobody asks
            engine.step()
            del whole, half
            found = engine.report()["moved"]
            moved.append((found.get("activations to the host", 0), found.get("activations to the device", 0)))
        digest = digest_in_32_bits(engine)
        engine.destroy()
        return digest, moved

    near, far = train({}, {}), train(*asked(where, str(tmp_path)))
    assert far[0] == near[0]
    (down, up), (down_half, up_half), (down_last, up_last) = far[1]
    assert down == up > LAYERS * ONE
    assert down_half == 2 * down
    assert up_half < 2 * up
    assert (down_last - down_half, up_last - up_half) == (down, up)


def test_mistakes_of_a_script_are_told():
    with pytest.raises(UsageError, match="there are none"):
        checkpointing.configure(partition_activations=True)
    with pytest.raises(UsageError, match="how many there are"):
        checkpointing.configure(contiguous_checkpointing=True)
    assert not checkpointing.is_configured()
    assert checkpointing.report() == {"live": {}, "peak": {}, "moved": {}, "sent": {}}


def test_a_disk_that_fails_is_told_where_the_activation_is_needed(tmp_path, monkeypatch):
    rest = OnDisk(
        torch.device("cpu"),
        Meter(),
        DiskSide(partial(UnnamedFile, str(tmp_path)), Desk(4096, Meter(), torch.device("cpu")), HostCrew([None, None])),
    )
    kept = rest.put(torch.arange(20_000.0))
    assert torch.equal(kept.back(), torch.arange(20_000.0))

    def fail(*_: object) -> None:
        raise StorageError("the disk is gone")

    monkeypatch.setattr(Spill, "write", fail)
    lost = rest.put(torch.arange(20_000.0))
    with pytest.raises(StorageError, match="the disk is gone"):
        lost.back()


@pytest.mark.parametrize(
    ("how", "where", "told"), [("kept", "host", True), ("non-reentrant", "host", False), ("kept", "all on the host", False)]
)
def test_activations_that_do_not_go_away_are_told_once(caplog, tmp_path, how, where, told):
    caplog.set_level("WARNING", logger="naught")
    train(how, 1, *asked(where, str(tmp_path)), {})
    assert len([record for record in caplog.records if "none did in the first step" in record.message]) == int(told)


def test_a_folder_in_a_place_that_is_not_there_is_not_made(tmp_path):
    where = {"activations": "disk", "nvme_path": str(tmp_path / "not mounted" / "here")}
    with pytest.raises(StorageError, match="Mount the disk"):
        engine_of(Tower("ours"), config_of(1, more={"naught": where}))
    assert not (tmp_path / "not mounted").exists()
