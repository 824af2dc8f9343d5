"""Layers in pieces: what the whole layer gives, with one piece in memory at a time."""

from __future__ import annotations

import hashlib

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_offload import HOST, ON_GPU
from torch import nn
from torch.nn import functional
from training import DEVICE, config_of, digest_in_32_bits, engine_of, my_rank

from naught import initialize, zero
from naught.dividing import divide
from naught.errors import NaughtError, UsageError
from naught.fragments import safe_get_full_fp32_param
from naught.zero import TiledEmbedding, TiledLinear, chunked_cross_entropy, tile_linears

SPREAD = {"stage3_param_persistence_threshold": 0}


@given(st.integers(1, 40), st.integers(1, 70), st.integers(1, 8), st.integers(1, 8), st.booleans())
def test_pieces_give_what_the_layer_gives(wide, high, in_splits, out_splits, bias):
    in_splits, out_splits = min(in_splits, wide), min(out_splits, high)
    torch.manual_seed(0)
    whole = nn.Linear(wide, high, bias=bias)
    tiled = TiledLinear(wide, high, bias=bias, in_splits=in_splits, out_splits=out_splits, init_linear=whole)
    x = torch.randn(3, 5, wide)
    torch.testing.assert_close(tiled(x), whole(x))
    assert sum(param.numel() for param in tiled.parameters()) == sum(param.numel() for param in whole.parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("splits", [2, 4, 16])
def test_along_the_outputs_it_is_the_same_to_the_last_bit(dtype, splits):
    torch.manual_seed(0)
    whole = nn.Linear(256, 1024, dtype=dtype, device=DEVICE)
    tiled = TiledLinear(256, 1024, out_splits=splits, init_linear=whole, dtype=dtype, device=DEVICE)
    x = torch.randn(32, 256, dtype=dtype, device=DEVICE)
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    (tiled(ours).square().sum()).backward()
    (whole(theirs).square().sum()).backward()
    grads = torch.cat([row[0].weight.grad for row in tiled.linears])
    pairs = [(tiled(x), whole(x)), (grads, whole.weight.grad)]
    # A GPU's library has other kernels for other shapes, and their sums another order.
    alike = [torch.equal(a, b) or (ON_GPU and _close(a, b, 4 * torch.finfo(dtype).eps)) for a, b in pairs]
    assert alike == [True, True]
    # An input's gradient is a sum over the pieces, each of them rounded.
    assert _close(ours.grad, theirs.grad, 2 * splits * torch.finfo(dtype).eps)


def _close(a: torch.Tensor, b: torch.Tensor, share: float) -> bool:
    """Within a share of the largest."""
    return bool((a - b).abs().max() <= share * b.abs().max())


def test_parts_of_inputs_and_outputs_may_stay_apart():
    torch.manual_seed(0)
    whole = nn.Linear(6, 10)
    options = {"in_splits": 2, "out_splits": 3, "input_is_already_split": True, "combine_out_splits": False}
    tiled = TiledLinear(6, 10, init_linear=whole, **options)
    x = torch.randn(4, 6)
    parts = tiled(list(x.split(3, dim=-1)))
    assert [part.shape[-1] for part in parts] == [4, 3, 3]
    torch.testing.assert_close(torch.cat(parts, dim=-1), whole(x))


def test_mistakes_are_told():
    with pytest.raises(UsageError, match="out_splits is 5, and there are 4 features"):
        TiledLinear(4, 4, out_splits=5)
    with pytest.raises(UsageError, match="a layer of 4 inputs was given"):
        TiledLinear(4, 4)(torch.zeros(2, 3))
    with pytest.raises(UsageError, match="is not one of"):
        TiledLinear(4, 4, init_linear=nn.Linear(4, 5))
    with pytest.raises(UsageError, match="has a bias"):
        TiledLinear(4, 4, init_linear=nn.Linear(4, 4, bias=False))
    with pytest.raises(UsageError, match="wants a list of as many tensors"):
        TiledLinear(4, 4, in_splits=2, input_is_already_split=True)(torch.zeros(2, 4))


class Wide(nn.Module):
    """Blocks whose second layer is by far the largest."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.ModuleDict({"norm": nn.LayerNorm(32), "up": nn.Linear(32, 512), "down": nn.Linear(512, 32)}) for _ in range(3)
        )
        self.head = nn.Linear(32, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block["down"](functional.gelu(block["up"](block["norm"](x))))
        return self.head(x).square().mean()


def batch(step: int) -> torch.Tensor:
    return torch.randn(4, 32, generator=torch.Generator().manual_seed(10 * step + my_rank())).to(DEVICE)


def train(stage: int, tiles: int, zero: dict) -> tuple[list[float], int, str]:
    torch.manual_seed(0)
    model = Wide()
    if tiles > 1:
        assert len(tile_linears(model, tiles, at_least=4096)) == 6
    engine = engine_of(model, config_of(stage, **SPREAD, stage3_prefetch_bucket_size=0, **zero))
    losses = []
    for step in range(4):
        loss = engine(batch(step))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses, engine.report()["peak"].get("gathered weights", 0), digest_in_32_bits(engine)


def test_only_a_piece_is_gathered_at_a_time(two):
    whole, tiled = (two.run(train, 3, tiles, {}) for tiles in (1, 8))
    for (theirs, most, _), (ours, less, _) in zip(whole, tiled, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4)
        assert less < most / 3


def test_training_in_pieces_is_the_same_at_every_stage_and_on_disk(two, tmp_path):
    disk = {"device": "nvme", "nvme_path": str(tmp_path)}
    both = {"offload_optimizer": disk, "offload_param": disk | {"max_in_cpu": 0}}
    host = {"offload_optimizer": HOST} if ON_GPU else {}  # what the host's kernel gives is compared with what it gives
    for stage, offload, near in ((1, {}, {}), (3, {}, {}), (3, both, host)):
        found, expected = two.run(train, stage, 4, offload), two.reference(train, 2 if near else 0, 4, near)
        assert [(losses, digest) for losses, _, digest in found] == [(losses, digest) for losses, _, digest in expected]


def test_a_tied_layer_stays_whole():
    model = nn.Sequential(nn.Embedding(100, 64), nn.Linear(64, 100, bias=False))
    model[1].weight = model[0].weight
    assert tile_linears(model, 4, at_least=1) == []


def test_what_is_frozen_stays_so():
    model = nn.Sequential(nn.Linear(8, 8))
    model[0].weight.requires_grad_(False)
    tile_linears(model, 2, at_least=1)
    assert {name.split(".")[-1]: param.requires_grad for name, param in model.named_parameters()} == {
        "weight": False,
        "bias": True,
    }


@pytest.mark.parametrize("chunks", [1, 3, 8])
def test_a_loss_in_chunks_is_the_loss(chunks):
    torch.manual_seed(0)
    head = nn.Linear(16, 50)
    hidden, labels = torch.randn(2, 9, 16, requires_grad=True), torch.randint(0, 50, (2, 9))
    labels[0, 3] = -100
    whole = functional.cross_entropy(head(hidden).view(-1, 50), labels.view(-1))
    wanted = torch.autograd.grad(whole, [hidden, head.weight])
    found = chunked_cross_entropy(hidden, head, labels, chunks=chunks)
    torch.testing.assert_close(found, whole, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(torch.autograd.grad(found, [hidden, head.weight]), wanted, rtol=1e-5, atol=1e-7)


def test_the_logits_of_a_loss_in_chunks_are_never_there_all_at_once():
    seen: list[int] = []

    class Head(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append(len(x))
            return super().forward(x)

    head = Head(8, 1000)
    chunked_cross_entropy(torch.randn(64, 8, requires_grad=True), head, torch.zeros(64, dtype=torch.int64), chunks=8).backward()
    assert seen == [8] * 16  # each once more in the backward


def test_labels_of_other_tokens_are_told():
    with pytest.raises(UsageError, match="hidden states of 4 tokens, and labels of 5"):
        chunked_cross_entropy(torch.zeros(4, 2), nn.Linear(2, 3), torch.zeros(5, dtype=torch.int64))


# --- what the configuration divides ---


class Reader(nn.Module):
    """An embedding, blocks and a head, as language models have them."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(61, 32)
        self.body = Wide()
        self.norm = nn.LayerNorm(32)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.body(self.norm(self.table(ids)))


@given(st.integers(1, 30), st.integers(1, 6), st.data())
def test_an_embedding_in_pieces_is_the_same_to_the_last_bit(rows, splits, data):
    whole, tiled = nn.Embedding(rows, 5), TiledEmbedding(rows, 5, min(splits, rows))
    tiled.copy_params_from(whole)
    ids = torch.tensor(data.draw(st.lists(st.integers(0, rows - 1), min_size=1, max_size=20)))
    weight = torch.randn(len(ids), 5)
    for layer in (whole, tiled):
        (layer(ids) * weight).sum().backward()
    assert torch.equal(tiled(ids), whole(ids))
    assert torch.equal(torch.cat([table.weight.grad for table in tiled.tables]), whole.weight.grad)


def read(engine, steps: int, first: int = 0) -> list[float]:
    losses = []
    for step in range(first, first + steps):
        ids = torch.randint(0, 61, (4, 8), generator=torch.Generator().manual_seed(10 * step + my_rank())).to(DEVICE)
        loss = engine(ids)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def started(tiles: int, own: bool = False):
    torch.manual_seed(0)
    model = Reader().to(DEVICE)
    config = config_of(3, more={"naught": {"tiles": tiles}}, **SPREAD, stage3_prefetch_bucket_size=0)
    if own:
        del config["optimizer"]
        groups = [
            {"params": list(model.body.parameters()), "lr": 2e-3},
            {"params": [model.table.weight, *model.norm.parameters()]},
        ]
        return initialize(model=model, optimizer=torch.optim.AdamW(groups, lr=1e-3), config=config)[0]
    return initialize(model=model, model_parameters=model.parameters(), config=config)[0]


def divide_by_configuration(own: bool) -> list[tuple[int, int]]:
    losses, peaks = [], []
    for tiles in (1, 8):
        engine = started(tiles, own)
        losses.append(read(engine, 4))
        peak = engine.report()["peak"]
        peaks.append((peak["gathered weights"], peak["gradient flats"]))
    torch.testing.assert_close(*losses, rtol=1e-4, atol=0)
    return peaks


@pytest.mark.parametrize("own", [False, True])
def test_the_configuration_divides_large_layers(two, own):
    for whole, pieces in two.run(divide_by_configuration, own):
        assert all(least < most / 3 for most, least in zip(whole, pieces, strict=True))


class First(nn.Module):
    """A layer whose input is not a part of the graph, so that nothing but its own gradients tells that it is done; and others
    that share theirs. Nothing else is in it."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.table = nn.Embedding(128, 64) if kind == "embedding" else None
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range({"embedding": 0, "first": 1, "middle": 3}[kind]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x if self.table is None else self.table(x)
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def hold_one(kind: str) -> tuple[int, int, int]:
    torch.manual_seed(0)
    engine = engine_of(First(kind), config_of(3, more={"naught": {"tiles": 16}}, **SPREAD, stage3_prefetch_bucket_size=0))
    for _ in range(3):
        given = torch.arange(16) * 8 if kind == "embedding" else torch.randn(4, 64)
        engine.backward(engine(given.to(DEVICE)))
        engine.step()
    peak = engine.report()["peak"]
    units = [segment.layout.numel * 4 for unit in engine.schedule.units.values() for segment in unit.segments]
    return peak["gathered weights"], peak["gradient flats"], max(units)


@pytest.mark.parametrize("kind", ["embedding", "first", "middle"])
def test_one_piece_is_held_at_a_time(two, kind):
    for gathered, flats, largest in two.run(hold_one, kind):
        assert gathered == largest
        assert flats <= 2 * largest  # one may be on its way while the next is made


def digest_of(engine) -> str:
    state = engine.module_state_dict()
    assert (state["table.weight"].shape, state["body.head.weight"].shape) == ((61, 32), (64, 32))
    return hashlib.sha256(b"".join(state[name].float().numpy().tobytes() for name in sorted(state))).hexdigest()


def save_in_pieces(folder: str) -> tuple[str, str]:
    engine = started(tiles=4)
    read(engine, 2)
    engine.save_checkpoint(folder)
    engine.save_16bit_model(folder, "model.safetensors")
    saved = digest_of(engine)
    read(engine, 1, first=2)
    return saved, digest_of(engine)


def load_in_pieces(folder: str, tiles: int) -> tuple[str, str, str]:
    engine, other = started(tiles), started(tiles)
    engine.load_checkpoint(folder)
    other.load_weights(f"{folder}/model.safetensors")
    loaded = digest_of(engine)
    read(engine, 1, first=2)
    return loaded, digest_of(other), digest_of(engine)


def test_a_checkpoint_knows_layers_and_not_their_pieces(two, tmp_path):
    ((saved, later),) = set(two.run(save_in_pieces, str(tmp_path)))
    for tiles in (1, 4, 7):
        ((loaded, imported, gone_on),) = set(two.run(load_in_pieces, str(tmp_path), tiles))
        assert loaded == imported == saved
        assert tiles != 4 or gone_on == later


def test_rows_that_are_not_there_are_told():
    layer = TiledEmbedding(10, 4, 3)
    for wrong in (-1, 10, -100):
        with pytest.raises(IndexError):
            layer(torch.tensor([3, wrong]))
    with pytest.raises(UsageError, match="splits is 4, and there are 3 rows"):
        TiledEmbedding(3, 4, 4)


def test_dividing_takes_no_memory_and_draws_no_numbers():
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.TransformerEncoderLayer(64, 2, 64))
    whole = [layer.weight for layer in model[:2]]
    before = torch.get_rng_state()
    replaced = divide(model, 4)
    assert torch.equal(torch.get_rng_state(), before)
    assert sum(param.nbytes for param in whole) == 0
    assert len(replaced) == 4, "the encoder's layer reads its weights: those stay"
    with torch.no_grad():
        model.eval()(torch.randn(2, 3, 64))


def differ(how: str) -> str:
    """Ranks that differ are told so before anything that is split is brought together."""
    with zero.Init(window_bytes=1):
        model = Reader()
    mine = my_rank() == 1
    config = config_of(3, more={"naught": {"tiles": 4 if how == "tiles" and mine else 2}}, **SPREAD)
    optimizer = "nonsense" if how == "mistake" and mine else None
    with pytest.raises(NaughtError) as found:
        initialize(model=model, optimizer=optimizer, config=config)
    return str(found.value)


@pytest.mark.parametrize(("how", "words"), [("tiles", "tiles"), ("mistake", "the optimizer is a str")])
def test_ranks_that_differ_are_told_before_anything_is_divided(two, how, words):
    assert all(words in story for story in two.run(differ, how))


def read_one_that_was_split(tiles: int) -> tuple[list[float], str]:
    torch.manual_seed(0)
    with zero.Init(window_bytes=1):
        model = Reader()
    engine = engine_of(model, config_of(3, more={"naught": {"tiles": tiles}}, **SPREAD))
    return read(engine, 2), digest_of(engine)


def test_a_model_that_was_split_while_it_was_built_is_divided(two):
    found = two.run(read_one_that_was_split, 4)
    torch.testing.assert_close(found[0][0], two.run(read_one_that_was_split, 1)[0][0], rtol=1e-4, atol=0)
    assert found[0][1] == found[1][1]


def test_a_weight_from_before_its_layer_was_divided_is_told():
    model = nn.Sequential(nn.Linear(8, 64), nn.Linear(64, 8))
    before = model[0].weight
    tile_linears(model, 4, at_least=1)
    with pytest.raises(UsageError, match="divided into 4 pieces"):
        zero.GatheredParameters(before)
    with pytest.raises(UsageError, match="divided into 4 pieces"):
        safe_get_full_fp32_param(before)
    with zero.GatheredParameters(model[0]):
        assert sum(param.numel() for param in model[0].parameters()) == 8 * 64 + 64
