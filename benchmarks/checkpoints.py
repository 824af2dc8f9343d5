"""How fast training is saved and loaded beside what the disk can do, and what a save beside training costs. All in one run.

    .venv/bin/python benchmarks/checkpoints.py [--size 5M|30M|124M] [--ranks 2] [--rounds 5] [--folder DIR] [--stage 1]

The disk's limit is measured in every round with as many processes and bytes as a save: the fastest of three plain ways to
write (buffered; buffered with early write-back; around the page cache), synced, and one to read, from a cache that was
dropped. Saves and loads are ratios to it. torch.save of as many bytes in 12 tensors of the host, synced, and torch.load stand
beside.

The stall of an asynchronous save is how long training was held up: in the call, and before the next update. The slowdown is
how much longer the steps took until it was over, which on a CPU is the cores that it shares with training.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import shutil
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from cpu import SIZES, make_model

import naught

BATCH, LENGTH = 2, 128
BLOCK = 16 << 20
RANDOM = mmap.mmap(-1, BLOCK)  # where a page begins
RANDOM.write(os.urandom(BLOCK))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="30M")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--stage", type=int, default=1)
    parser.add_argument("--batch", type=int, default=BATCH)
    parser.add_argument("--length", type=int, default=LENGTH)
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--folder", type=Path, default=None, help="on the disk to measure; default: a temporary one")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        if options.ranks == 1:
            work(0, options, Path(folder))
        else:
            mp.spawn(work, (options, Path(folder)), nprocs=options.ranks)


def work(rank: int, options: argparse.Namespace, folder: Path) -> None:
    cuda = torch.cuda.is_available()
    if not cuda:
        torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    if options.ranks > 1:
        dist.init_process_group(
            "gloo", store=dist.FileStore(str(folder / "store"), options.ranks), rank=rank, world_size=options.ranks
        )
    bench = Bench(rank, options, folder)
    for at in range(options.rounds + 1):
        bench.round(at)
        if at == 0:
            bench.seconds.clear()  # it warms up
    if rank == 0:
        bench.report()


class Bench:
    """One rank of it. Times are those of the slowest rank."""

    def __init__(self, rank: int, options: argparse.Namespace, folder: Path) -> None:
        self.rank, self.options, self.folder = rank, options, folder
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.layers = SIZES[options.size]
        self.engine = self.make()
        self.seconds: defaultdict[str, list[float]] = defaultdict(list)
        self.steps = 0
        for _ in range(3):
            self.step()
        self.nbytes = 0

    def make(self) -> Any:
        options = self.options
        torch.manual_seed(0)
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": options.batch,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
            "zero_optimization": {"stage": options.stage},
        }
        if options.precision != "fp32":
            config[options.precision] = {"enabled": True}
        return naught.initialize(model=make_model(*self.layers).to(self.device), config=config)[0]

    def round(self, at: int) -> None:
        here = self.folder / f"round{at}"
        if self.rank == 0:
            here.mkdir()
        meet()
        self.time("save", lambda: self.engine.save_checkpoint(here, tag="now"))
        shards = sorted((here / "now").glob("*.safetensors"))
        self.nbytes = sum(path.stat().st_size for path in shards)
        mine = shards[self.rank].stat().st_size
        for name, write in WAYS.items():
            (here / f"raw{self.rank}").unlink(missing_ok=True)
            self.time(f"write {name}", lambda write=write: write(here / f"raw{self.rank}", mine))
        for path in (here / f"raw{self.rank}", *shards):
            drop(path)
        self.time("read", lambda: read_plainly(here / f"raw{self.rank}"))
        fresh = self.make()
        self.time("load", lambda: fresh.load_checkpoint(here, tag="now"))
        fresh.destroy()
        tensors = {f"{at}": kept for at, kept in enumerate(torch.empty(mine // 4 // 12) for _ in range(12))}
        self.time("torch.save", lambda: torch_save(tensors, here / f"torch{self.rank}"))
        drop(here / f"torch{self.rank}")
        self.time("torch.load", lambda: torch.load(here / f"torch{self.rank}", weights_only=True))
        self.beside(here)
        meet()
        if self.rank == 0:
            shutil.rmtree(here)
        meet()

    def beside(self, here: Path) -> None:
        """Steps without a save, and as many with one under way."""
        count = 6
        for _ in range(2):
            self.step()
        plain = self.clock(lambda: [self.step() for _ in range(count)])
        held = Held(self.engine)
        start = time.perf_counter()
        self.engine.save_checkpoint(here, tag="beside", asynchronous=True)
        called = time.perf_counter() - start
        steps = 0
        while self.engine.background.running is not None or steps < count:
            self.step()
            steps += 1
        took = time.perf_counter() - start
        each = plain / count
        self.seconds["step"].append(slowest(each))
        held.end()
        self.seconds["stall"].append(slowest(called + held.seconds))
        self.seconds["stall in the call"].append(slowest(called))
        self.seconds["slowdown"].append(slowest(took - steps * each))

    def step(self) -> None:
        seed = torch.Generator().manual_seed(self.steps)
        ids = torch.randint(self.layers[3], (self.options.batch, self.options.length), generator=seed).to(self.device)
        self.engine.backward(self.engine(ids))
        self.engine.step()
        if self.device == "cuda":
            torch.cuda.synchronize()
        self.steps += 1

    def time(self, name: str, act: Callable[[], object]) -> None:
        self.seconds[name].append(self.clock(act))

    def clock(self, act: Callable[[], object]) -> float:
        meet()
        start = time.perf_counter()
        act()
        return slowest(time.perf_counter() - start)

    def report(self) -> None:
        seconds = self.seconds
        ways = {name: statistics.median(found) for name, found in seconds.items() if name.startswith("write ")}
        fastest = [min(times) for times in zip(*(seconds[name] for name in ways), strict=True)]
        what = self.options
        print(f"{what.size}, {what.ranks} ranks on {self.device}, stage {what.stage}, {self.nbytes / 1e6:.0f} MB")
        for name, limit in (
            ("save", fastest),
            ("torch.save", fastest),
            ("load", seconds["read"]),
            ("torch.load", seconds["read"]),
        ):
            ratios = [best / mine for mine, best in zip(seconds[name], limit, strict=True)]
            print(row(name, ratios, seconds[name], self.nbytes))
        for name in (*ways, "read"):
            print(json.dumps({"disk": name, "MB/s": round(self.nbytes / 1e6 / statistics.median(seconds[name]))}))
        for name in ("stall", "stall in the call", "slowdown"):
            shares = [lost / step for lost, step in zip(seconds[name], seconds["step"], strict=True)]
            print(
                json.dumps(
                    {
                        "asynchronous": name,
                        "of a step": round(statistics.median(shares), 3),
                        "range": [round(min(shares), 3), round(max(shares), 3)],
                        "ms": round(1000 * statistics.median(seconds[name]), 1),
                        "step ms": round(1000 * statistics.median(seconds["step"]), 1),
                    }
                )
            )


def row(name: str, ratios: list[float], seconds: list[float], nbytes: int) -> str:
    told = {
        "what": name,
        "of the disk's limit": round(statistics.median(ratios), 3),
        "range": [round(min(ratios), 3), round(max(ratios), 3)],
        "MB/s": round(nbytes / 1e6 / statistics.median(seconds)),
    }
    return json.dumps(told)


class Held:
    """How long updates waited for a snapshot."""

    def __init__(self, engine: Any) -> None:
        self.seconds, self.background = 0.0, engine.background
        settle = engine.background.settle

        def timed() -> None:
            start = time.perf_counter()
            settle()
            self.seconds += time.perf_counter() - start

        engine.background.settle = timed

    def end(self) -> None:
        del self.background.settle  # the class's own is there again


def meet() -> None:
    if dist.is_initialized():
        dist.barrier()


def slowest(seconds: float) -> float:
    told = torch.tensor([seconds], dtype=torch.float64)
    if dist.is_initialized():
        dist.all_reduce(told, dist.ReduceOp.MAX)
    return float(told)


# --- what a disk can do ---------------------------------------------------------------------------------------------------


def write_buffered(path: Path, nbytes: int, *, early: bool = False) -> None:
    block = memoryview(RANDOM)
    handle = os.open(path, os.O_WRONLY | os.O_CREAT)
    os.posix_fallocate(handle, 0, nbytes)
    for start in range(0, nbytes, BLOCK):
        os.write(handle, block[: nbytes - start])
        if early:
            os.posix_fadvise(handle, 0, start, os.POSIX_FADV_DONTNEED)
    os.fsync(handle)
    os.close(handle)


def write_early(path: Path, nbytes: int) -> None:
    write_buffered(path, nbytes, early=True)


def write_around(path: Path, nbytes: int) -> None:
    block = RANDOM
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_DIRECT)
    os.posix_fallocate(handle, 0, nbytes)
    for start in range(0, nbytes, BLOCK):
        os.write(handle, memoryview(block)[: -(-(min(BLOCK, nbytes - start)) // 4096) * 4096])
    os.fsync(handle)
    os.close(handle)


WAYS: dict[str, Callable[[Path, int], None]] = {"buffered": write_buffered, "early": write_early, "around": write_around}


def drop(path: Path) -> None:
    """Have the system forget what it keeps of a file."""
    handle = os.open(path, os.O_RDONLY)
    os.fsync(handle)
    os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(handle)


def read_plainly(path: Path) -> None:
    block = bytearray(BLOCK)
    handle = os.open(path, os.O_RDONLY)
    at = 0
    while count := os.preadv(handle, [block], at):
        at += count
    os.close(handle)


def torch_save(tensors: dict[str, torch.Tensor], path: Path) -> None:
    with path.open("wb") as file:
        torch.save(tensors, file)
        file.flush()
        os.fsync(file.fileno())


if __name__ == "__main__":
    main()
