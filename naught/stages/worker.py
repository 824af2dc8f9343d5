"""Worker: one rank of one of the six runs. Trains, and says what was allocated after each phase and how long it took."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
import torch._dynamo
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from naught import comm
from naught.accelerator import get_accelerator
from naught.comm import Group, Ledger, get_local_rank
from naught.config.resolving import resolve
from naught.data import RepeatingLoader, loader_of
from naught.devices import allocated_bytes, forget_peak, peak_bytes
from naught.engine import Engine
from naught.stages.runs import DDP, PHASES
from naught.start import initialize
from naught.trainer.corpus import open_corpus, prepare_corpus
from naught.trainer.failing import failure_of, leave
from naught.trainer.models import build_model, loss_of
from naught.trainer.windows import Windows

__all__ = ["Bench", "Task", "work"]

_HYPER: dict[str, Any] = {"lr": 1e-3, "betas": [0.9, 0.95], "weight_decay": 0.1}


class Bench(NamedTuple):
    """On what the runs are taken."""

    model: str
    micro: int
    seq: int
    nproc: int
    warmup: int
    iterations: int
    memory_steps: Sequence[int]
    deterministic: bool


class Task(NamedTuple):
    """What a worker is to do, as it is sent to it."""

    name: str
    config: Mapping[str, Any]
    out: str
    bench: Bench


def work(task: Task) -> None:
    """Train as one rank; rank 0 writes what was found."""
    accelerator = get_accelerator()
    if task.bench.deterministic:
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
        torch.use_deterministic_algorithms(True)
    comm.init_distributed("gloo" if accelerator.device_name() != "cpu" and comm.shares_device() else None)
    group = Group(Ledger(), torch.device("cpu"), reduce_numel=1)
    device = torch.device(accelerator.current_device_name())
    batches, model = _material(task, group, device)
    _warm_up(model, task, device)
    base = (allocated_bytes(device) or 0) - _bytes_of(model.parameters())
    forget_peak(device)
    trained: _Trained = _Plain(model, group) if task.name == DDP else _Split(model, task)
    probe = _Probe(device, base, task.bench.memory_steps)
    losses, seconds = _train(task, trained, batches, probe, group)
    if group.rank == 0:
        peak = peak_bytes(device)
        found = {
            "memory": probe.rows,
            "peak": (peak or trained.most() or max(probe.all)) - base,
            "held": trained.held(),
            "sent": trained.sent(len(losses)),
            "seconds": seconds,
            "losses": losses,
        }
        Path(task.out).write_text(json.dumps(found), encoding="utf-8")
    group.meet()
    comm.shut_down()


def _material(task: Task, group: Group, device: torch.device) -> tuple[Iterator[Tensor], nn.Module]:
    """The same rows and the same weights for every run."""
    recipe = resolve({"model": {"name": task.bench.model}, "data": {"seq": task.bench.seq}}, []).recipe
    if group.rank == 0:
        prepare_corpus(recipe)
    group.meet()
    corpus = open_corpus(recipe, prepare_corpus(recipe))
    loader = loader_of(
        Windows(corpus.train, task.bench.seq), batch_size=task.bench.micro, rank=group.rank, world=group.size, drop_last=True
    )
    return RepeatingLoader(loader), build_model(recipe, corpus).to(device)


def _warm_up(model: nn.Module, task: Task, device: torch.device) -> None:
    """Kernels keep scratch memory from their first use on, under whichever system: it is not training's."""
    ids = torch.zeros(task.bench.micro, task.bench.seq, dtype=torch.int64, device=device)
    torch.autograd.backward(loss_of(model(input_ids=ids, labels=ids)))
    model.zero_grad(set_to_none=True)


def _train(task: Task, trained: _Trained, batches: Iterator[Tensor], probe: _Probe, group: Group) -> tuple[list[float], float]:
    """The mean losses of all steps, and the seconds of those that are timed."""
    losses: list[Tensor] = []
    began = ended = 0.0
    for step in range(max(task.bench.warmup + task.bench.iterations, *(step + 1 for step in task.bench.memory_steps))):
        if step == task.bench.warmup:
            began = _now(group)
        probe.step = step
        losses.append(_step(trained, next(batches).to(probe.device), probe))
        if step == task.bench.warmup + task.bench.iterations - 1:
            ended = _now(group)
    means = group.exchange(torch.stack(losses).double().cpu()).mean(dim=0)
    return means.tolist(), ended - began


def _step(trained: _Trained, ids: Tensor, probe: _Probe) -> Tensor:
    loss = loss_of(trained.forward(input_ids=ids, labels=ids))
    probe.after(_FORWARD)
    trained.backward(loss)
    probe.after(_BACKWARD)
    trained.update()
    probe.after(_STEP)
    return loss.detach()


def _now(group: Group) -> float:
    """When all ranks and their devices have come so far."""
    get_accelerator().synchronize()
    group.meet()
    return time.perf_counter()


class _Probe:
    """Remembers what is allocated after the phases of some steps."""

    def __init__(self, device: torch.device, base: int, steps: Sequence[int]) -> None:
        self.device, self.base, self.steps = device, base, frozenset(steps)
        self.step = 0
        self.rows: list[dict[str, int]] = []
        self.all: list[int] = [0]

    def after(self, phase: str) -> None:
        if self.step in self.steps:
            nbytes = (allocated_bytes(self.device) or 0) - self.base
            self.all.append(nbytes + self.base)
            if phase == _FORWARD:
                self.rows.append({"step": self.step})
            self.rows[-1][phase] = nbytes


class _Trained(Protocol):
    """A model that takes steps."""

    def forward(self, **inputs: Tensor) -> object: ...

    def backward(self, loss: Tensor) -> None: ...

    def update(self) -> None: ...

    def held(self) -> dict[str, int]:
        """Bytes of a rank after a backward, by kind."""

    def sent(self, steps: int) -> dict[str, int]:
        """Bytes that a rank sends in a step, by collective."""

    def most(self) -> int | None:
        """The most that the process has held, where that is known between phases too."""


class _Split:
    """Under our engine, as a configuration says."""

    def __init__(self, model: nn.Module, task: Task) -> None:
        whole: dict[str, Any] = {"train_micro_batch_size_per_gpu": task.bench.micro, "gradient_clipping": 0.0}
        whole |= {"optimizer": {"type": "AdamW", "params": _HYPER}}
        self.engine: Engine = initialize(model=model, config=whole | dict(task.config))[0]

    def forward(self, **inputs: Tensor) -> object:
        return self.engine(**inputs)

    def backward(self, loss: Tensor) -> None:
        self.engine.backward(loss)

    def update(self) -> None:
        self.engine.step()

    def held(self) -> dict[str, int]:
        kinds = {"weights": ("weights",), "gradients": ("whole gradients", "owned gradients"), "states": ("states", "masters")}
        after = self.engine.report()["after"]["backward"]
        return {kind: sum(after.get(name, 0) for name in names) for kind, names in kinds.items()}

    def sent(self, steps: int) -> dict[str, int]:
        ledger = self.engine.watch.ledger
        return {name: ledger.total(name) // steps for name in ("all-gather", "reduce-scatter")}

    def most(self) -> int | None:
        return self.engine.meter.most


class _Plain:
    """Under torch's own DDP."""

    def __init__(self, model: nn.Module, group: Group) -> None:
        self.model, self.group = DistributedDataParallel(model, gradient_as_bucket_view=True), group
        self.optimizer = torch.optim.AdamW(model.parameters(), **{**_HYPER, "betas": tuple(_HYPER["betas"])}, fused=True)

    def forward(self, **inputs: Tensor) -> object:
        return self.model(**inputs)

    def backward(self, loss: Tensor) -> None:
        torch.autograd.backward(loss)

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def held(self) -> dict[str, int]:
        states = [state for kept in self.optimizer.state.values() for state in kept.values() if state.numel() > 1]
        weights = _bytes_of(self.model.parameters())
        return {"weights": weights, "gradients": weights, "states": _bytes_of(states)}

    def sent(self, steps: int) -> dict[str, int]:
        del steps
        return {"all-reduce": 2 * _bytes_of(self.model.parameters()) * (self.group.size - 1) // self.group.size}

    def most(self) -> int | None:
        return None


_FORWARD, _BACKWARD, _STEP = PHASES


def _bytes_of(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


if __name__ == "__main__":
    try:
        asked = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
        work(Task(**asked | {"bench": Bench(**asked["bench"])}))
    except Exception as error:
        leave(failure_of(error, get_local_rank()))
        os._exit(1)  # others may have died: the end of this process might wait for them
