"""Start: from the arguments of a DeepSpeed script to an engine. Everything that can be wrong is said on every rank."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

import naught
from naught import comm
from naught.accelerator import get_accelerator
from naught.accumulation import Accumulation
from naught.activation_rests import AsItIs, Split
from naught.agreement import agree, facts_of
from naught.born import splits
from naught.build import Surroundings, budgets_of, build_units, limits_of
from naught.claims import refuse_claimed
from naught.comm import Among, Group, Ledger, Lineup, Mean, lineup_of, local_of, make_group, standing
from naught.config import Batch, Config, Source, derive_batch, load, refuse_auto, refuse_batch
from naught.data import Loader, loader_of
from naught.devices import device_for, limit_memory
from naught.dividing import divide, replace_in_groups
from naught.early import Early
from naught.engine import Engine
from naught.errors import ModelError, UsageError
from naught.freed_pages import keep_freed_pages
from naught.limits import job_of, limits_here
from naught.local_parts import has_dtensors, localize, put_back, refuse_parts
from naught.membership import Membership
from naught.observing import Observer
from naught.optimizer import Groups, Hand, Optimizer, groups_of, optimizer_of
from naught.passes import Passes
from naught.precision import loss_scale_of, precision_of
from naught.rates import RateSchedule
from naught.rules import RULES
from naught.saved import Saves
from naught.saves.background import Background
from naught.schedule import Schedule
from naught.seats import find_seat
from naught.spill import Stored
from naught.stepping import Scheduler, Stepping
from naught.tiers import activation_rest
from naught.watch import Watch

__all__ = ["Started", "initialize"]

_LOG = logging.getLogger("naught")


class Started(NamedTuple):
    """What initialize returns, in DeepSpeed's order."""

    engine: Engine
    optimizer: Optimizer | None
    training_dataloader: Loader | None
    lr_scheduler: Scheduler | None


def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: Hand | None = None,
    model_parameters: Groups | None = None,
    training_data: Any = None,
    lr_scheduler: Scheduler | Callable[[Any], Scheduler] | None = None,
    distributed_port: int = 29500,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    config: Source | None = None,
    mesh_param: Any = None,
    config_params: Source | None = None,
    mesh: Any = None,
) -> Started:
    """Split a model as the configuration says, and make what trains it.

    The optimizer is the caller's (a torch optimizer, or a function of the parameters that makes one), else the one that
    the configuration names, else there is none and the model only computes. The schedule of the learning rate is the
    configuration's, else the caller's. The model is moved to this rank's accelerator, if there is one.

    Where several ranks have a model together (torch's tensor parallelism, or Megatron's), `mesh` or `mpu` says which; states are
    split over the others, which have the same part of it.
    """
    if dist_init_required or (dist_init_required is None and not comm.is_initialized() and find_seat(os.environ) is not None):
        comm.init_distributed(distributed_port=distributed_port)
    with make_group(Ledger(), torch.device(get_accelerator().current_device_name()), reduce_numel=1).together():
        settings = load(_source(args, config, config_params))
        refuse_auto(settings)
        _refuse(model, mesh_param)
        assert model is not None
        asked = _asked(model, settings, _lineup(model, settings, mesh, mpu), optimizer, model_parameters, lr_scheduler)
    return _start(asked, training_data, collate_fn)


class _Asked(NamedTuple):
    """What a script wants to have trained, once nothing is wrong with it."""

    model: nn.Module
    settings: Config
    lineup: Lineup | None
    device: torch.device
    optimizer: Optimizer | None
    rates: Scheduler | None
    membership: Membership


def _asked(
    model: nn.Module, settings: Config, lineup: Lineup | None, optimizer: Hand | None, params: Groups | None, rates: Any
) -> _Asked:
    here = standing()
    device = device_for(model) if here is None else here.device
    chosen = _optimizer(settings, model, optimizer, params, device)
    _refuse_rule(settings, chosen)
    made = _rates(settings, chosen, rates)
    membership = Membership(model, [] if chosen is None else chosen.param_groups)
    return _Asked(model, settings, lineup, device, chosen, made, membership)


def _start(asked: _Asked, training_data: Any, collate_fn: Callable[[list[Any]], Any] | None) -> Started:
    """From here on ranks talk of one model, and if this fails it is what it was."""
    model, settings, lineup, device, chosen, rates, membership = asked
    watch = Watch(device, model_bytes=_bytes_on(device, model))
    most = settings.zero_optimization.reduce_bucket_size
    group = make_group(watch.ledger, device, reduce_numel=most, mean=_mean(settings), lineup=lineup)
    agree(group, facts_of(model, settings, naught.__version__, membership.groups))
    if settings.naught.tiles > 1:
        replace_in_groups(membership.groups, divide(model, settings.naught.tiles))
        membership = Membership(model, membership.groups)
    with ExitStack() as undo:
        if lineup is not None:
            undo.callback(lambda groups: replace_in_groups(groups, put_back(model)), membership.groups)
            replace_in_groups(membership.groups, localize(model, lineup))
            membership = Membership(model, membership.groups)
        with group.together():
            batch = derive_batch(settings, group.parts)
            refuse_batch(settings, batch.accumulation)
            observer = Observer(settings, watch, group.rank)
            loader = None if training_data is None else _loader(training_data, collate_fn, settings, batch, group)
        accumulation = Accumulation(
            batch, group.parts, every=settings.naught.reduce_every_micro_batch, managed=settings.managed_gradient_accumulation
        )
        limits = limits_of(settings, precision_of(settings, batch.accumulation).weights.itemsize)
        background = Background(group, device, watch.meter)
        soon = chosen if settings.naught.update_in_backward else None
        early = None if soon is None else Early(group, soon, limits, background.settle)
        passes = _listen(model, settings, membership, group, watch, accumulation, _moments(chosen), early)
        _reserve_on_disk(passes, chosen)
        stepping = Stepping(passes, chosen, limits, loss_scale_of(settings), rates, early)
        engine = Engine(model, settings, accumulation, passes, stepping, observer, background, _saves(settings, watch, lineup))
        engine.training_dataloader = loader
        engine.watchdog.start()
        undo.pop_all()
        return Started(engine, chosen, loader, rates)


def _saves(settings: Config, watch: Watch, lineup: Lineup | None) -> Saves | None:
    """What puts activations away; None: they rest where they are made."""
    rest = activation_rest(settings, watch.device, watch.meter)
    if settings.activation_checkpointing.partition_activations and lineup is None:
        _LOG.warning("activations are split over model-parallel ranks, and there are none: they stay whole")
    elif settings.activation_checkpointing.partition_activations and lineup is not None:
        rest = Split(rest or AsItIs(), Among(watch.ledger, lineup.model))
    return None if rest is None else Saves(rest, everything=settings.naught.saved_tensors == "all")


def _bytes_on(device: torch.device, model: nn.Module) -> int:
    """What a model's parameters and buffers take on a device; what is tied, or a view, lies in one storage."""
    tensors = [local_of(tensor) for tensor in (*model.parameters(), *model.buffers()) if tensor.layout is torch.strided]
    storages = [tensor.untyped_storage() for tensor in tensors if tensor.device == device]
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


def _loader(dataset: Any, collate_fn: Callable[[list[Any]], Any] | None, settings: Config, batch: Batch, group: Group) -> Loader:
    return loader_of(
        dataset,
        batch_size=batch.micro,
        rank=group.part,
        world=group.parts,
        collate_fn=collate_fn,
        pin_memory=True,
        drop_last=settings.dataloader_drop_last,
    )


def _mean(settings: Config) -> Mean:
    return Mean(settings.gradient_allreduce_op == "mean", settings.prescale_gradients, settings.gradient_predivide_factor)


def _listen(
    model: nn.Module,
    settings: Config,
    membership: Membership,
    group: Group,
    watch: Watch,
    accumulation: Accumulation,
    moments: int,
    early: Early | None,
) -> Passes:
    """Move the model into flats, and listen to it."""
    precision, device = precision_of(settings, accumulation.steps), watch.device
    limits = limits_here(settings, precision, moments, group, device, _bytes_on(device, model))
    around = Surroundings(group, device, watch.meter, accumulation.share, job_of(settings, precision, moments), limits)
    with _limited(device, settings.naught.gpu_memory):
        units = build_units(model, settings, precision, membership, around)
        budgets = budgets_of(settings, units, precision.weights.itemsize, group.parts)
        schedule = Schedule(units, group, budgets, early)
        keep_freed_pages(watch.device)
        return Passes(model, schedule, watch, accumulation.sums_over_ranks)


@contextmanager
def _limited(device: torch.device, nbytes: int | None) -> Iterator[None]:
    """From here on there is a limit, if one is given, unless what is done in here fails."""
    if nbytes is not None:
        limit_memory(device, nbytes)
    try:
        yield
    except BaseException:
        if nbytes is not None:
            limit_memory(device, None)
        raise


def _moments(optimizer: Optimizer | None) -> int:
    """How many numbers a rule remembers of each element."""
    return 0 if optimizer is None else max(len(optimizer.rule.states(hyper)) for hyper in optimizer.param_groups)


def _refuse_rule(settings: Config, optimizer: Optimizer | None) -> None:
    """Not every optimizer can be delayed, and not everything that one remembers can be kept in 8 bits."""
    if optimizer is None:
        return
    rule, ours = optimizer.rule, settings.naught
    names = dict.fromkeys(name for hyper in optimizer.param_groups for name in rule.states(hyper))
    packed = all(name in rule.signs for name in names)
    for key, wanted, possible in (
        ("small_moments", ours.small_moments, packed),
        ("delay_update_after", ours.delay_update_after is not None, rule.defers),
        ("update_in_backward", ours.update_in_backward, rule.defers),
    ):
        if wanted and not possible:
            raise UsageError(
                f"naught.{key} is not for this optimizer ({type(optimizer.optimizer or rule).__name__})",
                fix=f"name AdamW, Adam, Lion or SGD in the configuration instead of giving an object, or leave {key} out",
            )


def _reserve_on_disk(passes: Passes, optimizer: Optimizer | None) -> None:
    """What the first step makes on disk has its room now: a disk that is full says so before there is anything to lose."""
    kept = [segment.kept for unit in passes.schedule.units.values() for segment in unit.trained]
    sizes = [states.master.nbytes for states in kept if isinstance(states.master, Stored)]
    disk = next((states.rest.disk for states in kept if states.rest.disk is not None), None)
    if disk is not None:
        with passes.schedule.group.together():
            disk.foresee("states", _moments(optimizer) * sum(sizes))


def _source(args: Any, *given: Source | None) -> Source:
    """The one configuration among those that a script may give."""
    by_arguments = (getattr(args, name, None) for name in ("deepspeed_config", "deepscale_config"))
    sources = [source for source in (*given, *by_arguments) if source is not None]
    if len(sources) > 1:
        raise UsageError(
            "there are two configurations", fix="give one: config, config_params, or --deepspeed_config on the command line"
        )
    if not sources:
        raise UsageError("there is no configuration", fix="give config=..., or --deepspeed_config on the command line")
    return sources[0]


def _lineup(model: nn.Module, settings: Config, mesh: Any, mpu: Any) -> Lineup | None:
    """Which ranks have a model together; None: every rank has all of it."""
    lineup = lineup_of(mesh, mpu)
    if lineup is not None and lineup.model_size == 1 and not has_dtensors(model):
        return None
    if lineup is None and has_dtensors(model):
        raise UsageError(
            "the model's parameters are DTensors, and nobody says which ranks have a model together",
            fix='give mesh=init_device_mesh("cuda", (data, model), mesh_dim_names=("dp", "tp"))',
        )
    if lineup is None:
        return None
    refuse_parts(model, lineup)
    if any(splits(param) for param in model.parameters()):
        raise UsageError("the model was split over all ranks while it was built", fix="build it without zero.Init")
    if settings.naught.tiles > 1:
        raise UsageError("layers that several ranks have together are not divided into tiles", fix="leave naught.tiles out")
    if settings.activation_checkpointing.partition_activations and settings.naught.saved_tensors == "all":
        raise UsageError(
            "all that autograd saves is not the same on ranks that have a model together, and cannot be split over them",
            fix="leave saved_tensors or partition_activations out",
        )
    return lineup


def _refuse(model: nn.Module | None, mesh_param: Any) -> None:
    if not isinstance(model, nn.Module):
        raise UsageError(f"the model is a {type(model).__name__}, not a torch.nn.Module", fix="give model=...")
    refuse_claimed(model)
    if mesh_param is not None:
        raise UsageError("mesh_param is for sequence parallelism, which is not there", fix="give mesh for tensor parallelism")


def _optimizer(
    settings: Config, model: nn.Module, given: Hand | None, params: Groups | None, device: torch.device
) -> Optimizer | None:
    if isinstance(params, Iterable) and not isinstance(params, nn.Parameter | dict):
        params = list(params)  # type: ignore[assignment]  # a generator is read once
    trained = [param for param in model.parameters() if param.requires_grad]
    if given is not None:
        return optimizer_of(given, trained if params is None else params, device)
    if settings.optimizer is None:
        return None
    if not trained:
        raise ModelError("the model has no parameters to train", fix="call requires_grad_(True) on some, or name no optimizer")
    hyper = settings.optimizer.params.model_dump()
    groups = groups_of(trained if params is None else params, hyper)
    return Optimizer(RULES[settings.optimizer.type], groups, hyper)


def _rates(settings: Config, optimizer: Optimizer | None, given: Any) -> Scheduler | None:
    """The schedule of the learning rate: the configuration's goes before the caller's, as with DeepSpeed."""
    if optimizer is None:
        if given is not None:
            raise UsageError("there is no optimizer whose rate lr_scheduler could change", fix="give one, or leave it out")
        return None
    if settings.scheduler is not None:
        if given is not None:
            _LOG.warning("the configuration names a schedule, so lr_scheduler is not used")
        return RateSchedule(settings.scheduler.type, optimizer.param_groups, settings.scheduler.params.model_dump())
    made: Any = given(optimizer) if callable(given) else given
    held = getattr(made, "optimizer", optimizer)
    if made is not None and not callable(getattr(made, "step", None)):
        raise UsageError(
            f"lr_scheduler is a {type(made).__name__} and has no step()",
            fix="give a torch scheduler, or a function of the optimizer that makes one",
        )
    if made is not None and held.param_groups is not optimizer.param_groups and held is not optimizer:
        raise UsageError(
            "the schedule writes its rates into another optimizer",
            fix="make it of the optimizer that you give to initialize, or give a function of the optimizer that makes it",
        )
    return made  # type: ignore[no-any-return]
