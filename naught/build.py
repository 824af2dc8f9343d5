"""Build: from a configuration and a model to units, budgets and limits; and what cannot be built yet."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import nn

from naught.born import raise_whole
from naught.comm import Group
from naught.config import Config, disk_folder, place_by_stage, placement_of
from naught.describe import describe
from naught.devices import Pool
from naught.filling import Filling
from naught.flat import Meter
from naught.hints import leaf_names, renew_loans
from naught.home import GradTypes, Home, Types
from naught.job import Job
from naught.layout import ALIGN_NUMEL
from naught.local_parts import is_repeated
from naught.membership import Membership
from naught.moving import Budgets
from naught.placement import Placement, Tier
from naught.pooling import Arrangement, Limits, berths_beside, place_in_pool, refuse_full_disk
from naught.precision import DTYPES, Precision, kept_in_fp32
from naught.present import present
from naught.rooms import MOST_BERTHS, SharedRooms, shared_rooms
from naught.segment import Segment
from naught.shapes import Run
from naught.sizes import PlacedRun
from naught.tiers import disk_side, host_side
from naught.unit import Unit
from naught.units import UnitRules, UnitSpec, find_units, segments
from naught.untrainable import refuse_model
from naught.update import UpdateLimits

__all__ = ["Surroundings", "budgets_of", "build_units", "limits_of"]


_NO_LIMIT = 1 << 62


class Surroundings(NamedTuple):
    """Among whom, where and counted by whom units live, what share of its step a gradient is, what training keeps of each
    parameter, and within which limits; None: there are none."""

    group: Group
    device: torch.device
    meter: Meter
    share: Callable[[], float]
    job: Job
    limits: Limits | None


def build_units(
    model: nn.Module, config: Config, precision: Precision, membership: Membership, around: Surroundings
) -> dict[str, Unit]:
    """Move the model's parameters into the flats of its units. The root is always one, if only to borrow others."""
    with around.group.together():
        refuse_model(model)
    params = dict(model.named_parameters())
    wide = set(kept_in_fp32(model, config))
    dtypes = {name: param.dtype if param in wide else precision.weights_of(param) for name, param in params.items()}
    leaf = config.zero_optimization.leaf_module
    names = frozenset((*leaf.names, *leaf_names(model)))
    rules = UnitRules(frozenset(leaf.classes), names, frozenset(leaf.name_suffixes))
    repeated = is_repeated(model, around.group.lineup)
    specs = find_units(describe(model, dtypes, membership.has, repeated), rules)
    group, device, meter, share, job, limits = around
    arranged = _arrange(specs, config, group.parts, limits, wide=bool(precision.wide))
    placements = dict(zip((spec.name for spec in specs), arranged.placements, strict=True))
    precision = replace(precision, wide=arranged.wide)
    folder = disk_folder(config)
    if folder is not None:
        with group.together():
            placed = [PlacedRun(_run(spec, group.parts), placements[spec.name]) for spec in specs]
            refuse_full_disk(placed, job, group.parts, present().disk_bytes(folder), folder)
    largest = max((layout.shard_numel for spec in specs for layout in segments(spec, world=group.parts).values()), default=0)
    rooms = _shared_rooms(specs, placements, group.parts) if config.naught.update_in_backward else SharedRooms()
    host = host_side(config, group, device, meter, largest_numel=largest, most_berths=arranged.berths, shared=rooms)
    with group.together():
        disk = disk_side(config, device, meter, largest)
    pool = Pool(device, private=config.naught.private_pool)
    homes = {name: Home(placement, group, device, meter, share, pool, host, disk) for name, placement in placements.items()}
    filling = Filling(model, device)
    last = {spec.name: filling.last_owner([params[param.name] for param in spec.params]) for spec in specs}
    lazy = config.naught.lazy_weights
    units = {name: Unit(name, [], placement_of(config), lazy=False) for name in dict.fromkeys(("", *last))}  # in their own order
    for spec in sorted(specs, key=lambda spec: last[spec.name]):
        filling.fill_through(last[spec.name])
        placement, parts = placements[spec.name], []
        for key, layout in segments(spec, world=group.parts).items():
            weights = dtypes[layout.slots[0].name]
            grads = GradTypes(precision.flat_of(weights, placement), precision.sums_of(weights), precision.on_host_of(weights))
            small = {"small_masters": config.naught.small_masters, "small_moments": config.naught.small_moments}
            types = Types(weights, grads, **small, repeated=key.repeated)
            members = [params[slot.name] for slot in layout.slots]
            groups = [membership.group_of(param) for param in members] if key.trainable else []
            raise_whole(members, device)
            parts.append(Segment(list(map(filling.of, members)), layout, groups, types, homes[spec.name]))
        waits = placement.optim.tier is not Tier.DEVICE if lazy is None else lazy
        units[spec.name] = Unit(spec.name, parts, placement, lazy=waits)
    group.look_for_faults(midway=False)
    filling.fill_rest()
    membership.replace(filling.of)
    renew_loans(model, filling.of)
    _settle_buffers(model, device, config)
    return units


def _shared_rooms(specs: Sequence[UnitSpec], placements: Mapping[str, Placement], world: int) -> SharedRooms:
    """For sums that wait on the host only until their own unit is updated."""
    waiting = [segments(spec, world=world) for spec in specs if placements[spec.name].sums_rest is Tier.HOST]
    return shared_rooms([layout.shard_numel for key, layout in layouts.items() if key.trainable] for layouts in waiting)


def _settle_buffers(model: nn.Module, device: torch.device, config: Config) -> None:
    """Buffers go where the parameters are, in the precision that is asked for."""
    dtype = DTYPES[config.data_types.buffer_dtype] if config.data_types.buffer_dtype else None
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(device, dtype if buffer.is_floating_point() else None)


def _arrange(specs: Sequence[UnitSpec], config: Config, world: int, limits: Limits | None, *, wide: bool) -> Arrangement:
    """Each unit as the configuration says, within limits if it sets any. A pool decides by itself how wide gradients are."""
    runs = [_run(spec, world) for spec in specs]
    if config.naught.placement != "stage":
        assert limits is not None, "a pool has limits: what is free, if no others"
        return place_in_pool(runs, limits)
    found = place_by_stage([spec.numel for spec in specs], config, world)
    if limits is not None:
        return Arrangement(found, berths_beside([PlacedRun(*pair) for pair in zip(runs, found, strict=True)], limits), wide)
    return Arrangement(found, MOST_BERTHS if any(placement.travels for placement in found) else 0, wide)


def _run(spec: UnitSpec, world: int) -> Run:
    """With the gaps that its flats will have: a limit counts them as well."""
    layouts = segments(spec, world=world)
    frozen = sum(layout.numel for key, layout in layouts.items() if not key.trainable)
    sums = tuple(layout.numel for key, layout in layouts.items() if key.trainable)
    return Run(spec.name, sum(layout.numel for layout in layouts.values()), 1, frozen, outer=spec.name == "", sums=sums)


def budgets_of(config: Config, units: Mapping[str, Unit], element_bytes: int, world: int) -> Budgets:
    """Budgets in elements become bytes, rounded up so that one unit can always be fetched ahead."""
    zero = config.zero_optimization
    largest = max(unit.sizes().weights for unit in units.values())
    ahead = 0 if zero.overlap_comm is False else zero.stage3_prefetch_bucket_size * element_bytes
    return Budgets(
        ahead_bytes=largest + max(ahead, largest) if ahead else 0,
        live_bytes=max(zero.stage3_max_live_parameters * element_bytes, 2 * largest),
        reuse_bytes=zero.stage3_max_reuse_distance * element_bytes,
        read_weight_bytes=2 * max(unit.sizes().weight_shard for unit in units.values()) if ahead else 0,
        overlap_reduce=zero.overlap_comm is not False and world > 1,  # a rank alone waits for nobody
    )


def limits_of(config: Config, element_bytes: int) -> UpdateLimits:
    zero = config.zero_optimization
    return UpdateLimits(
        clip=config.gradient_clipping,
        skips=not config.naught.update_in_backward and (not config.bf16.enabled or config.bf16.check_grad_overflow),
        part_numel=max(ALIGN_NUMEL, (zero.sub_group_size or _NO_LIMIT) // ALIGN_NUMEL * ALIGN_NUMEL),
        flight_bytes=zero.allgather_bucket_size * element_bytes,
        delay_after=config.naught.delay_update_after,
    )
