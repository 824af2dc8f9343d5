"""Where a step with the optimizer on the host spends its time: its forward, which waits for updates, its backward, step() itself,
and the update alone.

python benchmarks/host_update.py                     # the 1.64B model of h200.py on a GPU, a tiny one on a CPU
python benchmarks/host_update.py --stage 3 --piece 1048576
python benchmarks/host_update.py --clip 0.1          # low enough that gradients are scaled in every step
"""

from __future__ import annotations

import argparse
import time

import torch
from gpt import GPT, fill

import naught
from naught import host_update


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stage", type=int, default=2, choices=(1, 2, 3))
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--piece", type=int, help="elements that a thread updates at a time")
    parser.add_argument("--clip", type=float, default=1.0, help="the norm that gradients are clipped at")
    options = parser.parse_args()
    if options.piece:
        host_update._PIECE_NUMEL = options.piece
    on_gpu = torch.cuda.is_available()
    layers, width, heads, batch, seq, vocab = (48, 1600, 25, 8, 1024, 50304) if on_gpu else (4, 64, 4, 2, 64, 512)
    with torch.device("cuda" if on_gpu else "cpu"):
        model = fill(GPT(layers, width, heads, seq, vocab))
    zero = {"stage": options.stage, "offload_optimizer": {"device": "cpu"}}
    zero |= {"offload_param": {"device": "cpu"}} if options.stage == 3 else {}
    config = {
        "train_micro_batch_size_per_gpu": batch,
        "gradient_clipping": options.clip,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "betas": [0.9, 0.95], "weight_decay": 0.1}},
        "zero_optimization": zero,
    }
    engine = naught.initialize(model=model, config=config)[0]

    def now() -> float:
        if on_gpu:
            torch.cuda.synchronize()
        return time.perf_counter()

    for step in range(options.steps):
        ids = torch.randint(0, vocab, (batch, seq), device=engine.device)
        began = now()
        loss = engine(ids, ids)
        computed = time.perf_counter()
        engine.backward(loss)
        summed = now()
        engine.step()
        ended = time.perf_counter()
        alone = ""
        if step == options.steps - 1:
            for segment in (segment for unit in engine.schedule.units.values() for segment in unit.trained):
                segment.settle()
            alone = f"  the update alone {time.perf_counter() - summed:.3f}"
        print(
            f"step {step}: {ended - began:.3f} s  forward {computed - began:.3f}  backward {summed - computed:.3f}  "
            f"step() {ended - summed:.3f}{alone}",
            flush=True,
        )


if __name__ == "__main__":
    main()
