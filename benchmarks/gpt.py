"""The model of the GPU benchmarks: a GPT with learnt positions, an untied head and one checkpoint a block."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

__all__ = ["GPT", "fill", "flops_per_step"]


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.ln1, self.ln2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, seq, width = x.shape
        q, k, v = self.qkv(self.ln1(x)).view(batch, seq, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, seq, width))
        return x + self.down(functional.gelu(self.up(self.ln2(x)), approximate="tanh"))


class GPT(nn.Module):
    def __init__(self, layers: int, width: int, heads: int, seq: int, vocab: int = 50304, *, recomputes: bool = True) -> None:
        super().__init__()
        self.recomputes = recomputes
        self.tok, self.pos = nn.Embedding(vocab, width), nn.Embedding(seq, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.ln = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.tok(ids) + self.pos(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recomputes else block(x)
        logits = self.head(self.ln(x))
        return functional.cross_entropy(logits.float().view(-1, logits.shape[-1]), labels.view(-1))


@torch.no_grad()
def fill(model: nn.Module, seed: int = 0) -> nn.Module:
    """The same first weights for every system: drawn in the order of the parameters, on the device on which they lie."""
    device = next(model.parameters()).device
    generator = torch.Generator(device).manual_seed(seed)
    for name, param in model.named_parameters():
        if param.dim() > 1:
            param.normal_(0, 0.02, generator=generator)
        else:
            param.fill_(0 if name.endswith("bias") else 1)
    return model


def flops_per_step(numel: int, layers: int, width: int, tokens: int, seq: int) -> int:
    """What the model asks for, without recomputation: 6 for each parameter and token, and the attention."""
    return 6 * numel * tokens + 12 * layers * width * seq * tokens // 2
