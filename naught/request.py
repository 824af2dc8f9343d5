"""Request: what a script wants to have trained, from the arguments of DeepSpeed's `initialize`. Whatever is wrong with it is said
before anything is made."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import nn

from naught.born import splits
from naught.claims import refuse_claimed
from naught.comm import Lineup, lineup_of, standing
from naught.config import Config, Source, refuse_auto
from naught.devices import device_for
from naught.errors import ModelError, UsageError
from naught.local_parts import has_dtensors, refuse_parts
from naught.membership import Membership
from naught.optimizer import Groups, Hand, Optimizer, groups_of, optimizer_of
from naught.rates import RateSchedule
from naught.rules import RULES
from naught.stepping import Scheduler

__all__ = ["Beside", "Request", "request_of", "source_of"]

_LOG = logging.getLogger("naught")


class Beside(NamedTuple):
    """What a script says of ranks that have a model together."""

    mesh: Any
    mpu: Any
    mesh_param: Any


class Request(NamedTuple):
    """What a script wants to have trained, once nothing is wrong with it."""

    model: nn.Module
    settings: Config
    lineup: Lineup | None
    device: torch.device
    optimizer: Optimizer | None
    rates: Scheduler | None
    membership: Membership


def request_of(
    model: nn.Module | None, settings: Config, beside: Beside, optimizer: Hand | None, params: Groups | None, rates: Any
) -> Request:
    refuse_auto(settings)
    if not isinstance(model, nn.Module):
        raise UsageError(f"the model is a {type(model).__name__}, not a torch.nn.Module", fix="give model=...")
    refuse_claimed(model)
    lineup = _lineup(model, settings, beside)
    here = standing()
    device = device_for(model) if here is None else here.device
    chosen = _optimizer(settings, model, optimizer, params, device)
    _refuse_rule(settings, chosen)
    made = _rates(settings, chosen, rates)
    membership = Membership(model, [] if chosen is None else chosen.param_groups)
    return Request(model, settings, lineup, device, chosen, made, membership)


def source_of(args: Any, *given: Source | None) -> Source:
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


def _lineup(model: nn.Module, settings: Config, beside: Beside) -> Lineup | None:
    """Which ranks have a model together; None: every rank has all of it."""
    if beside.mesh_param is not None:
        raise UsageError("mesh_param is for sequence parallelism, which is not there", fix="give mesh for tensor parallelism")
    lineup = lineup_of(beside.mesh, beside.mpu)
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
