"""A smoke test on whatever device there is: stages 0 to 3 of a 100M model, one process, losses compared bit for bit.

python benchmarks/smoke.py [--layers 12 --width 768]
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time

import torch
from cpu import make_model

import naught


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--precision", choices=("fp32", "bf16", "fp16"), default="fp32")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    losses = {stage: train(stage, options, device) for stage in range(4)}
    equal = all(losses[stage] == losses[0] for stage in losses)
    print(json.dumps({"device": device, "torch": torch.__version__, "all stages equal": equal, "losses": losses[0]}))
    sys.exit(0 if equal else 1)


def train(stage: int, options: argparse.Namespace, device: str) -> list[float]:
    if device == "cuda":
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    torch.manual_seed(0)
    model = make_model(options.layers, options.width, options.width // 64, 8192).to(device)
    numel = sum(param.numel() for param in model.parameters())
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-4}},
        "zero_optimization": {"stage": stage},
    }
    if options.precision != "fp32":
        config[options.precision] = {"enabled": True}
    engine, *_ = naught.initialize(model=model, config=config)
    losses, start = [], 0.0
    for step in range(options.steps):
        if step == 2:  # the first pass records and the second is the first of the plan
            start = time.perf_counter()
        ids = torch.randint(8192, (4, 128), generator=torch.Generator().manual_seed(step)).to(device)
        loss = engine(ids)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    seconds = (time.perf_counter() - start) / (options.steps - 2)
    held = torch.cuda.max_memory_allocated() if device == "cuda" else 0
    report = engine.report()
    print(json.dumps({"stage": stage, "numel": numel, "ms": round(1000 * seconds, 1), "allocated": held, "peak": report["peak"]}))
    engine.destroy()
    return losses


if __name__ == "__main__":
    main()
