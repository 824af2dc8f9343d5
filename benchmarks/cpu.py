"""Step time of every stage on 2 CPU processes beside its peers, all in one run.

Each system has two processes of its own, which wait while it is not their turn. Systems take turns, several rounds, and
each round is reported as a ratio to the first of them (DDP) in that round: a timing by itself says more about the machine
than about the code.

    .venv/bin/python benchmarks/cpu.py [--size 5M|30M|124M] [--rounds 5] [--steps 6] [--systems ddp ours-1 ...]

DeepSpeed lives in an environment of its own (`make peers`), which is used if it is there.
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
from typing import Any

SIZES = {"5M": (4, 256, 4, 8192), "30M": (8, 512, 8, 8192), "124M": (12, 768, 12, 50304)}
OURS = ("ours-0", "ours-1", "ours-2", "ours-3")
THEIRS = ("deepspeed-1", "deepspeed-2", "deepspeed-3")
SYSTEMS = ("ddp", "zero1-torch", "fsdp2", *THEIRS, *OURS)
PEERS = Path(__file__).parent.parent / ".venv-peers" / "bin" / "python"
BATCH, LENGTH = 2, 128
HYPER = {"lr": 1e-4, "betas": (0.9, 0.95), "weight_decay": 0.1}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="5M")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--store", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        work(options.systems[0], options.size, options.rank, options.store)
        return
    systems = options.systems or [name for name in SYSTEMS if PEERS.exists() or name not in THEIRS]
    with tempfile.TemporaryDirectory() as folder:
        pairs = {name: Pair(name, options.size, Path(folder, name)) for name in systems}
        try:
            for turn in range(options.rounds + 1):  # the first warms up
                for pair in pairs.values():
                    pair.take(turn * options.steps, options.steps)
        finally:
            for pair in pairs.values():
                pair.stop()
    report(
        options.size, {name: pair.times[1:] for name, pair in pairs.items()}, {name: pair.losses for name, pair in pairs.items()}
    )


class Pair:
    """The two ranks of one system."""

    def __init__(self, name: str, size: str, store: Path) -> None:
        self.times: list[float] = []
        self.losses: list[float] = []
        self.name = name
        python = str(PEERS) if name in THEIRS else sys.executable
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "WORLD_SIZE": "2"}
        if name in THEIRS:  # it compiles its optimizer at the first start, with the ninja of its environment
            environment |= {"DS_ACCELERATOR": "cpu", "PATH": f"{PEERS.parent}:{os.environ['PATH']}"}
        self.ranks = [
            subprocess.Popen(
                [python, __file__, "--systems", name, "--size", size, "--store", str(store), "--rank", str(rank)],
                env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL if name in THEIRS else None,
                text=True,
            )
            for rank in range(2)
        ]

    def take(self, first: int, steps: int) -> None:
        for rank in self.ranks:
            assert rank.stdin is not None
            rank.stdin.write(json.dumps([first, steps]) + "\n")
            rank.stdin.flush()
        answers = [self._answer(rank) for rank in self.ranks]
        self.times.append(answers[0]["seconds"])
        self.losses += answers[0]["losses"]

    def _answer(self, rank: subprocess.Popen[str]) -> dict[str, Any]:
        assert rank.stdout is not None
        for line in rank.stdout:
            if line.startswith('{"seconds"'):  # a system may print what it likes
                return json.loads(line)
        sys.exit(f"{self.name} died with exit code {rank.wait()}")

    def stop(self) -> None:
        for rank in self.ranks:
            rank.kill()
            rank.wait()


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


def work(name: str, size: str, rank: int, store: str) -> None:
    """One rank of one system: takes steps when it is told to, until nobody tells it any more."""
    import warnings

    import torch
    import torch.distributed as dist

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    take = prepare(name, size)
    for line in sys.stdin:
        first, steps = json.loads(line)
        dist.barrier()
        start = time.perf_counter()
        losses = [take(first + step) for step in range(steps)]
        dist.barrier()
        print(json.dumps({"seconds": (time.perf_counter() - start) / steps, "losses": losses}), flush=True)
    dist.destroy_process_group()


def prepare(name: str, size: str) -> Callable[[int], float]:
    """A function that takes one step with a system and returns its loss."""
    import torch
    import torch.distributed as dist

    torch.manual_seed(0)
    model = make_model(*SIZES[size])
    start, *stage = name.split("-")
    kinds: dict[str, Callable[..., Callable[[torch.Tensor], torch.Tensor]]] = {
        "ours": ours,
        "deepspeed": deepspeed,
        "fsdp2": fsdp2,
        "ddp": ddp,
        "zero1": ddp,
    }
    step_on = kinds[start](model, *stage)

    def take(step: int) -> float:
        seed = 2 * step + dist.get_rank()
        return float(step_on(torch.randint(SIZES[size][3], (BATCH, LENGTH), generator=torch.Generator().manual_seed(seed))))

    return take


def config_of(stage: str) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "AdamW", "params": {**HYPER, "betas": list(HYPER["betas"])}},
        "zero_optimization": {"stage": int(stage)},
    }


def ours(model, stage):
    import naught

    return by_engine(naught.initialize(model=model, config=config_of(stage))[0])


def deepspeed(model, stage):
    import deepspeed

    return by_engine(deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config_of(stage))[0])


def by_engine(engine):
    def step_on(ids):
        loss = engine(ids)
        engine.backward(loss)
        engine.step()
        return loss

    return step_on


def fsdp2(model):
    import torch
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    trained = fully_shard(model, mesh=mesh)
    return by_optimizer(trained, torch.optim.AdamW(trained.parameters(), **HYPER, fused=True))


def ddp(model, optimizer="plain"):
    import torch
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.nn.parallel import DistributedDataParallel

    trained = DistributedDataParallel(model, gradient_as_bucket_view=True)
    if optimizer == "torch":
        return by_optimizer(trained, ZeroRedundancyOptimizer(trained.parameters(), torch.optim.AdamW, **HYPER, fused=True))
    return by_optimizer(trained, torch.optim.AdamW(trained.parameters(), **HYPER, fused=True))


def by_optimizer(trained, optimizer):
    def step_on(ids):
        loss = trained(ids)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return step_on


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
