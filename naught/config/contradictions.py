"""Contradictions: settings that are fine alone and cannot be meant together. One generator for each pair of ideas."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from naught.config.schema import Config

__all__ = ["Conflict", "contradictions"]


class Conflict(NamedTuple):
    """Keys that contradict each other, the one to blame first. If one of them is wrong by itself, that is said instead."""

    paths: tuple[str, ...]
    what: str
    fix: str


def contradictions(config: Config) -> Iterator[Conflict]:
    for rule in (_precision, _offload, _delay, _early, _resting, _pool, _batch, _loss_scale, _schedule, _clipping, _momentum):
        yield from rule(config)


def _precision(config: Config) -> Iterator[Conflict]:
    if config.fp16.enabled and config.bf16.enabled:
        yield Conflict(("bf16.enabled", "fp16.enabled"), "fp16.enabled and bf16.enabled are both true", "choose one")
    if config.torch_autocast.enabled and (config.fp16.enabled or config.bf16.enabled):
        chosen = "fp16" if config.fp16.enabled else "bf16"
        yield Conflict(
            ("torch_autocast.enabled", f"{chosen}.enabled"), f"torch_autocast and {chosen} are both enabled", "choose one"
        )

    if config.naught.small_masters and not config.bf16.enabled and config.data_types.param_dtype != "bf16":
        paths = ("naught.small_masters", "bf16.enabled")
        yield Conflict(paths, "small masters are a bf16 weight and a rest, and weights are not bf16", "set bf16.enabled")
    wanted = config.data_types.param_dtype
    for name, block in (("fp16", config.fp16), ("bf16", config.bf16)):
        if block.enabled and wanted not in (None, name):
            yield Conflict(("data_types.param_dtype", f"{name}.enabled"), f"is {wanted}, but {name} is enabled", "say it once")


def _pool(config: Config) -> Iterator[Conflict]:
    """The pool places every unit itself, and tiles are gathered one at a time: both need split parameters."""
    zero, ours = config.zero_optimization, config.naught
    if "zero_optimization.stage" not in config.auto and zero.stage < 3:
        if ours.placement != "stage":
            yield Conflict(("naught.placement", "zero_optimization.stage"), f"{ours.placement} needs stage 3", "set stage to 3")
        if ours.tiles > 1:
            yield Conflict(("naught.tiles", "zero_optimization.stage"), "tiles need stage 3", "set stage to 3")
    if ours.gpu_memory is not None and ours.activation_memory is not None and ours.activation_memory >= ours.gpu_memory:
        paths = ("naught.activation_memory", "naught.gpu_memory")
        yield Conflict(paths, "activations would have all of the device's memory", "make it smaller, or raise naught.gpu_memory")
    for name, block in (("offload_param", zero.offload_param), ("offload_optimizer", zero.offload_optimizer)):
        if ours.placement != "stage" and block and block.device != "none":
            paths = ("naught.placement", f"zero_optimization.{name}")
            yield Conflict(paths, f"{ours.placement} places every unit by itself, and {name} says where", "keep one of the two")


def _offload(config: Config) -> Iterator[Conflict]:
    zero = config.zero_optimization
    known_stage = "zero_optimization.stage" not in config.auto
    param, optim = zero.offload_param, zero.offload_optimizer
    if param and param.device != "none" and zero.stage < 3 and known_stage:
        yield Conflict(
            ("zero_optimization.offload_param", "zero_optimization.stage"),
            f"needs stage 3, but the stage is {zero.stage}: whole parameters cannot leave the device",
            "set stage to 3 or remove it",
        )
    if optim and optim.device != "none" and zero.stage < 1 and known_stage:
        paths = ("zero_optimization.offload_optimizer", "zero_optimization.stage")
        yield Conflict(paths, "needs stage 1 to 3, but the stage is 0", "set a stage")
    for name, block in (("offload_param", param), ("offload_optimizer", optim)):
        path = f"zero_optimization.{name}.nvme_path"
        if block and block.device == "nvme" and not block.nvme_path and path not in config.auto:
            yield Conflict((path,), f'{name}.device is "nvme" but nvme_path is not set', "name a folder on the disk")


def _delay(config: Config) -> Iterator[Conflict]:
    """Only weights on the device can follow an update of states on the host one step late."""
    param, optim = config.zero_optimization.offload_param, config.zero_optimization.offload_optimizer
    if config.naught.delay_update_after is None:
        return
    if config.naught.placement != "stage":
        paths = ("naught.delay_update_after", "naught.placement")
        yield Conflict(paths, "a pool may put weights on the host, which cannot follow an update later", "keep one of the two")
    elif not optim or optim.device == "none":
        paths = ("naught.delay_update_after", "zero_optimization.offload_optimizer")
        yield Conflict(paths, "only an update on the host is delayed", 'set offload_optimizer: {"device": "cpu"}')
    if optim and optim.device == "nvme":
        paths = ("naught.delay_update_after", "zero_optimization.offload_optimizer.device")
        yield Conflict(paths, "an update of states on disk brings its weights along and is not delayed", "keep one of the two")
    if param and param.device != "none":
        paths = ("naught.delay_update_after", "zero_optimization.offload_param")
        what = "weights that rest on the host are made of what is updated there: they cannot follow later"
        yield Conflict(paths, what, "keep the parameters on the device, or do not delay")


def _early(config: Config) -> Iterator[Conflict]:
    """What an update in the backward cannot wait for."""
    key, ours = "naught.update_in_backward", config.naught
    if not ours.update_in_backward:
        return
    if config.gradient_clipping and "gradient_clipping" not in config.auto:
        shown = "" if "gradient_clipping" in config.model_fields_set else " (the default)"
        what = f"clipping at {config.gradient_clipping:g}{shown} needs the norm of all gradients, known after the last update"
        yield Conflict((key, "gradient_clipping"), what, "set gradient_clipping to 0, or leave update_in_backward out")
    for block, path, what in (
        (config.fp16.enabled, "fp16.enabled", "fp16 has to know whether any gradient overflows before it updates"),
        (ours.delay_update_after is not None, "naught.delay_update_after", "updates come either in the backward or a step late"),
        (
            not config.managed_gradient_accumulation,
            "managed_gradient_accumulation",
            "who counts micro-batches says too late which is the last",
        ),
        (
            (config.gradient_accumulation_steps or 1) > 1,
            "gradient_accumulation_steps",
            "gradients that are summed over micro-batches have to stay",
        ),
    ):
        if block:
            yield Conflict((key, path), what, "keep one of the two")


def _resting(config: Config) -> Iterator[Conflict]:
    """Where moments, activations and gradients may rest."""
    zero, optim = config.zero_optimization, config.zero_optimization.offload_optimizer
    known_stage = "zero_optimization.stage" not in config.auto
    if config.naught.small_moments and ((optim and optim.device == "nvme") or config.naught.nvme_path):
        where = "naught.nvme_path" if config.naught.nvme_path else "zero_optimization.offload_optimizer.device"
        paths = ("naught.small_moments", where)
        yield Conflict(paths, "moments of 8 bits rest on the device or the host, not on disk", "keep one of the two")
    if config.naught.activations == "disk" and not _disk_path(config) and "naught.nvme_path" not in config.auto:
        paths = ("naught.activations", "naught.nvme_path")
        yield Conflict(paths, "is disk, but no nvme_path is set", "set naught.nvme_path")
    if config.naught.saved_tensors == "all" and config.naught.activations == "device":
        paths = ("naught.saved_tensors", "naught.activations")
        yield Conflict(paths, "all that is saved stays on the device", 'set naught.activations to "host" or "disk"')
    if config.naught.gradients in ("host", "disk") and zero.stage < 2 and known_stage:
        paths = ("naught.gradients", "zero_optimization.stage")
        yield Conflict(paths, f"whole gradients (stage {zero.stage}) cannot leave the device", "set stage to 2 or 3")
    if config.naught.gradients in ("device", "host") and config.naught.placement != "stage":
        paths = ("naught.gradients", "naught.placement")
        yield Conflict(paths, "a pool itself chooses where gradients rest", 'leave it out, or set naught.placement to "stage"')
    unknown = "zero_optimization.offload_optimizer.device" in config.auto or (known_stage and zero.stage < 2)
    near = _depth(optim.device if optim else None)
    if config.naught.placement == "stage" and not unknown and _depth(_DEVICES.get(config.naught.gradients)) > near:
        paths = ("naught.gradients", "zero_optimization.offload_optimizer.device")
        what = "gradients would rest farther away than the optimizer states that they are for"
        fix = f'set offload_optimizer.device to "{_DEVICES[config.naught.gradients]}", or naught.gradients to "follow"'
        yield Conflict(paths, what, fix)
    elif config.naught.gradients == "disk" and not _disk_path(config) and "naught.nvme_path" not in config.auto:
        yield Conflict(("naught.gradients", "naught.nvme_path"), "is disk, but no nvme_path is set", "set naught.nvme_path")


_DEVICES = {"host": "cpu", "disk": "nvme"}  # what offload blocks call our tiers


def _depth(device: str | None) -> int:
    return ("none", "cpu", "nvme").index(device or "none")


def _disk_path(config: Config) -> str | None:
    zero = config.zero_optimization
    blocks = (zero.offload_optimizer, zero.offload_param)
    return config.naught.nvme_path or next((block.nvme_path for block in blocks if block and block.nvme_path), None)


def _batch(config: Config) -> Iterator[Conflict]:
    train, micro, steps = config.train_batch_size, config.train_micro_batch_size_per_gpu, config.gradient_accumulation_steps
    if train is None or (micro is None and steps is None):
        return
    if train % ((micro or 1) * (steps or 1)):
        said = " x ".join(str(number) for number in (micro, steps) if number)
        yield Conflict(
            ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"),
            f"{train} is not a multiple of {said}, for any number of ranks",
            "train_batch_size = micro-batch x accumulation x ranks",
        )


def _loss_scale(config: Config) -> Iterator[Conflict]:
    fp16 = config.fp16
    if fp16.enabled and not fp16.loss_scale and fp16.min_loss_scale > 2.0**fp16.initial_scale_power:
        paths = ("fp16.min_loss_scale", "fp16.initial_scale_power", "fp16.loss_scale")
        yield Conflict(paths, f"{fp16.min_loss_scale:g} is above the first scale, 2^{fp16.initial_scale_power}", "lower it")


_ORDERED = (
    ("warmup_min_lr", "warmup_max_lr"),
    ("cycle_min_lr", "cycle_max_lr"),
    ("warmup_num_steps", "total_num_steps"),
    ("cycle_min_mom", "cycle_max_mom"),
)


def _schedule(config: Config) -> Iterator[Conflict]:
    if config.scheduler is None:
        return
    params: dict[str, Any] = config.scheduler.params.model_dump()
    for name in ("total_num_steps", "cycle_min_lr", "cycle_max_lr"):
        path = f"scheduler.params.{name}"
        if name in params and params[name] is None and path not in config.auto:
            yield Conflict((path,), f"{config.scheduler.type} needs it", "give a number")
    for low, high in _ORDERED:
        a, b = params.get(low), params.get(high)
        paths = (f"scheduler.params.{low}", f"scheduler.params.{high}")
        if config.auto.isdisjoint(paths) and _is_above(a, b):
            by_default = low not in config.scheduler.params.model_fields_set
            shown = f"{low} is {a} by default, which" if by_default else f"{a}"
            yield Conflict(paths, f"{shown} is above {high}, {b}", f"set {low}" if by_default else "swap or change them")


def _is_above(low: Any, high: Any) -> bool:
    """Whether a value, or one of several for parameter groups, is above its upper end."""
    lows, highs = (value if isinstance(value, tuple) else (value,) for value in (low, high))
    return any(a is not None and b is not None and a > b for a, b in zip(lows, highs, strict=False))


def _clipping(config: Config) -> Iterator[Conflict]:
    if config.optimizer is None or "gradient_clipping" not in config.model_fields_set:
        return
    old = config.optimizer.params.max_grad_norm
    if old is not None and old != config.gradient_clipping:
        paths = ("optimizer.params.max_grad_norm", "gradient_clipping")
        yield Conflict(paths, f"{old} is not gradient_clipping, {config.gradient_clipping}", "keep gradient_clipping")


def _momentum(config: Config) -> Iterator[Conflict]:
    params = config.optimizer.params if config.optimizer else None
    if getattr(params, "nesterov", False) and not getattr(params, "momentum", 0):
        yield Conflict(("optimizer.params.nesterov", "optimizer.params.momentum"), "needs a momentum above 0", "set momentum")
    elif getattr(params, "nesterov", False) and getattr(params, "dampening", 0):
        yield Conflict(("optimizer.params.nesterov", "optimizer.params.dampening"), "needs a dampening of 0", "remove dampening")
