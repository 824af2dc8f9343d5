"""What a rank does in a parity test: train one of the menagerie and say what came out, bit for bit."""

from __future__ import annotations

import hashlib
import math
from typing import Any, NamedTuple

import torch
from menagerie import DEVICE, MODELS, batch_of, my_rank
from torch import Tensor, nn

from naught.engine import Engine
from naught.fragments import safe_get_full_fp32_param, safe_get_full_optimizer_state
from naught.segment import Segment
from naught.start import initialize

HYPER = {"lr": 1e-2, "weight_decay": 0.1, "betas": [0.9, 0.95], "eps": 1e-8}


class Outcome(NamedTuple):
    """A run, as far as it must be reproducible."""

    losses: list[float]
    norms: list[float]
    weights: str
    moments: str


def config_of(
    stage: int,
    *,
    accumulation: int = 1,
    clip: float = 0.0,
    optimizer: str = "AdamW",
    params: Any = HYPER,
    more: Any = None,
    gradients: str = "follow",
    **zero: Any,
) -> dict[str, Any]:
    ours = {"gradients": gradients, **(more or {}).get("naught", {})}
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": clip,
        "optimizer": {"type": optimizer, "params": params},
        "zero_optimization": {"stage": stage, **zero},
        **(more or {}),
        "naught": ours,
    }


def engine_of(model: nn.Module, config: dict[str, Any]) -> Engine:
    return initialize(model=model.to(DEVICE), config=config)[0]


def start(stage: int, name: str = "plain", **options: Any) -> Engine:
    torch.manual_seed(0)
    return engine_of(MODELS[name](), config_of(stage, **options))


def take_steps(engine: Engine, steps: int = 1, first: int = 0) -> list[float]:
    losses = []
    for step in range(first, first + steps):
        loss = engine(batch_of(step, my_rank()))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def engine_calls(stage: int) -> tuple[list[float], str]:
    engine = start(stage)
    return take_steps(engine, 3), digest_of_weights(engine)


def train(name: str, stage: int, *, steps: int = 4, accumulation: int = 1, clip: float = 0.0, **options: Any) -> Outcome:
    engine = start(stage, name, accumulation=accumulation, clip=clip, **options)
    losses, norms = [], []
    for step in range(steps):
        for micro in range(accumulation):
            loss = engine(batch_of(step * accumulation + micro, my_rank()))
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        norms.append(engine.get_global_grad_norm())
    outcome = Outcome(losses, norms, digest_of_weights(engine), digest_of_moments(engine))
    engine.destroy()
    return outcome


def digest_of_weights(engine: Engine) -> str:
    with engine.gathered():
        return digest([param for _, param in engine.module.named_parameters()])


def digest_of_moments(engine: Engine) -> str:
    """The moments and weights of all ranks, whole, by the names of the parameters."""
    return _digest_of_states(engine, [segment for unit in engine.schedule.units.values() for segment in unit.segments])


def digest_of_what_is_trained(engine: Engine) -> str:
    """The same in whatever precision a run computes: what is frozen is rounded to it."""
    return _digest_of_states(engine, [segment for unit in engine.schedule.units.values() for segment in unit.trained])


def _digest_of_states(engine: Engine, segments: list[Segment]) -> str:
    """With one exchange for all of them."""
    found = [
        (segment, name, state.element_size(), state.contiguous().view(-1).view(torch.uint8).cpu())
        for segment in segments
        for name, state in sorted((segment.states.moments | {"weights": segment.exact}).items())
    ]
    split = [raw for segment, _, _, raw in found if not segment.everywhere]
    rows = engine.schedule.group.exchange(torch.cat(split)) if split else torch.empty(1, 0)
    parts = iter(rows.split([raw.numel() for raw in split], dim=1))
    cut: dict[tuple[str, str], Tensor] = {}
    for segment, name, size, raw in found:
        whole = raw if segment.everywhere else next(parts).flatten()
        cut |= {(slot.name, name): whole[slot.span.start * size : slot.span.stop * size] for slot in segment.layout.slots}
    return digest([cut[key] for key in sorted(cut)])


def digest_in_32_bits(engine: Engine) -> str:
    """Weights and moments as training goes by them, whatever precision it computes in."""
    found: list[Tensor] = []
    for param in engine.module.parameters():
        states = (safe_get_full_optimizer_state(param, key) for key in ("exp_avg", "exp_avg_sq"))
        found += [tensor for tensor in (safe_get_full_fp32_param(param), *states) if tensor is not None]
    return digest(found)


def digest(tensors: list[Tensor]) -> str:
    sha = hashlib.sha256()
    for tensor in tensors:
        # A copy: numpy() would pin the storage, and a pinned flat cannot be freed.
        sha.update(
            tensor.detach().cpu().clone().contiguous().view(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
        )
    return sha.hexdigest()


def train_plainly(name: str, world: int, norms: list[float], *, steps: int = 4, clip: float = 0.0) -> tuple[list[float], str]:
    """One process, plain PyTorch, the batches of all ranks one after the other.

    A norm is a sum of thousands of squares, and its last bit depends on their order; clipping takes the engine's, once
    it is known to be right.
    """
    torch.manual_seed(0)
    model = MODELS[name]().to(DEVICE)
    trained = [param for param in model.parameters() if param.requires_grad]
    optimizer = torch.optim.AdamW(trained, **{**HYPER, "betas": tuple(HYPER["betas"])}, fused=True)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        for rank in range(world):
            loss = model(batch_of(step, rank))
            (loss / world).backward()
            losses += [loss.item()] if rank == 0 else []
        if clip:
            _clip(trained, clip, norms[step])
        optimizer.step()
    return losses, digest(list(model.parameters()))


def _clip(params: list[nn.Parameter], most: float, norm: float) -> None:
    squares = math.fsum(float(param.grad.double().square().sum()) for param in params if param.grad is not None)
    assert math.isclose(norm, math.sqrt(squares), rel_tol=1e-12)
    coefficient = min(1.0, most / (norm + 1e-6))
    for param in params:
        if param.grad is not None and coefficient != 1.0:
            param.grad.mul_(coefficient)
