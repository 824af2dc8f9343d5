"""Start: from the arguments of a DeepSpeed script to an engine. Everything that can be wrong is said on every rank."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
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
from naught.build import Surroundings, budgets_of, build_units, limits_of
from naught.comm import Among, Group, Ledger, Lineup, Mean, local_of, make_group
from naught.config import Batch, Config, Source, derive_batch, load, refuse_accumulation
from naught.data import Loader, loader_of
from naught.devices import limit_memory
from naught.dividing import divide, replace_in_groups
from naught.early import Early
from naught.engine import Engine
from naught.freed_pages import keep_freed_pages
from naught.limits import job_of, limits_here
from naught.local_parts import localize, put_back
from naught.membership import Membership
from naught.observing import Observer
from naught.optimizer import Groups, Hand, Optimizer
from naught.passes import Passes
from naught.precision import loss_scale_of, precision_of
from naught.request import Beside, Request, request_of, source_of
from naught.saved import Saves
from naught.saves.background import Background
from naught.schedule import Schedule
from naught.seats import find_seat
from naught.spill import Stored
from naught.stepping import Scheduler, Stepping
from naught.tiers import activation_rest
from naught.update import UpdateLimits
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
        settings = load(source_of(args, config, config_params))
        request = request_of(model, settings, Beside(mesh, mpu, mesh_param), optimizer, model_parameters, lr_scheduler)
    return _start(request, training_data, collate_fn)


def _start(request: Request, training_data: Any, collate_fn: Callable[[list[Any]], Any] | None) -> Started:
    """From here on ranks talk of one model, and if this fails it is what it was."""
    model, settings, lineup, device, chosen, rates, membership = request
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
            refuse_accumulation(settings, batch.accumulation)
            observer = Observer(settings, watch, group.rank)
            loader = None if training_data is None else _loader(training_data, collate_fn, settings, batch, group)
        accumulation = Accumulation(
            batch, group.parts, every=settings.naught.reduce_every_micro_batch, managed=settings.managed_gradient_accumulation
        )
        limits = limits_of(settings, precision_of(settings, batch.accumulation).weights.itemsize)
        background = Background(group, device, watch.meter)
        soon = chosen if settings.naught.update_in_backward else None
        early = None if soon is None else _early(group, soon, limits, background)
        passes = _listen(model, settings, membership, group, watch, accumulation, _moments(chosen), early)
        _reserve_on_disk(passes, chosen)
        stepping = Stepping(passes, chosen, limits, loss_scale_of(settings), rates, early)
        engine = Engine(model, settings, accumulation, passes, stepping, observer, background, _saves(settings, watch, lineup))
        engine.training_dataloader = loader
        engine.watchdog.start()
        undo.pop_all()
        return Started(engine, chosen, loader, rates)


def _early(group: Group, optimizer: Optimizer, limits: UpdateLimits, background: Background) -> Early:
    if group.desk.type != "cpu":
        _LOG.warning(
            "naught.update_in_backward exchanges a few numbers for each unit, and the process group carries them on devices "
            'alone, which wait each time: start it without naming a backend, or with "cpu:gloo,cuda:nccl"'
        )
    return Early(group, optimizer, limits, background.settle)


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
        schedule = Schedule(units, group, None if settings.naught.ranks_may_differ else budgets, early)
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


def _reserve_on_disk(passes: Passes, optimizer: Optimizer | None) -> None:
    """What the first step makes on disk has its room now: a disk that is full says so before there is anything to lose."""
    kept = [segment.kept for unit in passes.schedule.units.values() for segment in unit.trained]
    sizes = [states.master.nbytes for states in kept if isinstance(states.master, Stored)]
    disk = next((states.rest.disk for states in kept if states.rest.disk is not None), None)
    if disk is not None:
        with passes.schedule.group.together():
            disk.foresee("states", _moments(optimizer) * sum(sizes))
