"""A DeepSpeed script with one changed line: a small GPT in fp16 with gradient accumulation, two parameter groups and a
scheduler of torch's, on this file's own text.

    torchrun --nproc_per_node 2 examples/deepspeed_scripts/gpt_fp16.py --stage 3 --steps 30
"""

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import nn

import naught as deepspeed

LENGTH, WIDTH, HEADS, LAYERS, VOCAB = 64, 64, 4, 3, 256


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        batch, length, _ = x.shape
        heads = self.qkv(self.norm1(x)).view(batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, WIDTH))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCAB, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens):
        x = self.tokens(tokens[:, :-1]) + self.places.weight[: tokens.shape[1] - 1]
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), tokens[:, 1:].flatten())


def groups_of(model):
    """Weights decay; norms and biases do not."""
    decay = [param for param in model.parameters() if param.ndim > 1]
    keep = [param for param in model.parameters() if param.ndim <= 1]
    return [{"params": decay, "weight_decay": 0.1}, {"params": keep, "weight_decay": 0.0}]


def config_of(args):
    return {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": args.accumulation,
        "fp16": {"enabled": True, "initial_scale_power": 12, "loss_scale_window": 10, "hysteresis": 1},
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": args.stage, "overlap_comm": True, "stage3_param_persistence_threshold": 0},
    }


def main():
    parser = argparse.ArgumentParser(description="A small GPT in fp16, as a DeepSpeed script")
    parser.add_argument("--stage", type=int, default=3)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--accumulation", type=int, default=2)
    args = parser.parse_args()

    deepspeed.init_distributed(dist_backend=None)
    rank, world = deepspeed.comm.get_rank(), deepspeed.comm.get_world_size()
    torch.manual_seed(0)
    with deepspeed.zero.Init(config_dict_or_path=config_of(args), enabled=args.stage == 3):
        model = GPT()
    optimizer = deepspeed.ops.adam.FusedAdam(groups_of(model), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.steps)
    engine, _, _, scheduler = deepspeed.initialize(
        model=model, optimizer=optimizer, lr_scheduler=scheduler, config=config_of(args)
    )
    text = torch.tensor(list(Path(__file__).read_bytes()))
    micro_batches = args.steps * engine.gradient_accumulation_steps()
    for micro in range(micro_batches):
        dice = torch.Generator().manual_seed(micro * world + rank)
        starts = torch.randint(len(text) - LENGTH, (engine.train_micro_batch_size_per_gpu(),), generator=dice)
        loss = engine(torch.stack([text[start : start + LENGTH] for start in starts]).to(engine.device))
        engine.backward(loss)
        boundary = engine.is_gradient_accumulation_boundary()
        engine.step()
        if boundary and rank == 0 and engine.global_steps % 5 == 0 and engine.was_step_applied():
            print(
                f"step {engine.global_steps}: loss {loss.item():.4f}, scale {engine.optimizer.loss_scale:g}, "
                f"norm {engine.get_global_grad_norm():.3f}, lr {scheduler.get_last_lr()[0]:.2e}, skipped {engine.skipped_steps}"
            )
    embedding = deepspeed.utils.safe_get_full_fp32_param(model.tokens.weight)
    with deepspeed.zero.GatheredParameters(model.tokens.weight):
        assert torch.equal(model.tokens.weight.float(), embedding.half().float())
    if rank == 0:
        print(f"samples {engine.global_samples}, norm of the embedding {embedding.norm().item():.6f}")


if __name__ == "__main__":
    main()
