"""What activations cost when they rest elsewhere, and what is lost between the pieces of a GPU's memory.

python benchmarks/activations.py offload              # hidden 4096: checkpoints on the device, the host, the disk; or everything
python benchmarks/activations.py fragments            # 200 steps of varying length: reserved less allocated
python benchmarks/activations.py fragments --beside 4 --curve curve.json
python benchmarks/activations.py offload --quick      # tiny, also on a CPU

Each row trains in a process of its own, with the same first weights and tokens. What goes to disk goes to NAUGHT_BENCH_FOLDER.

offload: seconds are the median of the steps after those that warm up. The first three are taken with torch's deterministic
algorithms, so that their losses can be compared bit for bit. The plan is the planner's, as in `memory.py`.

fragments: plain torch; ours with all states on the device; with checkpoints in memory of their own; and with weights that rest on
the host, whose flats come and go, within budgets and without any. Each with torch's allocator as it is, and with segments that
grow. `--beside` runs so many rows at a time: memory is counted for each process, but then seconds do not compare.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import time
import traceback
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from gpt import GPT, fill
from torch import Tensor, nn

import naught
from naught.config import load, placement_of
from naught.estimate import forecast
from naught.formulas import recipe
from naught.job import Checkpointing, Job
from naught.machine import Machine
from naught.modules import model_of
from naught.placement import Tier
from naught.sizes import PlacedRun
from naught.trace import trace_activations

FOLDER = os.environ.get("NAUGHT_BENCH_FOLDER", "/tmp/naught-bench")  # on the disk that is measured
HYPER = {"lr": 1e-4, "betas": [0.9, 0.95], "weight_decay": 0.1}
WARM, SETTLE = 3, 1  # steps with deterministic algorithms, and one more until the allocator has what it needs without them
GIB, MIB = 1 << 30, 1 << 20
PATIENCE_S = 240
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class Shape(NamedTuple):
    layers: int
    width: int
    heads: int
    batch: int
    seq: int
    vocab: int = 50304


class Task(NamedTuple):
    """One row."""

    table: str
    row: str
    shape: Shape
    steps: int
    stage: int = 3
    grows: bool = False  # the segments of torch's allocator


class Where(NamedTuple):
    """A row of `offload`: where activations rest, and what the planner calls it; None: it has no name for it."""

    config: dict[str, Any]
    planned: Checkpointing | None
    recomputes: bool = True


def places(shape: Shape) -> dict[str, Where]:
    own = {"contiguous_memory_optimization": True, "number_checkpoints": shape.layers}
    on_disk = {"activations": "disk", "nvme_path": FOLDER}
    everything = {"activations": "host", "saved_tensors": "all"}
    return {
        "device": Where({}, Checkpointing.BLOCK),
        "host": Where({"activation_checkpointing": {"cpu_checkpointing": True}}, Checkpointing.HOST),
        "contiguous": Where({"activation_checkpointing": own}, Checkpointing.BLOCK),
        "disk": Where({"naught": on_disk}, Checkpointing.DISK),
        "kept": Where({}, Checkpointing.NONE, recomputes=False),
        "all-host": Where({"naught": everything}, None, recomputes=False),
    }


_HUGE = 10**12  # elements: no budget
_ON_HOST = {"offload_param": {"device": "cpu", "pin_memory": True}}
_NO_BUDGETS = {
    "reduce_bucket_size": _HUGE,
    "allgather_bucket_size": _HUGE,
    "sub_group_size": 0,
    "stage3_prefetch_bucket_size": _HUGE,
    "stage3_max_live_parameters": _HUGE,
}
# What each row of `fragments` has in zero_optimization; plain torch has none.
SYSTEMS: dict[str, dict[str, Any] | None] = {
    "torch": None,
    "2": {"stage": 2},
    "3": {"stage": 3},
    "3-contiguous": {"stage": 3},
    "3-flats": {"stage": 3} | _ON_HOST,
    "3-flats-pool": {"stage": 3} | _ON_HOST,
    "3-unlimited": {"stage": 3} | _ON_HOST | _NO_BUDGETS,
    "2-unlimited": {"stage": 2} | _NO_BUDGETS,  # on one GPU the same as 2: nothing is sent, so no budget is asked
}
_ASKED_FOR = ("2-unlimited",)  # only with --rows

SHAPES = {"offload": Shape(12, 4096, 32, 16, 1024), "fragments": Shape(16, 2048, 16, 2, 2048)}
TINY = {"offload": Shape(3, 128, 2, 4, 128, 512), "fragments": Shape(3, 64, 2, 4, 256, 512)}
STEPS = {"offload": 6, "fragments": 200}
FEW = {"offload": 2, "fragments": 12}


def main() -> None:
    options = _options()
    if options.one:
        _print_one(json.loads(options.one))
        return
    tasks = _tasks(options)
    records: list[dict[str, Any]] = []
    curves: dict[str, Any] = {}
    with ThreadPoolExecutor(options.beside) as runners:
        for task, record in zip(tasks, runners.map(_run, tasks), strict=True):
            record = {"row": _name(task)} | record
            curves[_name(task)] = record.pop("series", None)
            print(json.dumps(record), flush=True)
            records.append(record)
    if options.curve:
        Path(options.curve).write_text(json.dumps(curves), encoding="utf-8")
    if options.table == "offload":
        _show_offload(records)
    else:
        _show_fragments(records, beside=options.beside)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", nargs="?", choices=list(SHAPES), default="offload")
    parser.add_argument("--rows", help="some of them, separated by commas")
    parser.add_argument("--shape", help="layers,width,heads,batch,seq[,vocab] instead of the table's")
    parser.add_argument("--steps", type=int, help="timed ones in offload, all of them in fragments")
    parser.add_argument("--stage", type=int, default=3, choices=(1, 2, 3), help="of offload")
    parser.add_argument("--beside", type=int, default=1, help="rows at a time")
    parser.add_argument("--curve", help="write what each step of fragments held, in MiB, to a file")
    parser.add_argument("--quick", action="store_true", help="a tiny model and a few steps")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    return parser.parse_args()


def _tasks(options: argparse.Namespace) -> list[Task]:
    table = options.table
    shape = (TINY if options.quick else SHAPES)[table]
    if options.shape:
        shape = Shape(*map(int, options.shape.split(",")))
    steps = options.steps or (FEW if options.quick else STEPS)[table]
    known = list(places(shape)) if table == "offload" else list(SYSTEMS)
    wanted = options.rows.split(",") if options.rows else [name for name in known if name not in _ASKED_FOR]
    unknown = [name for name in wanted if name not in known]
    if unknown:
        sys.exit(f"no row {', '.join(unknown)}: there are {', '.join(known)}")
    if table == "offload":
        return [Task(table, row, shape, steps, options.stage) for row in wanted]
    return [Task(table, row, shape, steps, grows=grows) for row, grows in product(wanted, (False, True))]


def _name(task: Task) -> str:
    return task.row + (" grows" if task.grows else "")


def _run(task: Task) -> dict[str, Any]:
    told = json.dumps(task._asdict() | {"shape": task.shape._asdict()})
    environment = dict(os.environ)
    if task.table == "offload":
        environment["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # without it cuBLAS is not deterministic
    if task.grows:
        environment["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    command = [sys.executable, __file__, task.table, "--one", told]
    try:
        run = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=PATIENCE_S, check=False, env=environment)
    except subprocess.TimeoutExpired:
        return {"error": f"no result within {PATIENCE_S} s"}
    lines = [line for line in run.stdout.splitlines() if line.startswith("{")]
    return json.loads(lines[-1]) if lines else {"error": f"ended with status {run.returncode}"}


def _show_offload(records: list[dict[str, Any]]) -> None:
    base: dict[str, Any] = next((record for record in records if record["row"] == "device" and "step_s" in record), {})
    print("\nGiB; moved: for each step. off: planned against held. alone: what the traffic with the host takes by itself")
    heads = ("row", "s/step", "x device", "held", "planned", "off", "reserved", "on host", "planned", "down", "up", "alone s")
    print(_line(heads) + "  disk w, r        losses")
    for record in records:
        if "error" in record:
            print(f"{record['row']:<20}{record['error']}")
            continue
        moved = record["moved_gib"]
        cells = (
            record["row"],
            _cell(record["step_s"], 3),
            _cell(record["step_s"] / base["step_s"], 3) if base else "-",
            _cell(record["held_gib"]),
            _cell(record["planned_gib"]),
            "-" if record["off"] is None else f"{record['off']:+.2%}",
            _cell(record["reserved_gib"]),
            _cell(record["host_gib"]),
            _cell(record["planned_host_gib"]),
            _cell(moved.get("activations to the host")),
            _cell(moved.get("activations to the device")),
            _cell(record["alone_s"], 3),
        )
        disk = ", ".join(_cell(moved.get(f"disk {what}")) for what in ("written", "read"))
        same = "-" if not base else "the same bits" if record["bits"] == base["bits"] else "OTHER BITS"
        print(f"{_line(cells)}  {disk:<15}  {record['losses'][0]:.4f} .. {record['losses'][-1]:.4f}, {same}")
    for record in records:
        if record.get("unplanned"):
            print(f"{record['row']}: {record['unplanned']}")


def _show_fragments(records: list[dict[str, Any]], *, beside: int) -> None:
    print("\nGiB, reserved less allocated. made: with the model; end: when a step ends; peak: at the peak of a step; in all:")
    print("the most reserved less the most allocated. own: memory that checkpoints have of their own after the last step")
    heads = ("row", "s/step", "made", "end most", "end last", "peak most", "in all", "reserved", "allocated", "own", "retries")
    print(_line(heads))
    for record in records:
        if "error" in record:
            print(f"{record['row']:<20}{record['error']}")
            continue
        names = ("built", "end_most", "end_last", "peak_most", "in_all", "reserved", "allocated", "kept")
        cells = (_cell(record["step_s"], 3), *(_cell(record[f"{name}_gib"]) for name in names), _cell(record["retries"], 0))
        print(_line((record["row"], *cells)))
    if beside > 1:
        print(f"{beside} rows at a time: seconds do not compare")


def _line(cells: tuple[str, ...]) -> str:
    return f"{cells[0]:<20}" + "".join(f"{cell:>10}" for cell in cells[1:])


def _cell(value: float | None, places: int = 2) -> str:
    return "-" if value is None else f"{value:.{places}f}"


# --- one row, in a process of its own ---

Step = Callable[[Tensor], Tensor]


def _print_one(told: dict[str, Any]) -> None:
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what systems print does not get between
    task = Task(**told | {"shape": Shape(**told["shape"])})
    try:
        record = (_offload if task.table == "offload" else _fragments)(task)
    except BaseException as error:
        traceback.print_exc()
        record = {"error": f"{type(error).__name__}: {str(error)[:400]}"}
    print(json.dumps(record), file=out, flush=True)
    os._exit(0)


def _model(shape: Shape, *, recomputes: bool = True) -> nn.Module:
    with torch.device(DEVICE):
        model = GPT(shape.layers, shape.width, shape.heads, shape.seq, shape.vocab, recomputes=recomputes)
    return fill(model)


def _config(shape: Shape, zero: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": shape.batch,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": HYPER},
        "zero_optimization": zero,
        "bf16": {"enabled": True},
        "steps_per_print": 10**9,
        **more,
    }


def _step_of(engine: naught.Engine) -> Step:
    def step(ids: Tensor) -> Tensor:
        loss = engine(ids, ids)
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return step


def _timed(step: Step, ids: Tensor) -> tuple[Tensor, float]:
    _synchronize()
    began = time.perf_counter()
    loss = step(ids)
    _synchronize()
    return loss, time.perf_counter() - began


def _synchronize() -> None:
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


def _collect() -> None:
    gc.collect()
    gc.freeze()  # a collection that looks at every object of torch takes as long as a step


# --- offload ---


def _offload(task: Task) -> dict[str, Any]:
    shape, where = task.shape, places(task.shape)[task.row]
    config = _config(shape, {"stage": task.stage}, where.config)
    began = time.perf_counter()
    model = _model(shape, recomputes=where.recomputes)
    plan = _plan(task, where, model, config)
    _warm_up()
    base = torch.cuda.memory_allocated() - sum(param.nbytes for param in model.parameters()) if DEVICE.type == "cuda" else 0
    engine = naught.initialize(model=model, config=config)[0]
    _collect()
    build_s = time.perf_counter() - began
    dice = torch.Generator(DEVICE).manual_seed(1)
    losses, seconds = [], []
    _be_exact(True)
    for number in range(WARM + SETTLE + task.steps):
        if number == WARM:
            _be_exact(False)
        if number == WARM + SETTLE and DEVICE.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        ids = torch.randint(0, shape.vocab, (shape.batch, shape.seq), device=DEVICE, generator=dice)
        loss, taken_s = _timed(_step_of(engine), ids)
        losses.append(loss.item())
        seconds.append(taken_s)
    report = engine.report()
    moved = {name: nbytes / len(seconds) for name, nbytes in report["moved"].items()}
    held, reserved = _peaks()
    return {
        "numel": sum(param.numel() for param in model.parameters()),
        "step_s": round(median(seconds[WARM + SETTLE :]), 4),
        "steps": [round(taken_s, 4) for taken_s in seconds],
        "build_s": round(build_s, 1),
        "held_gib": _gib(None if held is None else held - base),
        "reserved_gib": _gib(reserved),
        **_against(plan, None if held is None else held - base),
        "host_gib": _gib(report["peak"].get("host activations")),
        "moved_gib": {name: round(nbytes / GIB, 4) for name, nbytes in moved.items()},
        "alone_s": _alone_s(moved),
        "bits": [loss.hex() for loss in losses[:WARM]],
        "losses": [round(loss, 5) for loss in losses],
    }


def _be_exact(exact: bool) -> None:
    """Have torch compute the same bits each time, or as fast as it can: memory that only the first needs is given back."""
    torch.use_deterministic_algorithms(exact)
    torch.utils.deterministic.fill_uninitialized_memory = False
    if not exact and DEVICE.type == "cuda":
        torch.cuda.empty_cache()


def _warm_up() -> None:
    """What the libraries of a device keep for themselves is no run's."""
    square = torch.ones(256, 256, device=DEVICE, requires_grad=True)
    (square @ square).sum().backward()


def _peaks() -> tuple[int | None, int | None]:
    if DEVICE.type != "cuda":
        return None, None
    return torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()


def _gib(nbytes: float | None) -> float | None:
    return None if nbytes is None else round(nbytes / GIB, 4)


class Plan(NamedTuple):
    """Bytes on the device and the host; and on the device if the block that is computed again were there beside the loss."""

    device: int
    host: int
    with_a_block: int


def _plan(task: Task, where: Where, model: nn.Module, config: dict[str, Any]) -> Plan | None:
    """The planner's, as `memory.py` asks it; None: it has no such place for activations."""
    if where.planned is None:
        return None
    shape = task.shape
    with torch.device("meta"):
        ids = torch.empty(shape.batch, shape.seq, dtype=torch.int64)
        whole = GPT(shape.layers, shape.width, shape.heads, shape.seq, shape.vocab, recomputes=False)
    job = Job(micro_batch=shape.batch, seq=shape.seq, recipe=recipe("bf16", "adamw"), checkpointing=where.planned)
    placement = placement_of(load(config))
    machine = Machine() if DEVICE.type == "cuda" else Machine(berths=0)
    placed = [PlacedRun(run, placement) for run in model_of(model).runs]
    plain, apart = (
        forecast("run", placed, trace_activations(each, (ids, ids), {}, floats=torch.bfloat16), machine, job)
        for each in (model, whole)
    )
    return Plan(plain.total(Tier.DEVICE), plain.total(Tier.HOST), apart.total(Tier.DEVICE))


def _against(plan: Plan | None, held: int | None) -> dict[str, Any]:
    if plan is None:
        none = dict.fromkeys(("planned_gib", "planned_host_gib", "planned_with_a_block_gib", "off"))
        return none | {"unplanned": "the planner has no name for this: naught.job.Checkpointing is none, block, host or disk"}
    return {
        "planned_gib": _gib(plan.device),
        "planned_host_gib": _gib(plan.host),
        "planned_with_a_block_gib": _gib(plan.with_a_block),
        "off": None if held is None else round(plan.device / held - 1, 5),
    }


def _alone_s(moved: dict[str, float]) -> float | None:
    """Seconds that a step's traffic between the device and its host would take by itself, at the rate of a large copy."""
    if DEVICE.type != "cuda" or not moved:
        return None
    far, near = (
        torch.empty(256 * MIB, dtype=torch.uint8, pin_memory=True),
        torch.empty(256 * MIB, dtype=torch.uint8, device=DEVICE),
    )

    def rate(into: Tensor, source: Tensor) -> float:
        return into.nbytes / min(_timed(lambda _: into.copy_(source, non_blocking=True), near)[1] for _ in range(4))

    down, up = moved.get("activations to the host", 0), moved.get("activations to the device", 0)
    return round(down / rate(far, near) + up / rate(near, far), 4)


# --- fragments ---


def _fragments(task: Task) -> dict[str, Any]:
    shape = task.shape
    model = _model(shape)
    engine, step = _system(task, model)
    _collect()
    built = _held_now()
    if DEVICE.type == "cuda":
        torch.cuda.empty_cache()  # what making a model has left is not the steps'
    lengths = _lengths(shape.seq, task.steps)
    dice = torch.Generator(DEVICE).manual_seed(1)
    series: defaultdict[str, list[float]] = defaultdict(list)
    losses: list[float] = []
    for length in lengths:
        ids = torch.randint(0, shape.vocab, (shape.batch, length), device=DEVICE, generator=dice)
        if DEVICE.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        loss, taken_s = _timed(step, ids)
        losses.append(round(loss.item(), 5))
        series["seconds"].append(round(taken_s, 4))
        for name, nbytes in _held_now().items():
            series[name].append(round(nbytes / MIB, 1))
    kept = None if engine is None else engine.report()["live"].get("kept activations")
    return {
        "numel": sum(param.numel() for param in model.parameters()),
        "step_s": round(median(series["seconds"][WARM:]), 4),
        "lengths": len(set(lengths)),
        "built_gib": _gib(built["reserved"] - built["allocated"]) if built else None,
        **_gaps(series),
        "kept_gib": _gib(kept),
        "losses": [losses[0], losses[-1]],
        "series": {"lengths": lengths, **series},
    }


def _system(task: Task, model: nn.Module) -> tuple[naught.Engine | None, Step]:
    zero = SYSTEMS[task.row]
    if zero is None:
        return None, _plain(model)
    own = {"contiguous_memory_optimization": True, "number_checkpoints": task.shape.layers}
    more: dict[str, Any] = {"activation_checkpointing": own} if task.row.endswith("contiguous") else {}
    more |= {"naught": {"private_pool": True}} if task.row.endswith("pool") else {}
    engine = naught.initialize(model=model, config=_config(task.shape, zero, more))[0]
    return engine, _step_of(engine)


def _plain(model: nn.Module) -> Step:
    """32-bit weights and autocast: what one writes first."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=HYPER["lr"], betas=(0.9, 0.95), weight_decay=0.1, fused=True)

    def step(ids: Tensor) -> Tensor:
        with torch.autocast(DEVICE.type, torch.bfloat16):
            loss = model(ids, ids)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def _lengths(most: int, count: int) -> list[int]:
    """Odd multiples of a 256th of the longest, from an eighth of it on: drawn in the same order for all."""
    least, unit = most // 8, max(1, most // 256)
    dice = torch.Generator().manual_seed(2)
    drawn = torch.randint(least // unit // 2, most // unit // 2, (count,), generator=dice)
    return [(2 * place + 1) * unit for place in drawn.tolist()]


def _held_now() -> dict[str, int]:
    """Bytes at the end of a step, and the most within it; none where nobody counts them."""
    if DEVICE.type != "cuda":
        return {}
    stats = torch.cuda.memory_stats()
    return {
        "allocated": stats["allocated_bytes.all.current"],
        "reserved": stats["reserved_bytes.all.current"],
        "split": stats["inactive_split_bytes.all.current"],  # free, between what is not
        "peak_allocated": stats["allocated_bytes.all.peak"],
        "peak_reserved": stats["reserved_bytes.all.peak"],
        "peak_split": stats["inactive_split_bytes.all.peak"],
    }


def _gaps(series: dict[str, list[float]]) -> dict[str, Any]:
    names = ("end_most_gib", "end_last_gib", "peak_most_gib", "in_all_gib", "reserved_gib", "allocated_gib", "split_most_gib")
    if "allocated" not in series:
        return dict.fromkeys((*names, "retries"))
    at_end = [reserved - held for reserved, held in zip(series["reserved"], series["allocated"], strict=True)]
    at_peak = [reserved - held for reserved, held in zip(series["peak_reserved"], series["peak_allocated"], strict=True)]
    reserved, allocated = max(series["peak_reserved"]), max(series["peak_allocated"])
    found = (max(at_end), at_end[-1], max(at_peak), reserved - allocated, reserved, allocated, max(series["peak_split"]))
    gaps: dict[str, Any] = {name: round(mib * MIB / GIB, 3) for name, mib in zip(names, found, strict=True)}
    return gaps | {"retries": torch.cuda.memory_stats()["num_alloc_retries"]}


if __name__ == "__main__":
    main()
