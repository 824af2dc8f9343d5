"""Simulation: the engine itself as one rank of many that are not there, on tensors without contents: what it would send, hold and
move, step by step, before there is a cluster."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from naught.claims import let_go
from naught.comm import World, imagine
from naught.config import Source, load, to_document
from naught.engine import Engine, engines
from naught.errors import ModelError, UsageError
from naught.fused_attention import fused_attention
from naught.live_bytes import Activations, activations_of
from naught.pacing import Course, Work
from naught.placement import Tier
from naught.spill import Stored
from naught.start import initialize
from naught.unit import Unit
from naught.unit_flops import UnitFlops, flops_of_units, module_flops

__all__ = ["Simulated", "simulate"]

Sizes = Mapping[str, int]


@dataclass(frozen=True)
class Simulated:
    """What one rank does in a step: bytes that it sends by collective, bytes that go between its tiers, the most that it holds by
    what it is, and its course: its plan, and what each unit takes. Weights that rest are counted with what it holds; activations
    on the device by themselves."""

    ranks: int
    numel: int
    sent: Sizes
    moved: Sizes
    peak: Sizes
    activations: Activations
    planned: Sizes
    course: Course

    @property
    def units(self) -> int:
        return len(self.course.sizes)

    @property
    def verbs(self) -> Sizes:
        """How often each is in the plan."""
        return Counter(str(step.verb) for step in self.course.steps)

    @property
    def flops(self) -> Mapping[str, float]:
        """Of each unit's forward."""
        return {name: work.forward_flops for name, work in self.course.works.items()}


def simulate(model: nn.Module, config: Source, world: World, loss_of: Callable[[Callable[..., Any]], Tensor]) -> Simulated:
    """Take two steps with a model on the meta device; the second one is by its plan. `loss_of` calls what it is given as a script
    calls its engine, with tensors of the meta device, and returns the loss."""
    _refuse(model, world)
    apart = world.machine is None or not world.machine.unified
    with fused_attention(apart=apart):
        counts = module_flops(model, loss_of)
    with imagine(world), _borrowing(model), fused_attention(apart=apart):
        engine = initialize(model=model, config=_unobserved(config))[0]
        before: dict[str, int] = {}
        for step in range(2):
            for _ in range(engine.gradient_accumulation_steps()):
                engine.backward(loss_of(engine))
                engine.step()
            for unit in engine.schedule.units.values():  # an update on the host goes on when step() has returned
                for segment in unit.segments:
                    segment.settle()
            if step == 0:
                before = _flows(engine.report())
        report, planned = engine.report(), engine.planned()
        flows = {name: nbytes - before.get(name, 0) for name, nbytes in _flows(report).items()}
        course = _course(engine, flops_of_units(counts, list(engine.schedule.units)), flows)
        engine.passes.remove()  # from here on the model is alone: what it makes is all that is made
        return Simulated(
            ranks=world.ranks,
            numel=sum(param.numel() for param in model.parameters()),
            sent={name: nbytes for name, nbytes in flows.items() if name in _COLLECTIVES},
            moved={name: nbytes for name, nbytes in flows.items() if name not in _COLLECTIVES},
            peak=report["peak"],
            activations=activations_of(model.parameters(), lambda: loss_of(engine)),
            planned=planned,
            course=course,
        )


def _unobserved(config: Source) -> dict[str, Any]:
    """There are no numbers to be seen, and nothing is written anywhere."""
    sinks = ("tensorboard", "csv_monitor", "wandb", "flops_profiler")
    return {key: value for key, value in to_document(load(config)).items() if key not in sinks}


def _course(engine: Engine, flops: Mapping[str, UnitFlops], flows: Sizes) -> Course:
    """The passes of a step one behind the other. Activations that go away are as large for each unit that computes: which tensor
    is whose nobody knows."""
    units, passes = engine.schedule.units, engine.gradient_accumulation_steps()
    inner = [name for name in units if name and flops[name].forward] or [name for name in units if flops[name].forward]
    away = flows.get("activations to the host", 0) // passes // max(1, len(inner))
    kept = engine.report()["peak"]
    return Course(
        steps=(*engine.schedule.steps_of(last=False) * (passes - 1), *engine.schedule.steps_of(last=True)),
        placements={name: unit.placement for name, unit in units.items()},
        sizes={name: unit.sizes() for name, unit in units.items()},
        works={name: _work(unit, flops[name], away if name in inner else 0) for name, unit in units.items()},
        rest=next((tier for tier in (Tier.DISK, Tier.HOST) if kept.get(f"{tier} activations")), Tier.DEVICE),
    )


def _work(unit: Unit, flops: UnitFlops, away_bytes: int) -> Work:
    masters = sum(4 * segment.kept.owned.numel for segment in unit.trained if segment.remote)
    own = sum(segment.weights.shard_bytes for segment in unit.segments)
    held = [held for segment in unit.trained for held in (segment.kept.master, *segment.kept.held.values())]
    return Work(
        forward_flops=flops.forward,
        backward_flops=flops.backward,
        raised=masters if unit.placement.param.tier is Tier.DEVICE or not own else own,  # shards of none are made of masters
        fetched=sum(segment.target.nbytes for segment in unit.trained if segment.is_brought_up),
        updated_numel=sum(segment.kept.owned.numel for segment in unit.trained),
        state_bytes=sum(state.numel * state.dtype.itemsize for state in held if isinstance(state, Stored)),
        away_bytes=away_bytes,
        lazy=unit.lazy,
    )


@contextmanager
def _borrowing(model: nn.Module) -> Iterator[None]:
    """Others may have the model afterwards, also where a step of it has failed."""
    try:
        yield
    except BaseException:
        for engine in {engines.owner_of(param) for param in model.parameters()} - {None}:
            assert engine is not None
            engine.passes.remove()
        raise
    finally:
        let_go(model)


_COLLECTIVES = ("all-gather", "reduce-scatter", "broadcast")


def _flows(report: Mapping[str, Any]) -> dict[str, int]:
    """Bytes so far, by collective and by where they went."""
    found: Counter[str] = Counter()
    for name, nbytes in report["sent"].items():
        found[name.partition(" ")[0]] += nbytes
    return dict(found) | dict(report["moved"])


def _refuse(model: nn.Module, world: World) -> None:
    if not 0 <= world.rank < world.ranks:
        raise UsageError(f"rank {world.rank} is none of {world.ranks}", fix=f"give a rank from 0 to {world.ranks - 1}")
    machine = world.machine
    if machine is not None and machine.ranks != world.ranks:
        raise UsageError(
            f"the world has {world.ranks} ranks and its machine {machine.ranks}", fix=f"give Machine(ranks={world.ranks}, ...)"
        )
    if any(not param.is_meta for param in model.parameters()):
        raise ModelError("the model has contents, and a simulation has none", fix='build it inside of torch.device("meta")')
