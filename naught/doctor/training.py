"""Training: a rank of the doctor's self-test. A tiny model, three steps, at every stage and in plain PyTorch.

Run as a module by `naught.doctor.numerics`; each rank prints one line of JSON.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterable

import torch
import torch._dynamo  # Note [early import]
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import Tensor, nn

from naught import comm
from naught.accelerator import get_accelerator
from naught.doctor.numerics import PLAIN, RESUMED, STAGES, Run
from naught.engine import Engine
from naught.fragments import safe_get_full_fp32_param, safe_get_full_optimizer_state
from naught.start import initialize

__all__: list[str] = []

# Note [early import]: torch's optimizers import this when they are made, and it takes the process group that there is then as
# a default of functions, so that destroying it would leave its threads, which may abort a process that ends.

_STEPS, _VOCAB, _WIDTH = 3, 64, 64
_RATE, _DECAY, _BETAS = 1e-2, 0.1, (0.9, 0.95)
_MOMENTS = ("exp_avg", "exp_avg_sq")


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(_VOCAB, _WIDTH), nn.Linear(_WIDTH, _VOCAB, bias=False)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(_WIDTH), nn.Linear(_WIDTH, 2 * _WIDTH), nn.GELU(), nn.Linear(2 * _WIDTH, _WIDTH))
            for _ in range(2)
        )

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        for block in self.blocks:
            x = x + block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), ids.roll(1, 1).flatten())


def _as_rank(folder: str) -> None:
    comm.init_distributed(dist_backend="gloo", verbose=False)
    torch.set_num_threads(1)  # a product rounds by its number of threads
    device = torch.device(get_accelerator().current_device_name())
    torch.use_deterministic_algorithms(device.type != "cpu")
    runs = {PLAIN: _plain(device)}
    for name, stage in STAGES.items():
        engine = _engine(stage, device)
        losses = _steps(engine, 0, _STEPS - 1)
        if stage == max(STAGES.values()):
            engine.save_checkpoint(folder)
        losses += _steps(engine, _STEPS - 1, _STEPS)
        runs[name] = Run(losses, _digest_of(engine))
        engine.destroy()
    engine = _engine(1, device)
    engine.load_checkpoint(folder)
    last = _steps(engine, _STEPS - 1, _STEPS)
    runs[RESUMED] = Run(runs[PLAIN].losses[:-1] + last, _digest_of(engine))
    engine.destroy()
    print(json.dumps(runs))
    comm.shut_down()


def _plain(device: torch.device) -> Run:
    """One process that takes the batches of all ranks, one after the other."""
    model = _model(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=_RATE, weight_decay=_DECAY, betas=_BETAS, fused=True)
    losses, world = [], comm.get_world_size()
    for step in range(_STEPS):
        optimizer.zero_grad()
        for rank in range(world):
            loss = model(_batch(step, rank, device))
            (loss / world).backward()
            losses += [loss.item().hex()] if rank == comm.get_rank() else []
        optimizer.step()
    states = ((param, *(optimizer.state[param][name] for name in _MOMENTS)) for param in model.parameters())
    return Run(losses, _digest(tensor for row in states for tensor in row))


def _engine(stage: int, device: torch.device) -> Engine:
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "AdamW", "params": {"lr": _RATE, "weight_decay": _DECAY, "betas": list(_BETAS)}},
        "zero_optimization": {"stage": stage},
    }
    return initialize(model=_model(device), config=config).engine


def _model(device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    return _Model().to(device)


def _steps(engine: Engine, start: int, stop: int) -> list[str]:
    losses = []
    for step in range(start, stop):
        loss = engine(_batch(step, comm.get_rank(), engine.device))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item().hex())
    return losses


def _batch(step: int, rank: int, device: torch.device) -> Tensor:
    return torch.randint(_VOCAB, (2, 16), generator=torch.Generator().manual_seed(1000 * step + rank)).to(device)


def _digest_of(engine: Engine) -> str:
    found: list[Tensor] = []
    for param in engine.module.parameters():
        states = (safe_get_full_optimizer_state(param, name) for name in _MOMENTS)
        found += [tensor for tensor in (safe_get_full_fp32_param(param), *states) if tensor is not None]
    return _digest(found)


def _digest(tensors: Iterable[Tensor]) -> str:
    sha = hashlib.sha256()
    for tensor in tensors:
        sha.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()


if __name__ == "__main__":
    _as_rank(sys.argv[1])
