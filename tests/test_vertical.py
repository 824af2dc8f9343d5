"""All micro-batches through one part before the next: the same training, with its weights gathered once for all of them."""

from __future__ import annotations

import pytest
import torch
from test_offload import HOST, ON_GPU
from torch import nn
from torch.nn import functional
from training import DEVICE, config_of, digest_in_32_bits, engine_of, my_rank

from naught.errors import UsageError
from naught.zero import Vertical

SPREAD = {"stage3_param_persistence_threshold": 0, "stage3_prefetch_bucket_size": 0}
VOCAB, EACH = 37, 2


class Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 64), nn.Linear(64, 16)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.down(functional.gelu(self.up(self.norm(x)))))


class Loss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(16, VOCAB)

    def forward(self, x: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(self.head(x).flatten(0, 1), wanted.flatten())


class Reader(nn.Module):
    """A sequence of parts; for several micro-batches at once, or for one."""

    def __init__(self, micro_batches: int, dropout: float = 0.0) -> None:
        super().__init__()
        parts = [nn.Embedding(VOCAB, 16), *(Block(dropout) for _ in range(3)), Loss()]
        self.parts = nn.ModuleList(Vertical(part, micro_batches) if micro_batches else part for part in parts)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.parts[0](ids)
        for block in self.parts[1:-1]:
            x = block(x)
        return self.parts[-1](x, ids).mean()


def batch_of(step: int, micro: int) -> torch.Tensor:
    dice = torch.Generator().manual_seed(100 * step + 10 * micro + my_rank())
    return torch.randint(0, VOCAB, (EACH, 6), generator=dice).to(DEVICE)


def train(stage: int, micro_batches: int, vertical: bool, more: dict) -> tuple[list[float], str, int]:
    torch.manual_seed(0)
    model = Reader(micro_batches if vertical else 0)
    engine = engine_of(model, config_of(stage, accumulation=1 if vertical else micro_batches, clip=0.5, **SPREAD, **more))
    losses = []
    for step in range(3):
        batches = [batch_of(step, micro) for micro in range(micro_batches)]
        found = []
        for batch in [torch.cat(batches)] if vertical else batches:
            loss = engine(batch)
            engine.backward(loss)
            engine.step()
            found.append(loss.item())
        losses.append(torch.tensor(found, device=DEVICE).mean().item())
    sent = engine.report()["sent"]
    return losses, digest_in_32_bits(engine), sum(nbytes for name, nbytes in sent.items() if name.startswith("all-gather"))


@pytest.mark.parametrize("micro_batches", [1, 2, 4])
@pytest.mark.parametrize("place", ["stage 3", "host", "disk"])
def test_it_is_accumulation_that_is_summed_on_each_rank(two, tmp_path, micro_batches, place):
    disk = {"device": "nvme", "nvme_path": str(tmp_path)}
    zero = {
        "stage 3": {},
        "host": {"offload_optimizer": HOST, "offload_param": HOST},
        "disk": {"offload_optimizer": disk, "offload_param": disk | {"max_in_cpu": 0}},
    }[place]
    near = {"offload_optimizer": HOST} if ON_GPU and zero else {}
    whole = two.reference(train, 1, micro_batches, False, near)  # stage 1 sums on each rank
    found = two.run(train, 3, micro_batches, True, zero)
    assert [(losses, digest) for losses, digest, _ in found] == [(losses, digest) for losses, digest, _ in whole]


def test_weights_are_gathered_once_for_all_micro_batches(two):
    sent = {micro: {sent for _, _, sent in two.run(train, 3, micro, True, {})} for micro in (1, 4)}
    assert sent[1] == sent[4]
    (before,) = {sent for _, _, sent in two.run(train, 3, 4, False, {})}
    assert before > 3 * max(sent[4])


def forget(dropout: float) -> tuple[float, float]:
    """A part that draws numbers draws the same when it is computed again: its gradient is that of its loss."""
    torch.manual_seed(0)
    model = Reader(2, dropout).double()
    ids = torch.cat([batch_of(0, 0), batch_of(0, 1)]).cpu()
    weight = model.parts[2].part.up.weight

    def loss() -> torch.Tensor:
        torch.manual_seed(1)
        return model(ids)

    loss().backward()
    step = torch.zeros_like(weight)
    step[3, 4] = 1e-6
    losses = []
    for change in (step, -2 * step):
        with torch.no_grad():
            weight += change
        losses.append(loss().item())
    return (losses[0] - losses[1]) / 2e-6, weight.grad[3, 4].item()


def test_dropout_is_drawn_again_as_it_was():
    numeric, exact = forget(0.5)
    assert numeric == pytest.approx(exact, rel=1e-4)
    assert exact != 0


def test_mistakes_are_told():
    with pytest.raises(UsageError, match="micro_batches is 0"):
        Vertical(nn.Linear(2, 2), 0)
    with pytest.raises(UsageError, match=r"inputs of \[3, 2\] are not 2 micro-batches of one size"):
        Vertical(nn.Linear(2, 2), 2)(torch.ones(3, 2))
    with pytest.raises(UsageError, match=r"inputs of \[4, 2\], \[2, 2\] are not 2 micro-batches"):  # a table would be divided
        Vertical(nn.Bilinear(2, 2, 2), 2)(torch.ones(4, 2), torch.ones(2, 2))
    with pytest.raises(UsageError, match="inputs of no tensor"):
        Vertical(nn.Linear(2, 2), 2)()
    with pytest.raises(UsageError, match="the part has a Vertical in it"):
        Vertical(nn.Sequential(Vertical(nn.Linear(2, 2), 2)), 2)
    with pytest.raises(UsageError, match="the part is a function"):
        Vertical(lambda x: x, 2)
    with pytest.raises(UsageError, match="a part gave a dict"):
        Vertical(Giving(), 2)(torch.ones(2, 2))


def test_names_are_divided_too_and_an_evaluation_is_not():
    part = nn.Linear(2, 2)
    seen = []
    whole = Vertical(part, 2)
    torch.testing.assert_close(whole(torch.eye(2)), part(torch.eye(2)))
    assert torch.equal(whole(input=torch.ones(4, 2)), whole(torch.ones(4, 2)))
    part.register_forward_pre_hook(lambda _, args: seen.append(len(args[0])))
    with torch.no_grad():
        assert whole(torch.ones(3, 2)).shape == (3, 2)
    assert seen == [3]


class Giving(nn.Module):
    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"x": x}
