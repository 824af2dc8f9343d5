"""The model that `naught train` builds: of the size that the planner counts, and computing what a transformer computes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from naught.model_names import parse_model
from naught.presets import PRESETS
from naught.trainer.gpt import Gpt, _turned, _turns

SMALL = parse_model("gpt:layers=2,hidden=32,heads=4,vocab=64,positions=16").shape
LLAMA = replace(PRESETS["llama3-8b"], layers=2, hidden=32, heads=4, kv_heads=2, ffn=48, vocab=64)
ODD = [
    SMALL,
    LLAMA,
    replace(LLAMA, qk_norm=True),
    replace(LLAMA, norms=4, tied=True),
    replace(LLAMA, head_dim=16),
    replace(SMALL, norms=1, head_bias=True, tied=False),
    replace(SMALL, embedding_norm=True),
    replace(SMALL, norm_free=True),
]


def made(shape) -> Gpt:
    torch.manual_seed(0)
    return Gpt(shape)


def ids_of(batch: int = 2, seq: int = 16) -> torch.Tensor:
    return torch.randint(64, (batch, seq), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", [name for name, shape in PRESETS.items() if shape.vocab])
def test_every_preset_is_built_with_as_many_parameters_as_the_planner_counts(name):
    shape = replace(PRESETS[name], layers=2)
    with torch.device("meta"):
        built = Gpt(shape)
    assert sum(param.numel() for param in built.parameters()) == sum(run.numel * run.repeat for run in shape.runs)


@pytest.mark.parametrize("shape", ODD, ids=str)
def test_every_trait_of_a_shape_is_built_and_learns(shape):
    model, ids = made(shape), ids_of()
    assert sum(param.numel() for param in model.parameters()) == sum(run.numel * run.repeat for run in shape.runs)
    first = model(ids, labels=ids)
    first.backward()
    assert all(param.grad is not None and bool(param.grad.isfinite().all()) for param in model.parameters())
    with torch.no_grad():
        for param in model.parameters():
            param -= 0.05 * param.grad / (param.grad.norm() + 1e-6)
    assert model(ids, labels=ids) < first


@pytest.mark.parametrize("shape", ODD, ids=str)
def test_no_token_sees_those_behind_it(shape):
    model, ids = made(shape).eval(), ids_of()
    other = ids.clone()
    other[:, 10:] = (other[:, 10:] + 1) % 64
    with torch.no_grad():
        assert torch.equal(model(ids)[:, :10], model(other)[:, :10])
        assert not torch.equal(model(ids)[:, 10:], model(other)[:, 10:])


def test_the_loss_is_that_of_predicting_each_token_from_those_before():
    model, ids = made(SMALL), ids_of()
    logits = model(ids)
    each = [F.cross_entropy(logits[row, at], ids[row, at + 1]) for row in range(2) for at in range(15)]
    assert model(ids, labels=ids).item() == pytest.approx(torch.stack(each).mean().item(), rel=1e-6)


def test_rotary_positions_tell_distances_and_nothing_else():
    torch.manual_seed(0)
    query, key = torch.randn(2, 1, 1, 1, LLAMA.hidden // LLAMA.heads)

    def score(there: int, here: int) -> torch.Tensor:
        turns = _turns(torch.tensor([there, here]), LLAMA, torch.float32)
        return (_turned(query, turns[:, :1]) * _turned(key, turns[:, 1:])).sum()

    assert torch.allclose(score(5, 2), score(15, 12), atol=1e-5), "as far apart"
    assert not torch.allclose(score(5, 2), score(5, 3), atol=1e-3)
    assert not torch.allclose(score(5, 2), score(2, 5), atol=1e-3)


@pytest.mark.parametrize("shape", [SMALL, LLAMA], ids=["gpt", "llama"])
def test_recomputing_blocks_changes_no_bit(shape):
    grads = []
    for checkpointing in (False, True):
        model = made(shape)
        model.checkpointing = checkpointing
        ids = ids_of()
        model(ids, labels=ids).backward()
        grads.append([param.grad for param in model.parameters()])
    assert all(torch.equal(kept, computed) for kept, computed in zip(*grads, strict=True))
