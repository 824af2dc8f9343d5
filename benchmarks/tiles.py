"""A linear layer that is too large to be gathered, whole and in pieces, under a limit of GPU memory: forward, backward and a step
of gradient descent. Weights, gradients and masters rest on the host.

python benchmarks/tiles.py                         # 64K x 64K, 16 pieces, 6 GiB
python benchmarks/tiles.py --width 65536 --tiles 16 --gib 6
"""

from __future__ import annotations

import argparse
import time

import torch
from torch import Tensor, nn

import naught
from naught.errors import PlacementError

GIB = 1 << 30


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).float().square().mean()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=1 << 16)
    parser.add_argument("--tiles", type=int, default=16)
    parser.add_argument("--gib", type=float, default=6.0)
    parser.add_argument("--tokens", type=int, default=64)
    options = parser.parse_args()
    for tiles in (1, options.tiles):
        print(f"{options.width} x {options.width} in {tiles}: {_train(options, tiles)}", flush=True)
    if torch.cuda.is_available():
        print(f"plain torch: {_plain(options)}", flush=True)


def _train(options: argparse.Namespace, tiles: int) -> str:
    with torch.device("meta"):
        model = Layer(options.width)
    on_host = {"device": "cpu", "pin_memory": True}
    config = {
        "train_micro_batch_size_per_gpu": options.tokens,
        "optimizer": {"type": "SGD", "params": {"lr": 1e-2}},
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3, "offload_optimizer": on_host, "offload_param": on_host},
        "naught": {"tiles": tiles, "gpu_memory": int(options.gib * GIB), "activation_memory": int(options.gib * GIB / 8)},
    }
    try:
        engine = naught.initialize(model=model, config=config)[0]
    except PlacementError as error:
        return f"refused: {error}"
    seconds, losses = [], []
    for _ in range(3):
        torch.manual_seed(0)
        began = time.perf_counter()
        loss = engine(torch.randn(options.tokens, options.width, device=engine.device, dtype=torch.bfloat16))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        seconds.append(time.perf_counter() - began)
    peak = torch.cuda.max_memory_allocated() / GIB if torch.cuda.is_available() else 0.0
    engine.destroy()
    return (
        f"peak {peak:.2f} GiB of {options.gib:g}, step {seconds[-1]:.2f} s, losses {', '.join(f'{loss:.5f}' for loss in losses)}"
    )


def _plain(options: argparse.Namespace) -> str:
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(options.gib * GIB / torch.cuda.get_device_properties(0).total_memory)
    try:
        layer = nn.Linear(options.width, options.width, bias=False, device="cuda", dtype=torch.bfloat16)
        layer(torch.randn(options.tokens, options.width, device="cuda", dtype=torch.bfloat16)).float().square().mean().backward()
    except torch.cuda.OutOfMemoryError:
        return f"out of memory within {options.gib:g} GiB"
    return "it fits"


if __name__ == "__main__":
    main()
