"""Ours and its peers on one GPU machine, side by side, with plain torch as the anchor of every call.

python benchmarks/h200.py stages             # 1.64B: torch, FSDP2, DeepSpeed and our stages, all on the GPU
python benchmarks/h200.py offload            # 1.64B: states on the host
python benchmarks/h200.py large              # 6.86B with the optimizer on the host
python benchmarks/h200.py largest            # how large a model trains on the GPU and the host together
python benchmarks/h200.py capped             # the same with 32 GiB of GPU memory
python benchmarks/h200.py disk               # states on disk, in NAUGHT_BENCH_FOLDER
python benchmarks/h200.py infinity           # the largest on GPU, host and disk together
python benchmarks/h200.py --only torch,ours-2 stages

Each system trains in a process of its own: the same model, tokens, batch and precision (bf16, one checkpoint a block, AdamW,
clipping at 1.0, but where a name ends in "early": there units are updated in the backward). Seconds are the median of the steps
after the first three; of a short run the slower one of its last two. A peer that is not installed is left out, and said so. Every
call fits ten minutes.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import os
import resource
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from gpt import GPT, fill, flops_per_step
from torch import Tensor, nn

FOLDER = os.environ.get("NAUGHT_BENCH_FOLDER", "/tmp/naught-bench")  # on the disk that is measured
HYPER: dict[str, Any] = {"lr": 1e-4, "betas": (0.9, 0.95), "weight_decay": 0.1}
CLIP = 1.0
STEPS, WARM = 8, 3
GIB = 1 << 30


class Shape(NamedTuple):
    layers: int
    width: int
    heads: int
    batch: int = 8
    seq: int = 1024


SMALL, MIDDLE = Shape(48, 1600, 25), Shape(32, 4096, 32)


def deep(layers: int) -> Shape:
    return Shape(layers, 5120, 40)


class Row(NamedTuple):
    """A system and what it trains."""

    system: str
    shape: Shape = SMALL
    steps: int = STEPS
    cap_gib: float = 0
    host_gib: float = 0  # 0: 122 GB


TABLES: dict[str, list[Row]] = {
    "stages": [
        Row("torch"),
        Row("torch-fp16"),
        Row("fsdp2"),
        *(Row(f"ours-{name}") for name in ("1", "2", "3", "3-fp16", "1-small", "1-moments")),
        *(Row(f"deepspeed-{name}") for name in ("1", "2", "3", "3-fp16")),
    ],
    "offload": [
        Row("torch"),
        *(Row(f"ours-{name}") for name in ("2-offload", "3-offload", "2-offload-early", "2-offload-delay")),
        *(Row(f"deepspeed-{name}", steps=6) for name in ("2-offload", "3-offload")),
        Row("fsdp2-offload", steps=6),
        Row("torchao"),
    ],
    "large": [Row("torch"), Row("torch", MIDDLE, 6), Row("ours-2-offload", MIDDLE, 6)],
    "largest": [Row("torch"), Row("ours-auto", deep(53), 4), Row("ours-auto-early", deep(63), 4)],
    "capped": [Row("torch"), Row("ours-auto", deep(31), 5, 32.0)],
    "disk": [
        Row("torch"),
        *(Row(f"ours-{name}", steps=5) for name in ("2-nvme", "3-nvme")),
        Row("ours-auto-nvme", deep(12), 4, 16.0, 32.0),  # fits neither on the GPU nor on the host
        Row("deepspeed-3-nvme", steps=3),
    ],
    "infinity": [Row("torch"), Row("ours-auto-nvme", deep(62), 3)],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", nargs="?", choices=list(TABLES), default="stages")
    parser.add_argument("--only", help="systems, separated by commas")
    parser.add_argument("--shape", help="layers,width,heads instead of the table's")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--cap", type=float, help="GiB of GPU memory")
    parser.add_argument("--trace", help="write a timeline of two steps of each of our systems to FOLDER/SYSTEM.json")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        _print_one(json.loads(options.one))
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that whoever ends this ends the row that is running
    rows = TABLES[options.table]
    if options.only:
        wanted = options.only.split(",")
        known = {row.system: row for row in rows}
        rows = [known.get(name, Row(name)) for name in wanted]
    found = []
    for row in rows:
        if options.shape and row.system != "torch":
            row = row._replace(shape=Shape(*map(int, options.shape.split(","))))
        if options.steps:
            row = row._replace(steps=options.steps)
        if options.cap is not None and row.system != "torch":
            row = row._replace(cap_gib=options.cap)
        missing = _missing(row.system)
        record = {"system": row.system, "error": f"{missing} is not installed"} if missing else _run(row, options.trace)
        print(json.dumps(record), flush=True)
        found.append(record)
    _show(found)


def _missing(system: str) -> str | None:
    package = {"deepspeed": "deepspeed", "torchao": "torchao"}.get(system.partition("-")[0])
    return package if package and importlib.util.find_spec(package) is None else None


def _run(row: Row, trace: str | None) -> dict[str, Any]:
    task = {**row._asdict(), "shape": row.shape._asdict(), "trace": trace}
    command = [sys.executable, __file__, "--one", json.dumps(task)]
    try:
        run = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=500, check=False)
    except subprocess.TimeoutExpired:
        return {"system": row.system, "error": "no result within 500 s"}
    lines = [line for line in run.stdout.splitlines() if line.startswith("{")]
    return json.loads(lines[-1]) if lines else {"system": row.system, "error": f"ended with status {run.returncode}"}


def _show(records: list[dict[str, Any]]) -> None:
    anchor = next((record["step_s"] for record in records if record["system"] == "torch" and "step_s" in record), None)
    print(f"\n{'system':<20}{'B':>7}{'s/step':>9}{'x torch':>9}{'TFLOP/s':>9}{'GPU GiB':>9}{'host GiB':>10}  losses")
    for record in records:
        if "error" in record:
            print(f"{record['system']:<20}  {record['error']}")
            continue
        ratio = f"{record['step_s'] / anchor:.2f}" if anchor else "-"
        print(
            f"{record['system']:<20}{record['numel'] / 1e9:>7.2f}{record['step_s']:>9.3f}{ratio:>9}{record['tflops']:>9.0f}"
            f"{record['peak_gib']:>9.2f}{record['host_gib']:>10.1f}  {record['losses'][0]:.3f} .. {record['losses'][-1]:.3f}"
        )


# --- one system in a process of its own ---

Step = Callable[[Tensor], Tensor]


class Trained(NamedTuple):
    step: Step
    report: Callable[[], Mapping[str, Any]] = dict


def _print_one(task: dict[str, Any]) -> None:
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what systems print does not get between
    trace = task.pop("trace")
    try:
        record = _measure(Row(**task | {"shape": Shape(**task["shape"])}), trace)
    except BaseException as error:
        traceback.print_exc()
        record = {"system": task["system"], "error": f"{type(error).__name__}: {str(error)[:400]}"}
    print(json.dumps(record), file=out, flush=True)
    os._exit(0)


def _measure(row: Row, trace: str | None) -> dict[str, Any]:
    for key, value in {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29511",
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
    }.items():
        os.environ.setdefault(key, value)
    torch.cuda.set_device(0)
    device = torch.device("cuda", 0)
    if row.cap_gib and not row.system.startswith("ours"):  # ours is told, and keeps to it
        torch.cuda.set_per_process_memory_fraction(row.cap_gib * GIB / torch.cuda.get_device_properties(0).total_memory)
    shape, began = row.shape, time.perf_counter()
    kind, _, variant = row.system.partition("-")
    large = kind == "ours" and variant.startswith("auto")
    with torch.device("meta" if large else device):
        model = GPT(shape.layers, shape.width, shape.heads, shape.seq)
    numel = sum(param.numel() for param in model.parameters())
    if not large:
        fill(model)
    trained = SYSTEMS[kind](model, variant, row)
    gc.collect()
    gc.freeze()  # for all alike: a collection that looks at every object of torch takes as long as a step
    build_s = time.perf_counter() - began
    torch.cuda.reset_peak_memory_stats()
    dice = torch.Generator(device).manual_seed(1)
    losses: list[Tensor] = []
    seconds: list[float] = []

    def go() -> None:
        ids = torch.randint(0, 50257, (shape.batch, shape.seq), device=device, generator=dice)
        torch.cuda.synchronize()
        start = time.perf_counter()
        losses.append(trained.step(ids).detach())
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)

    for _ in range(row.steps):
        go()
    torch.cuda.synchronize()
    if trace and kind == "ours":
        _trace(go, f"{trace}/{row.system}.json")
    warm = min(WARM, row.steps - 2)
    step_s = sorted(seconds[warm : row.steps])[(row.steps - warm) // 2]
    tokens = shape.batch * shape.seq
    return {
        "system": row.system,
        "numel": numel,
        "step_s": round(step_s, 4),
        "steps": [round(second, 3) for second in seconds[: row.steps]],
        "tflops": round(flops_per_step(numel, shape.layers, shape.width, tokens, shape.seq) / step_s / 1e12, 1),
        "peak_gib": round(torch.cuda.max_memory_allocated() / GIB, 3),
        "reserved_gib": round(torch.cuda.max_memory_reserved() / GIB, 2),
        "host_gib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB, 2),
        "build_s": round(build_s, 1),
        "losses": [round(loss.item(), 4) for loss in losses[: row.steps]],
        **trained.report(),
    }


def _trace(go: Callable[[], None], path: str) -> None:
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        go()
        go()
    seen.export_chrome_trace(path)


def _clipped(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    forward: Callable[[Tensor], Tensor],
    *,
    clips: bool = True,
    scaler: torch.amp.GradScaler | None = None,
) -> Trained:
    scaler = scaler or torch.amp.GradScaler("cuda", enabled=False)  # which does nothing

    def step(ids: Tensor) -> Tensor:
        loss = forward(ids)
        scaler.scale(loss).backward()
        if clips:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        return loss

    return Trained(step)


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), fused=True, **HYPER)


def _torch(model: nn.Module, variant: str, row: Row) -> Trained:
    """32-bit weights and autocast: what one writes first."""
    del row
    if variant == "compiled":
        for block in model.blocks:
            block.compile()
    scaler = torch.amp.GradScaler("cuda", enabled=variant == "fp16")

    def forward(ids: Tensor) -> Tensor:
        with torch.autocast("cuda", torch.float16 if variant == "fp16" else torch.bfloat16):
            return model(ids, ids)

    return _clipped(model, _adamw(model), forward, scaler=scaler)


def _fsdp2(model: nn.Module, variant: str, row: Row) -> Trained:
    del row
    from torch.distributed import init_process_group
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    init_process_group("cuda:nccl,cpu:gloo")
    options: dict[str, Any] = {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)}
    if variant == "offload":
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=True)
    for block in model.blocks:
        fully_shard(block, **options)
    fully_shard(model, **options)
    return _clipped(model, _adamw(model), lambda ids: model(ids, ids))


def _torchao(model: nn.Module, variant: str, row: Row) -> Trained:
    """16-bit states, and no clipping: it cannot."""
    del variant, row
    from torchao.optim import CPUOffloadOptimizer

    model.bfloat16()
    optimizer = CPUOffloadOptimizer(model.parameters(), torch.optim.AdamW, offload_gradients=False, fused=True, **HYPER)
    return _clipped(model, optimizer, lambda ids: model(ids, ids), clips=False)


def _config(variant: str, row: Row) -> dict[str, Any]:
    """A DeepSpeed configuration, which both read."""
    stage = variant[0] if variant[:1].isdigit() else "3"
    zero: dict[str, Any] = {"stage": int(stage), "overlap_comm": True, "contiguous_gradients": True}
    if "offload" in variant or "nvme" in variant:
        place = {"device": "nvme", "nvme_path": FOLDER} if "nvme" in variant else {"device": "cpu"}
        zero["offload_optimizer"] = place | {"pin_memory": True}
        if stage == "3":
            zero["offload_param"] = place | {"pin_memory": True} | ({"max_in_cpu": 0} if "nvme" in variant else {})
    return {
        "train_micro_batch_size_per_gpu": row.shape.batch,
        "gradient_clipping": 0.0 if variant.endswith("early") else CLIP,
        "optimizer": {"type": "AdamW", "params": HYPER | {"betas": list(HYPER["betas"])}},
        "zero_optimization": zero,
        "fp16" if variant.endswith("fp16") else "bf16": {"enabled": True},
        "steps_per_print": 10**9,
    }


def _deepspeed(model: nn.Module, variant: str, row: Row) -> Trained:
    import deepspeed

    return _by_engine(deepspeed.initialize(model=model, model_parameters=model.parameters(), config=_config(variant, row))[0])


# What our systems are called for, beside the stage.
OURS: dict[str, dict[str, Any]] = {
    "small": {"small_masters": True},
    "moments": {"small_masters": True, "small_moments": True},
    "delay": {"delay_update_after": 1},
    "early": {"update_in_backward": True},
}


def _ours(model: nn.Module, variant: str, row: Row) -> Trained:
    import naught

    asked = OURS.get(variant.rpartition("-")[2], {})
    config = _config(variant, row) | {"naught": asked}
    if variant.startswith("auto"):
        tokens, width = row.shape.batch * row.shape.seq, row.shape.width
        # One checkpoint a block, the loss and its two gradients in 32 bits, and a block that is computed again.
        activations = 2 * row.shape.layers * tokens * width + 3 * 4 * tokens * 50304 + 40 * tokens * width
        config["naught"] = asked | {"placement": "auto", "small_masters": True, "activation_memory": activations}
        config["naught"] |= {"gpu_memory": int(row.cap_gib * GIB) or "147GB", "host_memory": int(row.host_gib * GIB) or "122GB"}
        config["naught"] |= {"nvme_path": FOLDER} if variant.endswith("nvme") else {}
        config["zero_optimization"] = {"stage": 3}
    engine = naught.initialize(model=model, config=config)[0]
    trained = _by_engine(engine)
    norms: list[float] = []  # a step behind one that was clipped may take longer

    def step(ids: Tensor) -> Tensor:
        loss = trained.step(ids)
        norms.append(round(engine.get_global_grad_norm(), 3))
        return loss

    def report() -> dict[str, Any]:
        rest = engine.planned()
        host = sum(nbytes for name, nbytes in rest.items() if name.startswith("host "))
        moved = engine.report()["moved"]
        return {
            "norms": norms,
            "planned_gib": {name: round(nbytes / GIB, 2) for name, nbytes in rest.items() if nbytes},
            "planned_host_gib": round(host / GIB, 2),
            "moved_gib": {name: round(nbytes / GIB, 2) for name, nbytes in moved.items()},
        }

    return Trained(step, report)


def _by_engine(engine: Any) -> Trained:
    def step(ids: Tensor) -> Tensor:
        loss = engine(ids, ids)
        engine.backward(loss)
        engine.step()
        return loss

    return Trained(step)


SYSTEMS: dict[str, Callable[[nn.Module, str, Row], Trained]] = {
    "torch": _torch,
    "fsdp2": _fsdp2,
    "torchao": _torchao,
    "deepspeed": _deepspeed,
    "ours": _ours,
}

if __name__ == "__main__":
    main()
