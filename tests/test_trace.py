"""Activations of any module are measured on fake tensors, and equal what a real forward saves."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import Tensor, nn

from naught.describe import describe
from naught.errors import ModelError, UsageError
from naught.formulas import recipe
from naught.job import Job
from naught.machine import GPUS, Machine
from naught.modules import model_of, plan_for
from naught.placement import Tier
from naught.trace import trace_activations
from naught.units import find_units


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor, scale: Tensor) -> tuple[Tensor, None]:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + scale * self.out(mixed.transpose(1, 2).flatten(2)), None


class Gpt(nn.Module):
    """Blocks that return tuples and share a tensor, with buffers, tied weights and a loss."""

    def __init__(self, layers: int, width: int = 32, vocab: int = 64, *, tied: bool = False) -> None:
        super().__init__()
        self.tok = nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList(Attention(width) for _ in range(layers))
        self.head = nn.Linear(width, vocab, bias=False)
        self.register_buffer("scale", torch.full((1,), 0.5))
        if tied:
            self.head.weight = self.tok.weight

    def forward(self, ids: Tensor, *, labels: Tensor) -> dict[str, Tensor]:
        x = self.tok(ids)
        for block in self.blocks:
            x, _ = block(x, scale=self.scale)
        logits = self.head(x)
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


class Conv(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3)
        self.body = nn.Sequential(*(nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()) for _ in range(5)))
        self.head = nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(self.stem(x)).mean((2, 3))).sum()


def saved_bytes(module: nn.Module, *args, **kwargs) -> int:
    """What a real forward saves for its backward, each storage once, weights and buffers left out."""
    own = {tensor.untyped_storage().data_ptr() for tensor in [*module.parameters(), *module.buffers()]}
    found: dict[int, int] = {}
    alive = []

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        alive.append(tensor)
        if storage.data_ptr() not in own:
            found[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        kept = module(*args, **kwargs)
    del kept
    return sum(found.values())


@pytest.mark.parametrize("layers", [1, 2, 3, 7])
@pytest.mark.parametrize("tied", [False, True])
def test_traced_activations_equal_what_a_real_forward_saves(layers, tied):
    module = Gpt(layers, tied=tied)
    ids, labels = torch.randint(64, (2, 16)), torch.randint(64, (2, 16))
    traced = trace_activations(module, (ids,), {"labels": labels})
    assert traced.full == saved_bytes(module, ids, labels=labels)


def test_the_gradient_of_the_logits_is_counted_beside_what_is_saved():
    ids = torch.zeros(2, 16, dtype=torch.long)
    logits = 2 * 16 * 64
    # That of the loss's own output and that of its input.
    assert trace_activations(Gpt(3), (ids,), {"labels": ids}).gradient == 2 * 4 * logits
    narrow = trace_activations(Gpt(3), (ids,), {"labels": ids}, floats=torch.bfloat16).gradient
    assert narrow in (2 * 2 * logits, 2 * 4 * logits), "a loss in 16 bits, or one in 32"


def test_a_convolutional_model_is_traced_too():
    module = Conv()
    images = torch.randn(2, 3, 12, 12)
    assert trace_activations(module, (images,), {}).full == saved_bytes(module, images)


def test_checkpoints_are_the_blocks_inputs_and_what_they_share_counts_once():
    module = Gpt(6)
    ids = torch.zeros(2, 16, dtype=torch.long)
    traced = trace_activations(module, (ids,), {"labels": ids})
    hidden, shared = 2 * 16 * 32 * 4, 4
    assert traced.checkpoints == 6 * hidden + shared
    block = trace_activations(Gpt(7), (ids,), {"labels": ids}).full - traced.full
    assert traced.working == traced.full - 5 * block, "everything outside the blocks, and one of them"


def test_tracing_leaves_the_module_as_it_was_and_takes_no_memory():
    with torch.device("meta"):
        module = Gpt(200, width=4096, vocab=50_000)
    ids = torch.zeros(1, 2048, dtype=torch.long, device="meta")
    traced = trace_activations(module, (ids,), {"labels": ids})
    assert traced.full > 10**10
    assert not any("forward" in inner.__dict__ for inner in module.modules())
    assert all(param.is_meta for param in module.parameters())


def test_a_forward_of_the_users_own_survives():
    module = Gpt(3)
    mine = module.blocks[2].forward
    module.blocks[2].forward = mine
    ids = torch.zeros(1, 8, dtype=torch.long)
    trace_activations(module, (ids,), {"labels": ids})
    assert module.blocks[2].forward is mine


def test_sixteen_bit_training_is_traced_in_sixteen_bits():
    module = Gpt(4)
    ids = torch.zeros(2, 16, dtype=torch.long)
    wide = trace_activations(module, (ids,), {"labels": ids})
    narrow = trace_activations(module, (ids,), {"labels": ids}, floats=torch.bfloat16)
    assert narrow.checkpoints * 2 == wide.checkpoints - 4 + 2 * 2
    assert narrow.full < wide.full


def test_a_module_that_looks_at_values_is_refused_and_left_as_it_was():
    class Picky(Gpt):
        def forward(self, ids: Tensor, *, labels: Tensor) -> dict[str, Tensor]:
            if ids.sum().item() > 3:
                return {}
            return super().forward(ids, labels=labels)

    module = Picky(3)
    ids = torch.zeros(1, 8, dtype=torch.long)
    with pytest.raises(ModelError, match="cannot be traced: DataDependentOutputException"):
        trace_activations(module, (ids,), {"labels": ids})
    assert not any("forward" in inner.__dict__ for inner in module.modules())


def test_wrong_inputs_are_named():
    with pytest.raises(ModelError, match=r"TypeError.*labels"):
        trace_activations(Gpt(2), (torch.zeros(1, 8, dtype=torch.long),), {})


def test_the_description_of_a_module_finds_its_units_and_ties():
    module = Gpt(3, tied=True)
    module.blocks[0].out.requires_grad_(False)
    units = {unit.name: unit for unit in find_units(describe(module))}
    assert set(units) == {"", "blocks.0", "blocks.1", "blocks.2"}
    assert [param.name for param in units[""].params] == ["tok.weight"]
    frozen = [param.name for param in units["blocks.0"].params if not param.trainable]
    assert frozen == ["blocks.0.out.weight", "blocks.0.out.bias"]


def test_advice_for_a_module_counts_its_parameters():
    with torch.device("meta"):
        module = Gpt(12, width=1024, vocab=30_000)
    ids = torch.zeros(4, 512, dtype=torch.long)
    model = model_of(module)
    assert model.numel == sum(param.numel() for param in module.parameters())
    machine = Machine(ranks=4, ranks_per_node=4, gpu=GPUS["v100"], host_bytes=10**11)
    advice = plan_for(module, (ids,), {"labels": ids}, machine=machine)
    assert advice.best is not None
    stage0 = advice.forecasts[0]
    tokens, width = 4 * 512, 1024
    linears = 12 * (4 * width * width) + 30_000 * width  # the embedding looks up and multiplies nothing
    attention = 12 * 2 * 2 * tokens * 512 * width
    assert stage0.times.compute == pytest.approx(4 * (2 * tokens * linears + attention) / machine.gpu.flops)
    fp32 = plan_for(module, (ids,), {"labels": ids}, machine=machine, job=Job(4, 512, recipe=recipe("fp32")))
    assert fp32.forecasts[0].total(Tier.DEVICE) > stage0.total(Tier.DEVICE)


@pytest.mark.parametrize("order", ["reversed", "skipping", "looped"])
def test_blocks_may_run_in_any_order_and_any_number_of_times(order):
    class Net(Gpt):
        def forward(self, ids: Tensor, *, labels: Tensor) -> dict[str, Tensor]:
            x = self.tok(ids)
            blocks = {"reversed": self.blocks[::-1], "skipping": self.blocks[2:], "looped": [*self.blocks] * 3}[order]
            for block in blocks:
                x, _ = block(x, scale=self.scale)
            return {"loss": F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())}

    module = Net(6)
    ids = torch.randint(64, (2, 16))
    assert trace_activations(module, (ids,), {"labels": ids}).full == saved_bytes(module, ids, labels=ids)


def test_like_blocks_with_other_inputs_are_run_for_themselves():
    class Halving(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(8, 8, 3, padding=1)

        def forward(self, x: Tensor) -> Tensor:
            return F.max_pool2d(self.conv(x).relu(), 2)

    module = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), *(Halving() for _ in range(4)), nn.Flatten(), nn.Linear(8 * 4, 10))
    images = torch.randn(2, 3, 32, 32)
    assert trace_activations(module, (images,), {}).full == saved_bytes(module, images)


def test_arithmetic_is_counted_by_operators_and_not_by_tokens():
    mlp = nn.Sequential(nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
    traced = trace_activations(mlp, (torch.randn(64, 784),), {})
    assert traced.forward_flops == 2 * 64 * (784 * 512 + 512 * 512 + 512 * 10)
    ids = torch.zeros(2, 16, dtype=torch.long)
    two, nine = (trace_activations(Gpt(layers), (ids,), {"labels": ids}).forward_flops for layers in (2, 9))
    head = 2 * 32 * 32 * 64
    assert (nine - head) * 2 == (two - head) * 9


def test_a_bare_tensor_and_a_compiled_module_are_taken():
    module = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    machine = Machine()  # this one's disk fills meanwhile
    plain = plan_for(module, (torch.randn(2, 8),), machine=machine)
    assert plan_for(module, torch.randn(2, 8), machine=machine).forecasts[0] == plain.forecasts[0]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of its own imports
        compiled = torch.compile(module)
    assert plan_for(compiled, (torch.randn(2, 8),), machine=machine).forecasts[0] == plain.forecasts[0]


def test_what_is_no_module_or_has_no_shape_is_refused(capfd):
    with pytest.raises(UsageError, match="not for a str"):
        plan_for("gpt2", (torch.randn(2),))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that lazy modules are new
        lazy = nn.LazyLinear(10)
    with pytest.raises(ModelError, match='"weight" has no shape yet'):
        plan_for(lazy, (torch.randn(2, 8),))
    with pytest.raises(ModelError, match="cannot be traced"):
        plan_for(nn.Linear(4, 4), (torch.randn(2, 8),))
    assert capfd.readouterr().err == "", "torch's own report of the failure is not printed too"


def test_a_module_without_parameters_or_inputs_is_refused():
    with pytest.raises(ModelError, match="no parameters"):
        model_of(nn.ReLU())
    with pytest.raises(ModelError, match="no tensor"):
        plan_for(nn.Linear(2, 2), (), {})


def test_dataclass_outputs_pass_through_cut_blocks():
    @dataclass
    class Out:
        hidden: Tensor

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Out:
            return Out(self.fc(x).relu())

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Block() for _ in range(5))

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x).hidden
            return x.sum()

    x = torch.randn(3, 8)
    assert trace_activations(Net(), (x,), {}).full == saved_bytes(Net(), x)
