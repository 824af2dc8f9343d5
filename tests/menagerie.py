"""The menagerie: small models, one for each way in which a model can be awkward. All train to a scalar loss."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from naught import comm

# make test-gpu runs the same tests on a GPU.
DEVICE = torch.device(os.environ.get("NAUGHT_DEVICE", "cpu"))
WIDTH, VOCAB, BATCH, LENGTH = 64, 64, 2, 16
MODELS: dict[str, Callable[[], nn.Module]] = {}


def model(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    MODELS[make.__name__.rstrip("_")] = make
    return make


def batch_of(step: int, rank: int) -> Tensor:
    return torch.randint(VOCAB, (BATCH, LENGTH), generator=torch.Generator().manual_seed(1000 * step + rank)).to(DEVICE)


def my_rank() -> int:
    return comm.get_rank() if comm.is_initialized() else 0


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 128), nn.Linear(128, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Plain(nn.Module):
    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.tok = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(layers))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def body(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def loss(self, x: Tensor, ids: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), ids.roll(1, 1).flatten())

    def forward(self, ids: Tensor) -> Tensor:
        return self.loss(self.body(self.tok(ids)), ids)


@model
def plain() -> nn.Module:
    return Plain()


@model
def tied() -> nn.Module:
    net = Plain()
    net.head.weight = net.tok.weight
    return net


@model
def frozen() -> nn.Module:
    net = Plain()
    net.tok.requires_grad_(False)
    net.blocks[1].requires_grad_(False)
    net.blocks[0].up.requires_grad_(False)
    return net


class Lora(nn.Module):
    def __init__(self, inner: nn.Linear) -> None:
        super().__init__()
        self.inner = inner.requires_grad_(False)
        self.a, self.b = nn.Linear(inner.in_features, 4, bias=False), nn.Linear(4, inner.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + self.b(self.a(x))


@model
def lora() -> nn.Module:
    net = Plain().requires_grad_(False)
    for block in net.blocks:
        block.up = Lora(block.up)
    return net


class Checkpointed(Plain):
    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant

    def body(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return x


@model
def checkpoint_reentrant() -> nn.Module:
    return Checkpointed(reentrant=True)


@model
def checkpoint_non_reentrant() -> nn.Module:
    return Checkpointed(reentrant=False)


class Twice(Plain):
    def body(self, x: Tensor) -> Tensor:
        for block in [*self.blocks, self.blocks[0]]:
            x = block(x)
        return x


@model
def block_used_twice() -> nn.Module:
    return Twice()


class Unused(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Linear(WIDTH, WIDTH)
        self.blocks[1].spare = nn.Parameter(torch.ones(7))


@model
def unused_parameters() -> nn.Module:
    return Unused()


class Skipping(Plain):
    """Rank 0 leaves out a block, always the same one."""

    def body(self, x: Tensor) -> Tensor:
        for at, block in enumerate(self.blocks):
            if at != 1 or self.rank != 0:
                x = block(x)
        return x

    rank = 0

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids)


@model
def block_skipped_on_one_rank() -> nn.Module:
    net = Skipping()
    net.rank = my_rank()
    return net


class Experts(Plain):
    """Which experts run depends on the rank and changes from batch to batch."""

    def __init__(self) -> None:
        super().__init__(layers=4)
        self.rank = my_rank()

    def body(self, x: Tensor) -> Tensor:
        chosen = int(x.detach().abs().sum().mul(1e4).long() % 4)
        x = self.blocks[(chosen + self.rank) % 4](x)
        return self.blocks[(chosen + 2 * self.rank + 1) % 4](x)


@model
def experts_by_rank_and_batch() -> nn.Module:
    return Experts()


class DictOutput(Block):
    def forward(self, x: Tensor) -> dict[str, object]:
        return {"hidden": super().forward(x), "nothing": None, "more": [x.sum()]}


class DictNet(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(DictOutput() for _ in range(3))

    def body(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)["hidden"]
        return x


@model
def dict_outputs() -> nn.Module:
    return DictNet()


@dataclass
class Out:
    hidden: Tensor
    aux: tuple[Tensor, None]


class DataclassOutput(Block):
    def forward(self, x: Tensor, *, scale: Tensor) -> Out:
        y = super().forward(x) * scale
        return Out(y, (y.mean(), None))


class DataclassNet(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(DataclassOutput() for _ in range(3))
        self.scale = nn.Parameter(torch.tensor(1.0))  # a scalar parameter of the root

    def body(self, x: Tensor) -> Tensor:
        total = x.new_zeros(())
        for block in self.blocks:
            out = block(x, scale=self.scale)
            x, total = out.hidden, total + out.aux[0]
        return x + total * 1e-3


@model
def dataclass_outputs_and_keyword_inputs() -> nn.Module:
    return DataclassNet()


class Skip(Plain):
    """An early activation is used again much later."""

    def body(self, x: Tensor) -> Tensor:
        first = self.blocks[0](x)
        return self.blocks[2](self.blocks[1](first) + first) + first


@model
def skip_connections() -> nn.Module:
    return Skip()


class Uneven(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList()
        for at in range(3):
            block = Block()
            block.gain = nn.Parameter(torch.full((1,), 1.0 + at))
            block.empty = nn.Parameter(torch.zeros(0))
            block.odd = nn.Parameter(torch.zeros(5 + at))
            block.register_forward_hook(lambda inner, _, out: out * inner.gain + inner.odd.sum())
            self.blocks.append(block)


@model
def uneven_sizes_and_users_hooks() -> nn.Module:
    return Uneven()


class Buffers(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.bn = nn.BatchNorm1d(WIDTH)

    def body(self, x: Tensor) -> Tensor:
        return super().body(self.bn(x.transpose(1, 2)).transpose(1, 2))


@model
def buffers() -> nn.Module:
    return Buffers()


class Conv(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv1d(1, 16, 3, padding=1)
        self.body = nn.Sequential(*(nn.Sequential(nn.Conv1d(16, 16, 3, padding=1), nn.ReLU()) for _ in range(3)))
        self.head = nn.Linear(16, 1, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.body(self.stem(ids.float().unsqueeze(1) / VOCAB))
        return self.head(x.mean(-1)).square().mean()


@model
def convolution() -> nn.Module:
    return Conv()


class Noisy(nn.Module):
    """Draws random numbers in its forward: not one of those that every stage computes alike on other numbers of ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.drop = MODELS["buffers"](), nn.Dropout(0.2)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.drop(self.inner(tokens).expand(8)).mean()
