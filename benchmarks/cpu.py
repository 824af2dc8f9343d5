"""Step time of every stage on 2 CPU processes beside torch's own data parallelism, all in one run.

Systems take turns, several rounds, and each round is reported as a ratio to DDP in that round: a timing by itself says
more about the machine than about the code.

    .venv/bin/python benchmarks/cpu.py [--size 5M|30M|124M] [--rounds 5] [--steps 6]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

SIZES = {"5M": (4, 256, 4, 8192), "30M": (8, 512, 8, 8192), "124M": (12, 768, 12, 50304)}
SYSTEMS = ("ddp", "zero1-torch", "fsdp2", "ours-0", "ours-1", "ours-2", "ours-3")
BATCH, LENGTH = 2, 128


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="5M")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--systems", nargs="+", default=list(SYSTEMS), choices=SYSTEMS)
    parser.add_argument("--rank", type=int)
    parser.add_argument("--store")
    options = parser.parse_args()
    if options.rank is not None:
        work(options)
        return
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
        arguments = ["--size", options.size, "--rounds", str(options.rounds), "--steps", str(options.steps)]
        arguments += ["--systems", *options.systems, "--store", str(Path(folder, "store"))]
        ranks = [
            subprocess.Popen([sys.executable, __file__, "--rank", str(rank), *arguments], env=environment) for rank in range(2)
        ]
        sys.exit(max(rank.wait() for rank in ranks))


def work(options: argparse.Namespace) -> None:
    import warnings

    import torch
    import torch.distributed as dist

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(options.store, 2), rank=options.rank, world_size=2)
    takers = {name: prepare(name, options.size) for name in options.systems}
    times: dict[str, list[float]] = {name: [] for name in takers}
    losses: dict[str, list[float]] = {name: [] for name in takers}
    for turn in range(options.rounds + 1):
        for name, take in takers.items():
            dist.barrier()
            start = time.perf_counter()
            losses[name] += [take(turn * options.steps + step) for step in range(options.steps)]
            dist.barrier()
            if turn:  # the first round warms up
                times[name].append((time.perf_counter() - start) / options.steps)
    if options.rank == 0:
        report(options.size, times, losses)
    dist.destroy_process_group()


def report(size: str, times: dict[str, list[float]], losses: dict[str, list[float]]) -> None:
    base = next(iter(times))
    print(f"{size} parameters, 2 gloo ranks, {BATCH} x {LENGTH} tokens, fp32, AdamW; against {base} in the same round")
    for name, found in times.items():
        ratios = [mine / theirs for mine, theirs in zip(found, times[base], strict=True)]
        row = {
            "system": name,
            "ratio": round(statistics.median(ratios), 3),
            "range": [round(min(ratios), 3), round(max(ratios), 3)],
            "ms": round(1000 * statistics.median(found), 1),
            "losses equal": losses[name] == losses[base],
        }
        print(json.dumps(row))


def prepare(name: str, size: str) -> Callable[[int], float]:
    """A function that takes one step with a system and returns its loss."""
    import torch
    import torch.distributed as dist
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(0)
    model = make_model(*SIZES[size])
    vocab = SIZES[size][3]
    hyper = {"lr": 1e-4, "betas": (0.9, 0.95), "weight_decay": 0.1}

    def batch(step: int) -> torch.Tensor:
        seed = 2 * step + dist.get_rank()
        return torch.randint(vocab, (BATCH, LENGTH), generator=torch.Generator().manual_seed(seed))

    if name.startswith("ours"):
        import naught

        config = {
            "train_micro_batch_size_per_gpu": BATCH,
            "gradient_clipping": 0,
            "optimizer": {"type": "AdamW", "params": {**hyper, "betas": list(hyper["betas"])}},
            "zero_optimization": {"stage": int(name[-1])},
        }
        engine, *_ = naught.initialize(model=model, config=config)

        def ours(step: int) -> float:
            loss = engine(batch(step))
            engine.backward(loss)
            engine.step()
            return float(loss)

        return ours
    if name == "fsdp2":
        from torch.distributed.fsdp import fully_shard

        mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        trained = fully_shard(model, mesh=mesh)
        optimizer = torch.optim.AdamW(trained.parameters(), **hyper, fused=True)
    else:
        trained = DistributedDataParallel(model, gradient_as_bucket_view=True)
        if name == "zero1-torch":
            optimizer = ZeroRedundancyOptimizer(trained.parameters(), torch.optim.AdamW, **hyper, fused=True)
        else:
            optimizer = torch.optim.AdamW(trained.parameters(), **hyper, fused=True)

    def theirs(step: int) -> float:
        loss = trained(batch(step))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return float(loss)

    return theirs


def make_model(layers: int, width: int, heads: int, vocab: int):
    import torch
    import torch.nn.functional as F  # noqa: N812
    from torch import nn

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.ln1, self.ln2 = nn.LayerNorm(width), nn.LayerNorm(width)
            self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
            self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k, v = self.qkv(self.ln1(x)).unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4)
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
            x = x + self.out(mixed)
            return x + self.down(F.gelu(self.up(self.ln2(x)), approximate="tanh"))

    class Gpt(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tok, self.pos = nn.Embedding(vocab, width), nn.Embedding(LENGTH, width)
            self.blocks = nn.ModuleList(Block() for _ in range(layers))
            self.ln, self.head = nn.LayerNorm(width), nn.Linear(width, vocab, bias=False)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            x = self.tok(ids) + self.pos(torch.arange(ids.shape[1], device=ids.device))
            for block in self.blocks:
                x = block(x)
            return F.cross_entropy(self.head(self.ln(x)).flatten(0, 1), ids.roll(-1, 1).flatten())

    return Gpt()


if __name__ == "__main__":
    main()
