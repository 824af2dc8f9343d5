"""Step: the arithmetic that a forward and backward of a small GPT sustain here, counted as the planner counts it.

That is six for each parameter and token, without attention's scores. Updates and collectives have figures of their own.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import Tensor, nn

from naught.measuring.rounds import median_round_s, usual_dtype

__all__ = ["StepRate", "step_rate"]

_HEAD_WIDTH = 64


class _Size(NamedTuple):
    width: int
    layers: int
    batch: int
    length: int
    square: int


_SMALL, _LARGE = _Size(512, 2, 2, 256, 1024), _Size(4096, 2, 2, 2048, 8192)


class StepRate(NamedTuple):
    """Operations a second: of a step, and of one product of square matrices, which no step reaches."""

    step_flops: float
    product_flops: float
    dtype: str
    numel: int
    tokens: int


def step_rate(device: torch.device, *, budget_s: float = 1.5) -> StepRate:
    size, dtype = (_SMALL if device.type == "cpu" else _LARGE), usual_dtype(device)
    blocks = nn.Sequential(*(_Block(size.width) for _ in range(size.layers))).to(device, dtype)
    numel = sum(param.numel() for param in blocks.parameters())
    x = torch.randn(size.batch, size.length, size.width, device=device, dtype=dtype)

    def step() -> None:
        blocks(x).float().square().mean().backward()
        blocks.zero_grad()

    square = torch.randn(size.square, size.square, device=device, dtype=dtype)
    step_s = median_round_s(step, device, budget_s=budget_s)
    product_s = median_round_s(lambda: square @ square, device, budget_s=budget_s / 3)
    tokens = size.batch * size.length
    name = str(dtype).removeprefix("torch.")
    return StepRate(6 * numel * tokens / step_s, 2 * size.square**3 / product_s, name, numel, tokens)


class _Block(nn.Module):
    """A transformer's, as plain as they come."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        heads: Tensor = self.qkv(self.before(x)).view(batch, length, 3, width // _HEAD_WIDTH, _HEAD_WIDTH)
        query, key, value = heads.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(x.shape))
        change: Tensor = self.down(F.gelu(self.up(self.between(x))))
        return x + change
