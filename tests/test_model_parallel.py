"""Ranks that have a model together, by torch's tensor parallelism or by hand: states are split over the others, and training is
what it is with plain data parallelism, bit for bit."""

from __future__ import annotations

import logging
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from training import HYPER, _clip, config_of, digest

from naught import initialize, zero
from naught.checkpoints import Piece
from naught.engine import Engine
from naught.errors import ModelError, NaughtError, UsageError
from naught.fragments import safe_get_full_fp32_param
from naught.within import Within

WIDTH, HEADS, TOKENS, LAYERS, WORDS = 64, 4, 128, 3, 96
MESSAGE = 2 * TOKENS * WIDTH * 4  # what a block is given
HOST = {"device": "cpu"}


class Block(nn.Module):
    """A transformer's, as Megatron cuts it: heads and the middle of the perceptron by their outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.mixed, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        seen = self.mixed(self.norm(x)).unflatten(-1, (-1, 3, WIDTH // HEADS)).transpose(1, 2)
        mixed = nn.functional.scaled_dot_product_attention(*seen.unbind(3), is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(torch.tanh(self.up(self.norm2(x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))

    def forward(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        del mask
        x = self.words(ids)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=True)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


@cache  # a mesh makes groups of processes, and a worker lives on
def mesh_of(data: int, model: int) -> DeviceMesh:
    return init_device_mesh("cpu", (data, model), mesh_dim_names=("dp", "tp"))


def cut(mesh: DeviceMesh) -> Model:
    torch.manual_seed(0)
    model = Model()
    plan: dict[str, Any] = {"head": ColwiseParallel(output_layouts=Replicate())}
    for at in range(LAYERS):
        plan |= {f"blocks.{at}.{name}": ColwiseParallel() for name in ("mixed", "up")}
        plan |= {f"blocks.{at}.{name}": RowwiseParallel() for name in ("out", "down")}
    parallelize_module(model, mesh["tp"], plan)
    return model


def batch(step: int, part: int) -> Tensor:
    return torch.randint(0, WORDS, (2, TOKENS), generator=torch.Generator().manual_seed(10 * step + part))


def take_steps(engine: Engine, part: int, steps: int, first: int = 0) -> tuple[list[float], list[float]]:
    losses, norms = [], []
    for step in range(first, first + steps):
        loss = engine(batch(step, part))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        norms.append(engine.get_global_grad_norm())
    return losses, norms


def start(stage: int, **options: Any) -> Engine:
    mesh = mesh_of(2, 2)
    return initialize(model=cut(mesh), config=config_of(stage, **options), mesh=mesh)[0]


def train(stage: int, steps: int = 4, **options: Any) -> tuple[list[float], list[float], str]:
    engine = start(stage, **options)
    losses, norms = take_steps(engine, mesh_of(2, 2)["dp"].get_local_rank(), steps)
    engine.destroy()
    return losses, norms, digest_of(engine.module)


def digest_of(model: nn.Module) -> str:
    """Of the whole weights."""
    return digest([param.full_tensor() if isinstance(param, DTensor) else param for param in model.parameters()])


def train_plainly(norms: list[float], clip: float) -> tuple[list[float], str]:
    """The same two parts of a model, plain PyTorch, the batches of both data-parallel ranks one after the other."""
    model = cut(mesh_of(1, 2))
    kinds = [[param for param in model.parameters() if isinstance(param, DTensor) is kind] for kind in (True, False)]
    hyper = {**HYPER, "betas": tuple(HYPER["betas"])}
    optimizer = torch.optim.AdamW([{"params": params} for params in kinds], **hyper, fused=True)
    losses = []
    for step, norm in enumerate(norms):
        optimizer.zero_grad()
        for part in range(2):
            loss = model(batch(step, part))
            (loss / 2).backward()
            losses += [loss.item()] if part == 0 else []
        wholes = [grad.full_tensor() if isinstance(grad := param.grad, DTensor) else grad for param in model.parameters()]
        for whole, param in zip(wholes, model.parameters(), strict=True):
            held = nn.Parameter(whole)
            held.grad = whole
            param.whole = held
        if clip:
            _clip([param.whole for param in model.parameters()], clip, norm)
            for param in model.parameters():
                if isinstance(param, DTensor):
                    param.grad = distribute_tensor(param.whole.grad, param.device_mesh, param.placements)
        optimizer.step()
    return losses, digest_of(model)


def test_stages_beside_tensor_parallelism_are_plain_data_parallelism_bit_for_bit(worlds):
    for clip in (0.0, 0.5):
        runs = [worlds[4].run(train, stage, clip=clip) for stage in (0, 1, 2, 3)]
        runs += [worlds[4].run(train, 2, clip=clip, offload_optimizer=HOST)]
        runs += [worlds[4].run(train, 3, clip=clip, offload_optimizer=HOST, offload_param=HOST)]
        assert all(run == runs[0] for run in runs)
        first = runs[0]
        assert [ranks[1:] for ranks in first] == [first[0][1:]] * 4  # norms and weights
        assert first[0][0] == first[1][0] != first[2][0] == first[3][0]  # each data-parallel rank has its own batches
        for losses, weights in worlds[2].run(train_plainly, first[0][1], clip):
            assert losses == first[0][0]
            assert weights == first[0][2]


def held_and_sent(stage: int) -> tuple[int, int, int]:
    engine = start(stage)
    take_steps(engine, mesh_of(2, 2)["dp"].get_local_rank(), 2)
    report = engine.report()
    local = sum(param.numel() for param in engine.module.parameters())
    states = report["live"]["states"]
    engine.destroy()
    return local, states, sum(param.numel() for param in engine.module.parameters())


def test_states_are_split_over_the_ranks_with_the_same_part(worlds):
    for local, states, whole in worlds[4].run(held_and_sent, 2):
        assert whole / 2 < local < 0.6 * whole  # norms and words are on both
        assert states == pytest.approx(2 * 4 * local / 2, rel=0.02)  # and gaps


class AllReduces(TorchDispatchMode):
    """What tensor parallelism has summed, in bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        if "_c10d_functional.all_reduce" in str(func):
            self.nbytes += args[0].nbytes
        return func(*args, **(kwargs or {}))


def partitioned(
    block: dict[str, Any] | None, ours: dict[str, Any] | None = None
) -> tuple[list[float], str, int, int, dict[str, int]]:
    more = {} if block is None else {"more": {"activation_checkpointing": block, "naught": ours or {}}}
    engine = start(0, **more)
    part = mesh_of(2, 2)["dp"].get_local_rank()
    with AllReduces() as seen:
        losses = take_steps(engine, part, 2)[0]
    ledger = engine.watch.ledger
    sent = sum(nbytes for key, nbytes in ledger.sent.items() if key[:2] == ("all-gather", "activations"))
    peak = dict(engine.report()["peak"])
    engine.destroy()
    return losses, digest_of(engine.module), sent, seen.nbytes, peak


def test_checkpoints_are_split_over_the_ranks_that_have_a_model_together(worlds, tmp_path):
    """ZeRO-R: an all-gather of each checkpoint, a twelfth of what tensor parallelism itself sends for a block."""
    plain = worlds[4].run(partitioned, None)
    split = worlds[4].run(partitioned, {"partition_activations": True})
    away = worlds[4].run(partitioned, {"partition_activations": True, "cpu_checkpointing": True})
    on_disk = {"activations": "disk", "nvme_path": str(tmp_path)}
    below = worlds[4].run(partitioned, {"partition_activations": True}, on_disk)
    for (losses, weights, _, reduced, _), *others in zip(plain, split, away, below, strict=True):
        for other in others:
            assert other[:2] == (losses, weights)
            assert other[2] == 2 * LAYERS * MESSAGE // 2  # steps, checkpoints; a rank of two sends its half
            # Two all-reduces in each forward, as many when it is computed again, and in the backward. The head has one.
            blocks = reduced - 2 * MESSAGE
            assert blocks == 2 * 6 * LAYERS * MESSAGE
            by_ranks = 2 * blocks // 2  # a rank of two sends half in a reduce-scatter, and half in an all-gather
            assert 12 * other[2] == by_ranks
        assert others[1][4]["host activations"] == LAYERS * MESSAGE // 2
        assert others[2][4]["disk activations"] >= LAYERS * MESSAGE // 2


def save(folder: str) -> tuple[list[float], str]:
    engine = start(3, offload_optimizer=HOST)
    part = mesh_of(2, 2)["dp"].get_local_rank()
    take_steps(engine, part, 2)
    engine.save_checkpoint(folder, "two")
    engine.save_16bit_model(folder, "whole.safetensors")
    losses = take_steps(engine, part, 2, first=2)[0]
    engine.destroy()
    return losses, digest_of(engine.module)


def go_on(folder: str, stage: int) -> tuple[list[float], str]:
    engine = start(stage)
    engine.load_checkpoint(folder, "two")
    losses = take_steps(engine, mesh_of(2, 2)["dp"].get_local_rank(), 2, first=2)[0]
    engine.destroy()
    return losses, digest_of(engine.module)


def load_elsewhere(folder: str, path: str, **by: Any) -> tuple[str, str]:
    """In a model that every rank has whole, or of which each has another part."""
    found = []
    for source in ("checkpoint", "weights"):
        torch.manual_seed(1)
        mesh = by.get("mesh") and mesh_of(*by["mesh"])
        model = Model() if mesh is None else cut(mesh)
        engine = initialize(model=model, config=config_of(2), **({} if mesh is None else {"mesh": mesh}))[0]
        if source == "checkpoint":
            engine.load_checkpoint(folder, "two")
        else:
            engine.load_weights(Path(path))
        engine.destroy()
        found.append(digest_of(model))
    return found[0], found[1]


def test_checkpoints_are_of_the_whole_model(worlds, tmp_path):
    folder = str(tmp_path)
    saved = worlds[4].run(save, folder)
    assert worlds[4].run(go_on, folder, 1) == saved
    wholes = {found for size in (1, 2) for found in worlds[size].run(load_elsewhere, folder, f"{folder}/whole.safetensors")}
    wholes |= set(worlds[2].run(load_elsewhere, folder, f"{folder}/whole.safetensors", mesh=(1, 2)))
    wholes |= set(worlds[4].run(load_elsewhere, folder, f"{folder}/whole.safetensors", mesh=(1, 4)))
    assert len(wholes) == 1
    checkpoint_, weights = wholes.pop()
    assert checkpoint_ == weights


# --- by hand, as Megatron's layers are ---------------------------------------------------------------------------------


class _Copied(torch.autograd.Function):
    """What every rank has goes to all parts: its gradient is the sum of theirs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        grad = grad.clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(_: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class Perceptron(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class ByHand(Perceptron):
    """The same, with half of each matrix."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.group, rank = group, dist.get_rank(group)
        for layer, dim in ((self.up, 0), (self.down, 1)):
            layer.weight = nn.Parameter(layer.weight.detach().chunk(2, dim)[rank].contiguous())
            layer.weight.tensor_model_parallel, layer.weight.partition_dim = True, dim

    def forward(self, x: Tensor) -> Tensor:
        return x + _Summed.apply(self.down(torch.tanh(self.up(_Copied.apply(self.norm(x), self.group)))), self.group)


class Mpu:
    """As Megatron's has them."""

    def get_model_parallel_group(self) -> dist.ProcessGroup:
        return mesh_of(2, 2)["tp"].get_group()

    def get_data_parallel_group(self) -> dist.ProcessGroup:
        return mesh_of(2, 2)["dp"].get_group()

    def get_model_parallel_world_size(self) -> int:
        return 2


class Row(nn.Module):
    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def by_hand_or_torch(kind: str, stage: int, folder: str = "") -> tuple[list[float], list[float], str]:
    mesh = mesh_of(2, 2)
    torch.manual_seed(0)
    if kind == "hand":
        model, how = Row(*(ByHand(mesh["tp"].get_group()) for _ in range(2))), {"mpu": Mpu()}
    else:
        model, how = Row(Perceptron(), Perceptron()), {"mesh": mesh}
        for block in model.blocks:
            parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    engine = initialize(model=model, config=config_of(stage, clip=0.1), **how)[0]
    losses, norms = [], []
    for step in range(3):
        draw = torch.Generator().manual_seed(10 * step + mesh["dp"].get_local_rank())
        loss = engine(torch.randn(16, WIDTH, generator=draw))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        norms.append(engine.get_global_grad_norm())
    weights = engine.save_16bit_model(f"{folder}/{kind}{stage}", "whole.safetensors")
    engine.destroy()
    return losses, norms, weights


def test_what_is_cut_by_hand_trains_like_what_torch_cuts(worlds, tmp_path):
    runs = [worlds[4].run(by_hand_or_torch, kind, stage, str(tmp_path)) for kind in ("torch", "hand") for stage in (1, 3)]
    assert all([rank[:2] for rank in run] == [rank[:2] for rank in runs[0]] for run in runs)
    files = {(tmp_path / f"{kind}{stage}" / "whole.safetensors").read_bytes() for kind in ("torch", "hand") for stage in (1, 3)}
    assert len(files) == 1


# --- mistakes ----------------------------------------------------------------------------------------------------------


def refused(how: str) -> str:
    mesh = mesh_of(2, 2)
    model: nn.Module = cut(mesh)
    options: dict[str, Any] = {"mesh": mesh}
    if how == "no mesh":
        options = {}
    elif how == "both":
        options["mpu"] = Mpu()
    elif how == "another mesh":
        options["mesh"] = init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp", "dp"))
    elif how == "names":
        options["mesh"] = init_device_mesh("cpu", (2, 2), mesh_dim_names=("x", "y"))
    elif how == "tiles":
        options["more"] = {"naught": {"tiles": 2}}
    elif how == "uneven":
        model = nn.Sequential(nn.Linear(6, 3), nn.Linear(3, 6))
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    elif how == "mpu":
        options = {"mpu": object()}
    elif how == "hybrid":
        options["mesh"] = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "shard"))
    elif how == "whole":
        model = Model()
    elif how == "dim":
        model = Row(ByHand(mesh["tp"].get_group()))
        del model.blocks[0].up.weight.partition_dim
        options = {"mpu": Mpu()}
    elif how == "init":
        with zero.Init():
            model = Row(ByHand(mesh["tp"].get_group()))
        for layer, dim in ((model.blocks[0].up, 0), (model.blocks[0].down, 1)):
            layer.weight.tensor_model_parallel, layer.weight.partition_dim = True, dim
        options = {"mpu": Mpu()}
    elif how == "all":
        block = {"partition_activations": True}
        options["more"] = {"activation_checkpointing": block, "naught": {"activations": "host", "saved_tensors": "all"}}
    more = options.pop("more", None)
    with pytest.raises((UsageError, ModelError)) as error:
        initialize(model=model, config=config_of(3, more=more), **options)
    return str(error.value)


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("no mesh", "DTensors, and nobody says which ranks"),
        ("both", "both mesh and mpu"),
        ("another mesh", "which are not the ranks that have a model together"),
        ("names", 'dimensions "x", "y"'),
        ("tiles", "not divided into tiles"),
        ("uneven", "cannot be cut into 2 equal parts along dimension 0"),
        ("mpu", "get_model_parallel_group"),
        ("hybrid", 'dimensions "dp", "shard"'),
        ("whole", "no parameter is cut"),
        ("dim", "nobody says along which dimension"),
        ("init", "split over all ranks while it was built"),
        ("all", "cannot be split over them"),
    ],
)
def test_mistakes_are_told_on_every_rank(worlds, how, said):
    for story in worlds[4].run(refused, how):
        assert said in story


def fails_on_one(stage: int) -> str:
    engine = start(stage)
    part = mesh_of(2, 2)["dp"].get_local_rank()
    loss = engine(batch(0, part))
    engine.backward(loss)
    if dist.get_rank() == 1:
        with engine.schedule.group.noting():
            raise UsageError("a rank alone")
    with pytest.raises(UsageError) as error:
        engine.step()
    engine.destroy()
    return str(error.value)


def test_a_fault_of_one_rank_is_told_to_those_that_have_the_model_with_it_and_to_all(worlds):
    for story in worlds[4].run(fails_on_one, 2):
        assert "a rank alone" in story


def write(stage: int) -> tuple[list[float], list[float], list[bool]]:
    """One rank writes what all have; and each part is written by the ranks that have it beside the writer."""
    engine = start(stage)
    words, up = engine.module.words.weight, engine.module.blocks[0].up
    with zero.GatheredParameters([words, up.weight], modifier_rank=3):
        if dist.get_rank() == 3:
            words.data.fill_(0.5)
        if dist.get_rank() in (2, 3):  # the second half of the data-parallel ranks
            engine.module.blocks[0].up._parameters["weight"].data.fill_(float(dist.get_rank()))
    with engine.gathered():
        seen = [words.unique().tolist(), up._parameters["weight"].unique().tolist()]
    whole = safe_get_full_fp32_param(up.weight)
    take_steps(engine, mesh_of(2, 2)["dp"].get_local_rank(), 1)
    engine.destroy()
    return *seen, (whole == seen[1][0]).flatten().unique().tolist()


@pytest.mark.parametrize("stage", [1, 3])
def test_what_a_rank_writes_is_kept_by_all_that_have_it(worlds, stage):
    found = worlds[4].run(write, stage)
    assert [words for words, _, _ in found] == [[0.5]] * 4
    assert [part for _, part, _ in found] == [[2.0], [3.0]] * 2
    assert all(same == [True] for _, _, same in found)


def draw_after(folder: str, data: int, model: int) -> float:
    mesh = mesh_of(data, model)
    options = {"mesh": mesh} if model > 1 else {}
    torch.manual_seed(dist.get_rank())
    net = cut(mesh) if model > 1 else Model()
    engine = initialize(model=net, config=config_of(1), **options)[0]
    torch.manual_seed(100 + mesh["dp"].get_local_rank())
    if not Path(folder).exists() or not any(Path(folder).iterdir()):
        dist.barrier()
        engine.save_checkpoint(folder, "first")
    engine.load_checkpoint(folder, "first")
    engine.destroy()
    return torch.rand(1).item()


def test_random_numbers_of_another_cut_are_not_taken_for_ones_own(worlds, tmp_path):
    """Ranks that have a model together must draw alike, for all of them compute what is not cut."""
    whole = worlds[4].run(draw_after, str(tmp_path / "x"), 4, 1)
    assert len(set(whole)) == 4
    first, second, third, fourth = worlds[4].run(draw_after, str(tmp_path / "x"), 2, 2)
    assert (first, third) == (second, fourth)
    assert first != third


class OwnInputs(Model):
    """Blocks that are given what each rank has for itself."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids) * (1 + dist.get_rank())
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x.square().mean()


def partition_what_differs() -> str:
    mesh = mesh_of(2, 2)
    torch.manual_seed(0)
    model = OwnInputs()
    for block in model.blocks:
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        block.mixed = nn.Linear(WIDTH, 3 * WIDTH)
    more = {"activation_checkpointing": {"partition_activations": True}}
    engine = initialize(model=model, config=config_of(1, more=more), mesh=mesh)[0]
    with pytest.raises(ModelError) as error:
        engine(batch(0, 0))
    engine.destroy()
    return str(error.value)


def test_only_what_is_the_same_is_split(worlds):
    for story in worlds[4].run(partition_what_differs):
        assert "is not the same on the ranks that have a model together" in story


def train_otherwise(kind: str, folder: str = "") -> tuple[list[float], str]:
    """Norms of parts of a sequence, 16 bits, one data-parallel rank, states on disk."""
    mesh = mesh_of(1, 2) if kind.startswith("alone") else mesh_of(2, 2)
    model = cut(mesh)
    if kind == "sequence":
        first = PrepareModuleInput(input_layouts=(Replicate(),), desired_input_layouts=(Shard(1),))
        for norm in (norm for block in model.blocks for norm in (block.norm, block.norm2)):
            parallelize_module(parallelize_module(norm, mesh["tp"], first), mesh["tp"], SequenceParallel())
    more = {"bf16": {"enabled": True}} if kind == "bf16" else {}
    place = {"device": "nvme", "nvme_path": folder}
    places = {"offload_param": place, "offload_optimizer": place} if folder else {}
    config = config_of(3 if folder else 1, accumulation=2, more=more, **places)
    engine = initialize(model=model, config=config, mesh=mesh)[0]
    losses = take_steps(engine, mesh["dp"].get_local_rank(), 4)[0]
    engine.destroy()
    return losses, digest_of(model)


def test_one_data_parallel_rank_trains_from_disk_as_from_memory(worlds, tmp_path):
    assert worlds[2].run(train_otherwise, "alone") == worlds[2].run(train_otherwise, "alone", str(tmp_path))


def train_with_a_flag_of_one() -> tuple[list[float], str]:
    mesh = mesh_of(2, 1)
    model = cut(mesh)
    engine = initialize(model=model, config=config_of(2), mesh=mesh)[0]
    losses = take_steps(engine, mesh["dp"].get_local_rank(), 4)[0]
    engine.destroy()
    return losses, digest_of(model)


def train_whole() -> tuple[list[float], str]:
    torch.manual_seed(0)
    engine = initialize(model=Model(), config=config_of(2))[0]
    losses = take_steps(engine, dist.get_rank(), 4)[0]
    engine.destroy()
    return losses, digest_of(engine.module)


def test_one_rank_that_has_the_model_together_with_nobody(worlds):
    assert worlds[2].run(train_with_a_flag_of_one) == worlds[2].run(train_whole)


def test_sixteen_bits_and_micro_batches(worlds):
    found = worlds[4].run(train_otherwise, "bf16")
    assert len({weights for _, weights in found}) == 1
    assert found[0][0][-1] < found[0][0][0]


def test_gradients_of_which_every_rank_has_a_summand_are_summed(worlds):
    """A norm over a part of a sequence has a part of its gradient: with it training is what it is without, but for rounding."""
    plain, parts = worlds[4].run(train_otherwise, "plain"), worlds[4].run(train_otherwise, "sequence")
    assert len({weights for _, weights in parts}) == 1
    for (losses, _), (others, _) in zip(plain, parts, strict=True):
        assert losses == pytest.approx(others, rel=1e-4)


def test_where_the_elements_of_a_part_lie():
    whole = torch.arange(4 * 6 * 5).reshape(4, 6, 5)
    for dim, count in ((0, 2), (1, 3), (2, 5)):
        for index in range(count):
            part = whole.chunk(count, dim)[index].flatten()
            within = Within.cut("x", tuple(whole.shape), dim, index, count)
            for start_, stop in ((0, part.numel()), (3, part.numel() - 2), (5, 6)):
                strips = list(within.strips(start_, stop))
                pieces = [Piece(param="x", first=a, count=b, at=0, row=c, stride=d) for a, b, c, d in strips]
                lines = [line for piece in pieces for line in piece.lines()]
                found = torch.cat([whole.flatten()[line.first : line.first + line.numel] for line in lines])
                assert torch.equal(found, part[start_:stop])
                assert len(pieces) <= 3


def warnings_about_inputs(differ_after: int) -> list[str]:
    """Of five steps, so many of which have what they should."""
    engine = start(1)
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("naught").addHandler(handler)
    mine = mesh_of(2, 2)["dp"].get_local_rank()
    for step in range(5):
        take_steps(engine, mine if step < differ_after else dist.get_rank(), 1)
    logging.getLogger("naught").removeHandler(handler)
    engine.destroy()
    return [text for text in said if "different inputs" in text]


def give_awkward_inputs(index: int) -> float:
    engine = start(1)
    whole = torch.eye(3, dtype=torch.complex64)
    masks = [
        whole.to_sparse(),
        torch.nested.nested_tensor([whole[0].real]),
        whole.conj(),
        torch.empty(3, device="meta"),
        whole[:0],
    ]
    loss = engine(batch(0, mesh_of(2, 2)["dp"].get_local_rank()), mask=masks[index])
    engine.destroy()
    return loss.item()


def test_inputs_of_any_kind_can_be_looked_at(worlds):
    found = [worlds[4].run(give_awkward_inputs, index) for index in range(5)]
    assert all(each == found[0] for each in found)


def test_batches_that_differ_where_a_model_is_had_together_are_told_once(worlds):
    assert worlds[4].run(warnings_about_inputs, 5) == [[]] * 4
    for differ_after, noticed in ((0, 1), (1, 2), (2, 4)):
        first, *others = worlds[4].run(warnings_about_inputs, differ_after)
        assert len(first) == 1
        assert f"different inputs in step {noticed}." in first[0]
        assert 'mesh["dp"].get_local_rank()' in first[0]
        assert others == [[]] * 3


def fail_to_start() -> tuple[list[bool], bool, float]:
    """A model and an optimizer of the user's own, and a configuration whose folder is a file."""
    mesh = mesh_of(2, 2)
    model = cut(mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    bad = config_of(2, offload_optimizer={"device": "nvme", "nvme_path": __file__})
    del bad["optimizer"]
    with pytest.raises(NaughtError):
        initialize(model=model, optimizer=optimizer, config=bad, mesh=mesh)
    theirs = [param for group in optimizer.param_groups for param in group["params"]]
    same = [one is other for one, other in zip(theirs, model.parameters(), strict=True)]
    loss = model(batch(0, 0))
    loss.backward()
    optimizer.step()
    return same, isinstance(model.head.weight, DTensor), model(batch(0, 0)).item() - loss.item()


def test_a_start_that_fails_leaves_model_and_optimizer_to_go_on_alone(worlds):
    for same, cut_again, change in worlds[4].run(fail_to_start):
        assert all(same)
        assert cut_again
        assert change < 0


class Tied(Model):
    """A head that is the words, which are cut when the model is; a norm and a part of a layer that are not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].norm.requires_grad_(False)
        self.blocks[2].up.requires_grad_(False)


def train_tied(stage: int, more: dict[str, Any], folder: str | None = None) -> tuple[list[float], list[float], str]:
    mesh = mesh_of(2, 2)
    torch.manual_seed(0)
    model = Tied()
    plan: dict[str, Any] = {}
    for at in range(LAYERS):
        plan |= {f"blocks.{at}.{name}": ColwiseParallel() for name in ("mixed", "up")}
        plan |= {f"blocks.{at}.{name}": RowwiseParallel() for name in ("out", "down")}
    plan |= {"words": RowwiseParallel(input_layouts=Replicate()), "head": ColwiseParallel(output_layouts=Replicate())}
    parallelize_module(model, mesh["tp"], plan)
    model.head.weight = model.words.weight
    engine = initialize(model=model, config=config_of(stage, clip=0.5, more=more), mesh=mesh)[0]
    part = mesh["dp"].get_local_rank()
    losses, norms = take_steps(engine, part, 2)
    if folder is not None:  # while it is written training goes on, and then it goes on from there again
        engine.save_checkpoint(folder, "two", asynchronous=True)
        take_steps(engine, part, 1, first=2)
        engine.load_checkpoint(folder, "two")
    more_losses, more_norms = take_steps(engine, part, 2, first=2)
    engine.destroy()
    assert isinstance(model.head.weight, DTensor)
    assert model.head.weight is model.words.weight
    return losses + more_losses, norms + more_norms, digest_of(model)


@pytest.mark.parametrize("more", [{}, {"fp16": {"enabled": True, "initial_scale_power": 8}}], ids=["fp32", "fp16"])
def test_tied_and_frozen_weights_and_saves_in_the_background(worlds, more, tmp_path):
    runs = [worlds[4].run(train_tied, stage, more) for stage in (0, 2, 3)]
    assert runs[0] == runs[1] == runs[2]
    assert worlds[4].run(train_tied, 3, more, str(tmp_path)) == runs[0]
