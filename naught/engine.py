"""Engine: what the user holds. Wires a model's units, hooks and schedule together and takes the steps."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

import naught
from naught.agreement import agree, facts_of
from naught.comm import Group, Ledger
from naught.config import Batch, Config, Effect, Source, check, derive_batch, keys, load, placement_of, to_document
from naught.describe import describe
from naught.errors import ModelError, UsageError
from naught.flat import Meter
from naught.hooks import Hooks
from naught.placement import Placement, Tier
from naught.plan import Budgets, Moment, Pass
from naught.rules import AdamW, Rule, Sgd
from naught.schedule import Schedule
from naught.unit import Segment, Unit
from naught.units import UnitRules, find_units, segments

__all__ = ["Engine", "Optimizer", "initialize"]

_LOG = logging.getLogger("naught")


def initialize(*, model: nn.Module, config: Source) -> tuple[Engine, Optimizer, None, None]:
    """Split a model as the configuration says. The process group, if there is one, must exist already.

    Returns the engine, its optimizer, and places for a data loader and a scheduler, which are not there yet.
    """
    loaded = load(config)
    placement = placement_of(loaded)
    _refuse_what_is_not_there_yet(loaded, placement)
    group = Group(Ledger())
    agree(group, facts_of(model, loaded, naught.__version__))
    batch = derive_batch(loaded, group.size)
    rule, hyper = _rule(loaded)
    meter = Meter()
    leaf = loaded.zero_optimization.leaf_module
    rules = UnitRules(frozenset(leaf.classes), frozenset(leaf.names), frozenset(leaf.name_suffixes))
    units = _build_units(model, placement, group, meter, rules)
    schedule = Schedule(units, group, _budgets(loaded, units))
    engine = Engine(model, loaded, batch, schedule, Optimizer(rule, hyper), meter)
    return engine, engine.optimizer, None, None


# Keys that this engine heeds, and keys that only tune: the result is the same without them.
_HEEDED = (
    "train_",
    "gradient_accumulation_steps",
    "gradient_clipping",
    "optimizer.",
    "zero_optimization.stage",
    "zero_optimization.overlap_comm",
    "zero_optimization.leaf_module.",
    "zero_optimization.stage3_prefetch_bucket_size",
    "zero_optimization.stage3_max_live_parameters",
    "naught.nvme_path",
)
_TUNING = ("zero_optimization.", "aio.", "checkpoint.", "steps_per_print", "timers.", "dataloader_drop_last")


def _refuse_what_is_not_there_yet(config: Config, placement: Placement) -> None:
    """A key that would change the result or ask for more than there is yet is refused, not ignored."""
    if config.auto:
        raise UsageError(f'"auto" is left in {", ".join(sorted(config.auto))}', fix="give values; nobody has filled them in")
    places = (placement.param, placement.grad, placement.optim)
    if any(place.tier is not Tier.DEVICE for place in places):
        raise UsageError("the engine keeps all states on the device so far", fix="remove offload_optimizer and offload_param")
    if config.fp16.enabled or config.bf16.enabled or config.torch_autocast.enabled:
        raise UsageError("the engine trains in fp32 so far", fix="remove fp16, bf16 and torch_autocast")
    if config.scheduler is not None:
        raise UsageError("the engine takes no scheduler so far", fix="set the learning rate in optimizer.param_groups")
    asked = [note.path for note in check(to_document(config)).notes if note.effect is Effect.HONOURED]
    defaults = {keys.plain_path(entry.path): entry.info.default for entry in keys.entries()}
    unheeded = [path for path in asked if not _is_heeded(path) and _value(config, path) != defaults.get(path)]
    wanted = [path for path in unheeded if not path.startswith(_TUNING)]
    if wanted:
        raise UsageError(
            f"the engine cannot do this yet: {', '.join(wanted)}", fix="remove the keys, or wait for the release that can"
        )
    if unheeded:
        _LOG.warning("no effect yet, but on memory and speed only: %s", ", ".join(unheeded))


def _is_heeded(path: str) -> bool:
    return any(path.startswith(key) if key.endswith(("_", ".")) else path == key for key in _HEEDED)


def _value(config: Config, path: str) -> Any:
    value: Any = config
    for name in path.split("."):
        value = getattr(value, name)
    return value


def _rule(config: Config) -> tuple[Rule, dict[str, Any]]:
    kinds: dict[str, type[Rule]] = {"AdamW": AdamW, "Adam": AdamW, "SGD": Sgd}
    if config.optimizer is None:
        raise UsageError("the configuration names no optimizer", fix='add "optimizer": {"type": "AdamW", ...}')
    hyper = config.optimizer.params.model_dump()
    if config.optimizer.type not in kinds or not hyper.get("adam_w_mode", True):
        raise UsageError(f"the engine has AdamW and SGD so far, not {config.optimizer.type}")
    return kinds[config.optimizer.type](), hyper


def _build_units(model: nn.Module, placement: Placement, group: Group, meter: Meter, rules: UnitRules) -> dict[str, Unit]:
    params = dict(model.named_parameters())
    other = next((name for name, param in params.items() if param.requires_grad and param.dtype != torch.float32), None)
    if other is not None:
        raise UsageError(f'the engine trains fp32 so far, and "{other}" is {params[other].dtype}', fix="call model.float() first")
    units: dict[str, Unit] = {}
    for spec in find_units(describe(model), rules):
        parts = [
            Segment([params[slot.name] for slot in layout.slots], layout, placement, group, meter)
            for layout in segments(spec, world=group.size).values()
        ]
        units[spec.name] = Unit(spec.name, parts, placement)
    if not any(unit.trained for unit in units.values()):
        raise ModelError("the model has no parameters to train")
    return units


def _budgets(config: Config, units: dict[str, Unit]) -> Budgets:
    """Budgets in elements become bytes, rounded up so that one unit can always be fetched ahead."""
    zero = config.zero_optimization
    sizes = [unit.sizes().weights for unit in units.values()]
    largest = max(sizes)
    ahead = 0 if zero.overlap_comm is False else zero.stage3_prefetch_bucket_size * 4
    live = max(zero.stage3_max_live_parameters * 4, 2 * largest)
    return Budgets(
        ahead_bytes=largest + max(ahead, largest) if ahead else 0,
        live_bytes=live,
        overlap_reduce=zero.overlap_comm is not False,
    )


class Optimizer:
    """The update rule and its hyperparameters, in the shape of a torch optimizer."""

    def __init__(self, rule: Rule, hyper: dict[str, Any]) -> None:
        self.rule = rule
        self.param_groups: list[dict[str, Any]] = [hyper]
        self.engine: Engine | None = None

    def step(self) -> None:
        assert self.engine is not None
        self.engine.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Nothing to do: a step lets go of its gradients."""
        del set_to_none


class Engine(nn.Module):
    """A model that trains as its configuration says. Call it, `backward` its loss, and `step`."""

    def __init__(
        self, module: nn.Module, config: Config, batch: Batch, schedule: Schedule, optimizer: Optimizer, meter: Meter
    ) -> None:
        super().__init__()
        self.module, self.config, self.batch, self.schedule, self.optimizer, self.meter = (
            module, config, batch, schedule, optimizer, meter,
        )  # fmt: skip
        optimizer.engine = self
        self.micro_steps = self.global_steps = self.skipped_steps = 0
        self.grad_norm: float | None = None
        self.held_after: dict[str, Counter[str]] = {}
        self._synced = True
        self._lent = False
        self._homes = {
            param: (segment, index)
            for unit in schedule.units.values()
            for segment in unit.segments
            for index, param in enumerate(segment.params)
        }
        modules = dict(module.named_modules())
        self.hooks = Hooks(module, {name: modules[name] for name in schedule.units}, self)

    # --- what the user calls ---

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return self.module(*args, **kwargs)
        except BaseException:
            self._abort()
            raise

    def backward(self, loss: Tensor) -> None:
        """Compute gradients of a micro-batch; the loss is divided by the number of micro-batches in a step."""
        try:
            torch.autograd.backward(loss / self.batch.accumulation)
        except BaseException:
            self._abort()
            raise
        self._close()

    def step(self) -> None:
        """Update the weights if this micro-batch completes a step."""
        self._close()
        boundary = self.is_gradient_accumulation_boundary()
        self.micro_steps += 1
        if boundary:
            self._phase("step")
            self._update()
            self.held_after["step"] = Counter(self.meter.live)
            self._phase("idle")

    def is_gradient_accumulation_boundary(self) -> bool:
        return (self.micro_steps + 1) % self.batch.accumulation == 0

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside keep whole gradients to themselves; split ones are summed as always."""
        before, self._synced = self._synced, False
        try:
            yield
        finally:
            self._close()
            self._synced = before

    def report(self) -> dict[str, Any]:
        """What this rank has sent and holds: bytes by collective, unit and phase; bytes now, at the peak, and after each
        phase of the last step, by category."""
        ledger = self.schedule.group.ledger
        return {
            "sent": {f"{name} {phase} {unit or 'root'}": nbytes for (name, unit, phase), nbytes in sorted(ledger.sent.items())},
            "live": dict(self.meter.live),
            "peak": dict(self.meter.peak),
            "after": {phase: dict(held) for phase, held in self.held_after.items()},
            "steps": self.global_steps,
            "skipped": self.skipped_steps,
        }

    def get_global_grad_norm(self) -> float | None:
        return self.grad_norm

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """While open, every parameter can be read and written. All ranks must open it, and write the same."""
        if self._lent:
            yield  # within itself it is open already
            return
        self._close()
        segments = []
        for unit in self.schedule.units.values():
            unit.gather()
            unit.ready()
            segments += unit.segments
            for segment in unit.segments:
                segment.lend()
            unit.present = not unit.placement.param.split
        self._lent = True
        try:
            yield
        finally:
            self._lent = False
            for segment in segments:
                segment.take_back()

    def destroy(self) -> None:
        """Give the model whole weights of its own again, and let go of everything."""
        self._close()
        for unit in self.schedule.units.values():
            unit.gather()
            unit.ready()
            for segment in unit.segments:
                segment.close()
        self.hooks.remove()
        self._homes.clear()

    # --- what the hooks say ---

    def begin(self) -> None:
        if self._lent:
            raise UsageError("the model was called inside engine.gathered()", fix="call it outside")
        running = self.schedule.current
        if running is not None and (running.seen_backward or not running.training):
            self._close()
        if self.schedule.current is None:
            last = self._synced and self.is_gradient_accumulation_boundary()
            self.schedule.open(training=torch.is_grad_enabled(), which=Pass(last=last))
            self._phase("forward")

    def end(self) -> None:
        running = self.schedule.current
        self.held_after["forward"] = Counter(self.meter.live)
        if running is not None and not running.training:
            self._close()

    def happened(self, moment: Moment, unit: str) -> None:
        if self.schedule.current is None:
            self.begin()
        if moment is Moment.GRAD:
            self._phase("backward")
        self.schedule.happened(moment, unit)

    def collect(self, param: nn.Parameter) -> None:
        segment, index = self._homes[param]
        assert param.grad is not None
        if param.grad.layout is not torch.strided:
            raise UsageError(f'the gradient of "{segment.layout.slots[index].name}" is sparse', fix="set sparse=False")
        if self.schedule.current is None:
            self.begin()
        assert self.schedule.current is not None
        self.schedule.current.seen_backward = True  # also where no unit was called by its name
        segment.grads.collect(index, param.grad)
        segment.used[index] = True
        param.grad = None

    def exported(self) -> None:
        """The model's state_dict is being taken."""
        released = [unit.name for unit in self.schedule.units.values() if unit.placement.param.split]
        if released and not self._lent:
            raise UsageError("the parameters are split over the ranks", fix="take the state_dict inside engine.gathered()")

    def in_backward(self, unit: str) -> bool:
        running = self.schedule.current
        return running is not None and unit in running.backward

    # --- a step ---

    def _phase(self, name: str) -> None:
        self.schedule.group.ledger.phase = name

    def _close(self) -> None:
        running = self.schedule.current
        self.schedule.close()
        self.hooks.forget()
        if running is not None and running.seen_backward:
            self.held_after["backward"] = Counter(self.meter.live)
        self._phase("idle")

    def _abort(self) -> None:
        """An exception ends not only its pass but the whole step: part of a sum is no gradient."""
        self.schedule.abort()
        self.hooks.forget()
        self.micro_steps -= self.micro_steps % self.batch.accumulation
        for segment in self._trained():
            segment.forget()
        self._phase("idle")

    def _trained(self) -> list[Segment]:
        return [segment for unit in self.schedule.units.values() for segment in unit.segments if segment.trained]

    def _update(self) -> None:
        """One exchange decides for all ranks: the norm, whether it is finite, and which parameters were used."""
        trained = self._trained()
        units = list(self.schedule.units.values())
        used = [float(flag) for segment in trained for flag in segment.used]
        used += [float(not unit.entered) for unit in units]
        squares = sum(_square_sum(segment) for segment in trained)
        rows = self.schedule.group.exchange(torch.tensor([squares, *used], dtype=torch.float64))
        total = 0.0
        for row in rows[:, 0].tolist():
            total += row
        self.grad_norm = math.sqrt(total) if math.isfinite(total) and total >= 0 else math.nan
        if not math.isfinite(self.grad_norm):
            self.skipped_steps += 1
            _LOG.warning(
                "step %d was skipped on all ranks: its gradient norm is not finite. At stage 3 a parameter that is used "
                "outside of its own module's forward reads as NaN; name a module around both in leaf_module",
                self.global_steps + 1,
            )
            for segment in trained:
                segment.forget()
            return
        flags = iter((rows[:, 1:].amax(0) > 0).tolist())
        for unit in units:
            self._update_unit(unit, flags, _clip(self.grad_norm, self.config.gradient_clipping))
        for unit, uncalled in zip(units, flags, strict=True):
            if uncalled and not unit.placement.param.split:
                unit.gather()  # nobody will say when it is used next, so its weights are made fresh now
                unit.ready()
            unit.entered = False
        self.global_steps += 1

    def _update_unit(self, unit: Unit, flags: Iterator[bool], coefficient: float) -> None:
        changed = False
        for segment in unit.segments:
            if segment.trained:
                used: Sequence[bool] = [next(flags) for _ in segment.used]
                hyper = self.optimizer.param_groups[0]
                changed |= segment.update(self.optimizer.rule, used, hyper, coefficient)
                segment.forget()
        if changed and unit.placement.optim.split and not unit.placement.param.split:
            unit.present = False  # only the owners' slices are new: the next use gathers them


def _square_sum(segment: Segment) -> float:
    """The sum of squares of this rank's slice, in double precision and in fixed blocks: the same at every stage."""
    total = segment.grads.sum()
    if total is None:
        return 0.0
    mine = total if segment.placement.optim.split else total[segment.grads.mine]
    squares = 0.0
    for block in torch.split(mine, 1 << 16):
        squares += float(block.double().square_().sum())
    return squares


def _clip(norm: float, most: float) -> float:
    """As torch.nn.utils.clip_grad_norm_ has it: never above one."""
    return min(1.0, most / (norm + 1e-6)) if most else 1.0
