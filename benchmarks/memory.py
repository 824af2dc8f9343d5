"""What a plan says a run will hold, and what it held: on the device by torch's own count, and on the host.

python benchmarks/memory.py              # 38 configurations on a GPU, two of them on disk; on a CPU six small ones
python benchmarks/memory.py --quick      # the six on a GPU, too

The plan is the planner's, for the module and its inputs, made before anything is trained: states by their placement, the
working set by walking the plan of a step, activations by tracing the module on fake tensors.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
from itertools import product
from typing import Any, NamedTuple

import torch
from gpt import GPT, fill

import naught
from naught.config import check, load, placement_of
from naught.estimate import forecast
from naught.formulas import recipe
from naught.job import Checkpointing, Job
from naught.machine import Machine
from naught.modules import model_of
from naught.placement import Tier
from naught.sizes import PlacedRun
from naught.trace import trace_activations

HOST = {"device": "cpu"}
PLACES: dict[str, dict[str, Any]] = {
    "stage1": {"stage": 1},
    "stage2": {"stage": 2},
    "stage3": {"stage": 3},
    "stage2-offload": {"stage": 2, "offload_optimizer": HOST},
    "stage3-offload": {"stage": 3, "offload_optimizer": HOST},
    "infinity-host": {"stage": 3, "offload_optimizer": HOST, "offload_param": HOST},
}
FOLDER = os.environ.get("NAUGHT_BENCH_FOLDER", "/tmp/naught-bench")
DISK = {"device": "nvme", "nvme_path": FOLDER}
ON_DISK: dict[str, dict[str, Any]] = {
    "stage2-disk": {"stage": 2, "offload_optimizer": DISK},
    "infinity-disk": {"stage": 3, "offload_optimizer": DISK, "offload_param": {**DISK, "max_in_cpu": 0}},
}


class Case(NamedTuple):
    layers: int
    width: int
    batch: int
    seq: int
    dtype: str
    recomputes: bool
    accumulation: int
    place: str
    small: bool = False
    vocab: int = 50304


def cases() -> list[Case]:
    shapes = [(12, 1536, 8, 1024, "bf16", True, 1), (8, 2048, 4, 512, "bf16", True, 2), (8, 1536, 2, 1024, "fp32", True, 1)]
    shapes += [(12, 1536, 4, 512, "bf16", False, 1), (16, 1024, 8, 1024, "fp16", True, 1)]
    found = [Case(*shape, place) for shape, place in product(shapes, PLACES)]
    extra = (12, 1536, 8, 1024, "bf16", True, 1)
    found += [Case(*extra, place, small=True) for place in PLACES]
    found += [Case(*extra, place) for place in ON_DISK]
    return found


def tiny() -> list[Case]:
    places = ("stage1", "stage3", "stage2-offload", "infinity-host", *ON_DISK)
    return [Case(4, 64, 2, 64, "bf16", True, 1, place, vocab=512) for place in places]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a few small ones")
    parser.add_argument("--places", help="only these, separated by commas")
    options = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    rows = []
    wanted = options.places.split(",") if options.places else [*PLACES, *ON_DISK]
    for case in [case for case in (tiny() if options.quick or not on_gpu else cases()) if case.place in wanted]:
        rows.append(measure(case, torch.device("cuda" if on_gpu else "cpu")))
        print(json.dumps(case._asdict() | rows[-1]), flush=True)
    for tier in ("device", "host", "disk"):
        errors = [abs(row[f"{tier}_error"]) for row in rows if row[f"{tier}_error"] is not None]
        if errors:
            print(f"{tier}: {len(errors)} configurations, off by {statistics.median(errors):.1%}, at most {max(errors):.1%}")


def measure(case: Case, device: torch.device) -> dict[str, Any]:
    with torch.device(device):
        model = GPT(case.layers, case.width, case.width // 64, case.seq, case.vocab, recomputes=case.recomputes)
    fill(model)
    config = {
        "train_micro_batch_size_per_gpu": case.batch,
        "gradient_accumulation_steps": case.accumulation,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": {**(PLACES | ON_DISK)[case.place], "stage3_param_persistence_threshold": 0},
        "naught": {"small_masters": case.small},
        "steps_per_print": 10**9,
    }
    config |= {case.dtype: {"enabled": True}} if case.dtype != "fp32" else {}
    planned = plan(case, model, config, device)
    warm_up(device)
    base = torch.cuda.memory_allocated() - sum(param.nbytes for param in model.parameters()) if device.type == "cuda" else 0
    engine = naught.initialize(model=model, config=config)[0]
    for step in range(3 * case.accumulation):
        if step == 2 * case.accumulation and device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        ids = torch.randint(0, case.vocab, (case.batch, case.seq), device=device)
        engine.backward(engine(ids, ids))
        engine.step()
    held = torch.cuda.max_memory_allocated() - base if device.type == "cuda" else None
    on_host, on_disk = (
        sum(nbytes for name, nbytes in engine.report()["peak"].items() if name.startswith(tier)) for tier in ("host ", "disk ")
    )
    engine.destroy()
    del engine, model
    gc.collect()
    return {
        "planned": planned[Tier.DEVICE],
        "held": held,
        "device_error": None if held is None else planned[Tier.DEVICE] / held - 1,
        "planned_host": planned[Tier.HOST],
        "held_host": on_host,
        "host_error": planned[Tier.HOST] / on_host - 1 if on_host else None,
        "planned_disk": planned[Tier.DISK],
        "held_disk": on_disk,
        "disk_error": planned[Tier.DISK] / on_disk - 1 if on_disk else None,
    }


def warm_up(device: torch.device) -> None:
    """What the libraries of a device keep for themselves is no run's."""
    square = torch.ones(256, 256, device=device, requires_grad=True)
    (square @ square).sum().backward()


def plan(case: Case, model: torch.nn.Module, config: dict[str, Any], device: torch.device) -> dict[Tier, int]:
    assert not check(config).problems
    floats = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(case.dtype)
    with torch.device("meta"):
        ids = torch.empty(case.batch, case.seq, dtype=torch.int64)
    activations = trace_activations(model, (ids, ids), {}, floats=floats)
    bytes_each = recipe(case.dtype, "adamw")
    job = Job(
        micro_batch=case.batch,
        seq=case.seq,
        accumulation=case.accumulation,
        recipe=bytes_each._replace(master=2) if case.small else bytes_each,
        checkpointing=Checkpointing.BLOCK if case.recomputes else Checkpointing.NONE,
    )
    placement = placement_of(load(config))
    placed = [PlacedRun(run, placement) for run in model_of(model).runs]
    found = forecast("run", placed, activations, Machine() if device.type == "cuda" else Machine(berths=0), job)
    return {tier: found.total(tier) for tier in Tier}


if __name__ == "__main__":
    main()
