"""Models that are split while they are built: what a model that is built whole is, with a part of it on each rank."""

from __future__ import annotations

import math
import os
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from menagerie import MODELS
from torch import nn
from training import DEVICE, batch_of, config_of, digest_of_weights, engine_of, my_rank, take_steps

from naught import initialize, zero
from naught.born import splits
from naught.errors import ConfigError

SPREAD = {"stage3_param_persistence_threshold": 0}
SMALL_WINDOW = 20_000  # bytes: a few parameters of these models


class Written(nn.Module):
    """Written without a thought of being split: initialized by its own __init__, after its parts are built."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(100, 64)
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(6))
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(64, 2, 128, batch_first=True), 2)
        self.scale = nn.Parameter(torch.ones(64))
        self.head = nn.Linear(64, 100, bias=False)
        self.apply(self._fill)
        with torch.no_grad():
            for layer in self.layers:
                layer.weight.data.mul_(0.5)
                layer.bias += 0.25
        self.head.weight = self.embed.weight

    @staticmethod
    def _fill(module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.encoder(self.embed(ids)) * self.scale
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.head(x).square().mean()


def built(kind: type[nn.Module] | str, window: int | None, config: dict | None = None) -> nn.Module:
    torch.manual_seed(0)
    make = MODELS[kind] if isinstance(kind, str) else kind
    if window is None:
        return make()
    with zero.Init(window_bytes=window, config_dict_or_path=config):
        return make()


def compare(kind: type[nn.Module] | str, folder: str | None) -> tuple[bool, bool, int, int]:
    """Whether all is split and reads as NaN, whether the same is in it, and what one rank and all of them keep."""
    config = None
    if folder is not None:
        config = config_of(3, offload_param={"device": "nvme", "nvme_path": folder, "max_in_cpu": 0})
    whole, split = built(kind, None), built(kind, SMALL_WINDOW, config)
    params = list(split.parameters())
    apart = all(splits(param) and bool(param.isnan().all()) for param in params)
    held = sum(param.untyped_storage().nbytes() for param in params)
    with zero.GatheredParameters(params):
        same = all(map(torch.equal, params, whole.parameters()))
    return apart, same, held, sum(param.nbytes for param in params)


@pytest.mark.parametrize("kind", [Written, "plain", "tied", "convolution", "lora", "frozen"])
@pytest.mark.parametrize("on_disk", [False, True])
def test_it_is_the_model_that_would_have_been_built_whole(worlds, tmp_path, kind, on_disk):
    for size in (1, 2, 3):
        for apart, same, held, whole in worlds[size].run(compare, kind, str(tmp_path) if on_disk else None):
            assert apart
            assert same
            assert held < whole / 50, "a mark for each parameter"


class Growing(nn.Module):
    """Looks at what is whole while it is built."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.most = nn.ModuleList(), 0
        for _ in range(12):
            self.layers.append(nn.Linear(64, 64, bias=False))
            whole = sum(param.nbytes for param in self.parameters() if not splits(param))
            self.most = max(self.most, whole)


def test_no_more_is_whole_at_once_than_a_window_holds():
    each = 64 * 64 * 4
    assert built(Growing, None).most == 12 * each
    assert 2 * each <= built(Growing, 3 * each).most < 4 * each


def train(kind: type[nn.Module] | str, window: int | None, stage: int) -> tuple[list[float], str]:
    engine = engine_of(built(kind, window), config_of(stage, **SPREAD)) if window is None else start(kind, window, stage)
    return take_steps(engine, 3), digest_of_weights(engine)


def start(kind: type[nn.Module] | str, window: int, stage: int):
    return initialize(model=built(kind, window), config=config_of(stage, **SPREAD))[0]


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_training_it_is_training_the_whole_one(two, stage):
    for kind in ("plain", "tied", "frozen"):
        assert two.run(train, kind, SMALL_WINDOW, stage) == two.run(train, kind, None, stage)


def ranks_that_differ() -> bool:
    torch.manual_seed(my_rank())  # a script that forgot to seed alike
    with zero.Init(window_bytes=SMALL_WINDOW):
        model = MODELS["plain"]()
    torch.manual_seed(0)
    whole = MODELS["plain"]()
    with zero.GatheredParameters(model.parameters()):
        return all(map(torch.equal, model.parameters(), whole.parameters()))


def test_what_rank_0_has_counts(two):
    assert two.run(ranks_that_differ) == [True, True]


def write_afterwards() -> tuple[float, bool]:
    model = built("plain", SMALL_WINDOW)
    first = next(model.parameters())
    with zero.GatheredParameters(first, modifier_rank=1), torch.no_grad():
        first.fill_(float(my_rank()))
    with zero.GatheredParameters(first):
        found = first.mean().item()
    return found, bool(first.isnan().all())


def test_what_one_rank_writes_is_kept(two):
    assert two.run(write_afterwards) == [(1.0, True)] * 2


def test_a_module_that_is_there_already_is_split_at_once():
    torch.manual_seed(0)
    layer = nn.Linear(8, 8)
    before = layer.weight.clone()
    zero.Init(module=layer)
    assert splits(layer.weight)
    assert bool(layer.weight.isnan().all())
    with zero.GatheredParameters(layer):
        assert torch.equal(layer.weight, before)


def test_what_is_touched_again_and_again_takes_its_room_on_disk_once(tmp_path):
    config = config_of(3, offload_param={"device": "nvme", "nvme_path": str(tmp_path), "max_in_cpu": 0})
    with zero.Init(config_dict_or_path=config, window_bytes=1):
        layers = [nn.Linear(64, 64, bias=False) for _ in range(3)]
        for _ in range(5):
            for layer in layers:
                nn.init.normal_(layer.weight)
    ours = [handle for handle in Path("/proc/self/fd").iterdir() if os.path.realpath(handle).startswith(str(tmp_path))]
    assert [handle.stat().st_size for handle in ours] == [3 * 64 * 64 * 4]


def from_pretrained(folder: str) -> tuple[bool, bool, bool]:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4}
    if my_rank() == 0:
        torch.manual_seed(0)
        LlamaForCausalLM(LlamaConfig(vocab_size=128, num_key_value_heads=2, **sizes)).save_pretrained(folder)
    torch.distributed.barrier()
    whole = LlamaForCausalLM.from_pretrained(folder)
    with zero.Init(window_bytes=20_000):
        model = LlamaForCausalLM.from_pretrained(folder)
    parts = sum(splits(param) for param in model.parameters())
    with zero.GatheredParameters(model):
        alike = all(map(torch.equal, whole.parameters(), model.parameters()))
    engine = engine_of(model, config_of(3, stage3_param_persistence_threshold=0))
    ids = torch.arange(32, device=DEVICE).view(2, 16)
    losses = [each(input_ids=ids, labels=ids).loss.item() for each in (engine, whole.to(DEVICE))]
    return parts == len(list(whole.parameters())), alike, losses[0] == losses[1]


@pytest.mark.skipif(find_spec("transformers") is None, reason="needs the extra hf")
def test_pretrained_weights_of_hugging_face_are_split_as_they_are_read(two, tmp_path):
    assert two.run(from_pretrained, str(tmp_path)) == [(True, True, True)] * 2


def test_outside_of_the_context_nothing_is_different():
    with zero.Init(window_bytes=100):
        inside = nn.Linear(16, 16)
    with zero.Init(enabled=False):
        disabled = nn.Linear(16, 16)
    outside = nn.Linear(16, 16)
    assert splits(inside.weight)
    for layer in (disabled, outside):
        assert not splits(layer.weight)
        assert math.isfinite(layer.weight.sum().item())
    with pytest.raises(ZeroDivisionError), zero.Init():
        nn.Linear(4, 4)
        raise ZeroDivisionError
    assert not splits(nn.Linear(4, 4).weight)


def test_a_mistake_in_the_configuration_is_told_before_anything_is_built():
    with pytest.raises(ConfigError, match="stage"):
        zero.Init(config_dict_or_path={"zero_optimization": {"stage": 7}})


def test_a_model_in_use_beside_the_context_is_not_touched():
    torch.manual_seed(0)
    other = MODELS["plain"]().to(DEVICE)
    engine = engine_of(other, config_of(1))
    with zero.Init(window_bytes=SMALL_WINDOW):
        nn.Linear(32, 32)
    assert math.isfinite(engine(batch_of(0, 0)).item())


def fill_inside_of_the_context() -> tuple[bool, ...]:
    """As scripts for DeepSpeed do, and what else may happen while a model is built."""
    with zero.Init(window_bytes=100):
        one, other = nn.Linear(16, 16), nn.Linear(16, 16)
        with zero.GatheredParameters([one.weight, one.weight], modifier_rank=0), torch.no_grad():
            one.weight.fill_(2.0)
        with zero.Init(window_bytes=100):
            inner = nn.Linear(16, 16)
            nn.init.constant_(inner.weight, 3.0)
        with torch.no_grad():
            other.weight.copy_(one.weight)
            both = torch.cat([one.weight, inner.weight])
    zero.Init(module=one)  # it is split already
    with zero.GatheredParameters([one.weight, other.weight, inner.weight]):
        found = [bool((layer.weight == value).all()) for layer, value in ((one, 2.0), (other, 2.0), (inner, 3.0))]
    return *found, bool((both[:16] == 2.0).all() and (both[16:] == 3.0).all())


def test_what_is_done_to_parameters_inside_of_the_context_is_done(two):
    assert two.run(fill_inside_of_the_context) == [(True,) * 4] * 2


def test_whole_numbers_and_what_is_not_built_yet_stay_as_they_are():
    module = nn.Module()
    module.table = nn.Parameter(torch.arange(4), requires_grad=False)
    module.later = nn.Parameter(torch.empty(4, device="meta"))
    zero.Init(module=module)
    assert module.table.tolist() == [0, 1, 2, 3]
    assert not splits(module.later)


def divide_what_is_split() -> tuple[bool, bool]:
    torch.manual_seed(0)
    whole = nn.Linear(8, 9)
    torch.manual_seed(0)
    with zero.Init(window_bytes=1):
        model = nn.Sequential(nn.Linear(8, 9))
    zero.tile_linears(model, 2, at_least=1)
    pieces = [row[0] for row in model[0].linears]
    are_split = all(splits(param) for param in model.parameters())
    with zero.GatheredParameters(model):
        return are_split, torch.equal(torch.cat([piece.weight for piece in pieces]), whole.weight)


def test_layers_that_are_split_already_can_be_divided(two):
    assert two.run(divide_what_is_split) == [(True, True)] * 2
