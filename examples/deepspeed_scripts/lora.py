"""Fine-tuning with LoRA under any ZeRO stage: frozen weights are split and gathered, and have no optimizer state.

    torchrun --nproc_per_node 2 examples/deepspeed_scripts/lora.py --stage 3 --steps 20

First a small language model learns to count upwards by threes; then its weights are frozen, thin matrices are put beside
its layers, and those alone learn to count downwards. A LoRA of one's own is thirty lines; PEFT's works the same way.
"""

import argparse
import math

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import nn

import naught as deepspeed

VOCAB, WIDTH, LAYERS, LENGTH = 31, 96, 3, 12


class Lora(nn.Module):
    """A frozen layer and a product of two thin matrices beside it, which starts at zero."""

    def __init__(self, inner, rank, alpha):
        super().__init__()
        self.inner, self.scale = inner, alpha / rank
        self.a = nn.Parameter(torch.empty(rank, inner.in_features))
        self.b = nn.Parameter(torch.zeros(inner.out_features, rank))
        nn.init.kaiming_uniform_(self.a, a=math.sqrt(5))

    def forward(self, x):
        return self.inner(x) + F.linear(F.linear(x, self.a), self.b) * self.scale


def add_lora(model, rank=8, alpha=16):
    """Freeze a model and put a Lora around each of its linear layers."""
    model.requires_grad_(False)
    layers = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    for name, layer in layers:
        parent, _, short = name.rpartition(".")
        setattr(model.get_submodule(parent), short, Lora(layer, rank, alpha))
    return model


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Counter(nn.Module):
    """Guesses the next number of a sequence from the last."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens):
        x = self.tokens(tokens[:, :-1])
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1).float(), tokens[:, 1:].flatten())


def sequences(step, rank, stride, device):
    starts = torch.randint(VOCAB, (8, 1), generator=torch.Generator().manual_seed(97 * step + rank))
    return ((starts + stride * torch.arange(LENGTH)) % VOCAB).to(device)


def train(model, stage, steps, stride):
    config = {
        "train_micro_batch_size_per_gpu": 8,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": stage},
    }
    trained = [param for param in model.parameters() if param.requires_grad]
    engine, *_ = deepspeed.initialize(model=model, model_parameters=trained, config=config)
    for step in range(steps):
        loss = engine(sequences(step, engine.global_rank, stride, engine.device))
        engine.backward(loss)
        engine.step()
    return engine, loss.item()


def main():
    parser = argparse.ArgumentParser(description="LoRA under any ZeRO stage")
    parser.add_argument("--stage", type=int, default=3)
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args()
    deepspeed.init_distributed()
    torch.manual_seed(0)
    engine, before = train(Counter(), args.stage, args.steps, stride=3)
    model, rank = engine.module, engine.global_rank
    engine.destroy()  # the model has whole weights of its own again

    add_lora(model.float())
    frozen = {name: param.detach().clone() for name, param in model.named_parameters() if not param.requires_grad}
    count = sum(param.numel() for param in model.parameters() if param.requires_grad)
    engine, after = train(model, args.stage, args.steps, stride=-3)
    live = engine.report()["live"]
    with engine.gathered():
        kept = all(torch.equal(model.get_parameter(name).float(), value.bfloat16().float()) for name, value in frozen.items())
    if rank == 0:
        print(f"counting up: loss {before:.4f}; counting down with LoRA: loss {after:.4f}")
        print(f"frozen weights unchanged: {kept}; trained parameters: {count}")
        print(
            f"weights {live['weights']} bytes, masters {live['masters']} bytes, optimizer states {live['states']} bytes on rank 0"
        )


if __name__ == "__main__":
    main()
