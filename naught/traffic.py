"""Traffic: what one rank moves in one step, and how long each resource is busy with it. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from naught.job import ActivationBytes, Checkpointing, Job
from naught.machine import Machine
from naught.placement import Tier
from naught.sizes import PlacedRun, trained_numel, unit_bytes

__all__ = ["Times", "Traffic", "times_of", "traffic_of"]


@dataclass(frozen=True)
class Times:
    """Seconds that each resource is busy in one step, and what the likely schedule makes of the link's."""

    compute: float
    network: float
    link: float
    update: float
    disk: float
    link_in_turn: float  # the link, if all that the first forward needs comes up before anything goes down
    behind_update: float  # of that, what comes up while the host updates
    behind_backward: float  # of the update, what the host does while the backward that lets its gradients go is under way

    @property
    def likely(self) -> float:
        """As `serial`, but that weights for the first forward come up while the host updates, and that updates in the backward
        hide under it: what placements are compared by."""
        return self.serial - self.behind_update - self.behind_backward

    @property
    def serial(self) -> float:
        """One resource after the other, though the link carries both ways at once: the papers' bound from above."""
        return self.compute + self.network + self.link_in_turn + self.update + self.disk

    @property
    def overlapped(self) -> float:
        """A step in which everything overlaps: no schedule is faster."""
        return max(self.compute, self.network, self.link, self.update, self.disk)


_WIDE = 4  # bytes


class Traffic(NamedTuple):
    volume: dict[str, int]
    up: int  # from the host to the device
    down: int
    disk: int
    up_for_forward: int  # of what goes up: new weights, and what the first forward gathers

    @property
    def link(self) -> int:
        return self.up + self.down


def traffic_of(placed: Sequence[PlacedRun], activations: ActivationBytes, machine: Machine, job: Job) -> Traffic:
    """Bytes of one step and rank: through collectives, between host and device, to and from the disk."""
    world = machine.ranks
    gathered = reduced = up = down = disk = up_for_forward = 0
    passes, wire = job.accumulation, job.recipe.grad
    last = max((at for at, (run, _) in enumerate(placed) if not run.outer), default=-1)
    for at, (run, placement) in enumerate(placed):
        size = unit_bytes(run, placement, world, job)
        trained = trained_numel(run, world)
        reduces = (passes if placement.grad.split else 1) * run.repeat
        # An update on the host works in 32 bits: gradients come down so, and its masters go up to be rounded on the device.
        made = placement.param.tier is placement.optim.tier is Tier.HOST
        raised = size.weight_shard + trained // world * (_WIDE - job.recipe.weight) * made
        reduced += trained * wire * reduces
        if placement.param.split:
            # The last unit of the forward is the first of the backward, as an outer one is: the plan keeps it.
            kept = passes * (run.repeat if run.outer else int(at == last))
            gathers = 2 * passes * run.repeat - kept
            gathered += size.weights * gathers
            up += raised * gathers * (placement.param.tier is not Tier.DEVICE)
            up_for_forward += raised * run.repeat * (placement.param.tier is not Tier.DEVICE)
            disk += size.weight_shard * gathers * (placement.param.tier is Tier.DISK)
            disk += trained // world * job.recipe.weight * run.repeat * (placement.param.tier is Tier.DISK)
        else:
            # Whole weights are stale after an update elsewhere; after one on every rank it is the gradients that travel.
            gathered += trained * (job.recipe.weight if placement.optim.split else wire) * run.repeat
        on_device = placement.optim.tier is Tier.DEVICE
        if placement.grad.tier is not Tier.DEVICE or not on_device:
            part = trained // world * (wire if on_device else job.kept_host_grad // job.host_sums)
            down += part * reduces
            up += part * (reduces - run.repeat)  # a sum comes up again to be added to
        if on_device and placement.grad.tier is not Tier.DEVICE:
            up += trained // world * wire * run.repeat
        if on_device and placement.param.tier is not Tier.DEVICE:
            down += trained // world * job.recipe.weight * run.repeat
        if not on_device and placement.param.tier is Tier.DEVICE:
            up += trained // world * _WIDE * run.repeat
            up_for_forward += trained // world * _WIDE * run.repeat
        if placement.grad.tier is Tier.DISK:
            disk += 2 * size.grad_shard * reduces  # each micro-batch but the first is added to what is there
        if placement.optim.tier is Tier.DISK:
            disk += 2 * size.state_shard * run.repeat
    if job.checkpointing.tier is not Tier.DEVICE:
        up += activations.checkpoints * passes
        down += activations.checkpoints * passes
    if job.checkpointing.tier is Tier.DISK:
        disk += 2 * activations.checkpoints * passes
    volume = {"all-gather": gathered * (world - 1) // world, "reduce-scatter": reduced * (world - 1) // world}
    if machine.unified:  # a device that is the host has no link to it
        up = down = up_for_forward = 0
    return Traffic(volume, up, down, disk, up_for_forward)


def times_of(placed: Sequence[PlacedRun], traffic: Traffic, forward_flops: int | None, machine: Machine, job: Job) -> Times:
    if forward_flops is None:
        forward_flops = 2 * job.micro_batch * job.seq * sum(run.numel * run.repeat for run, _ in placed)
    forwards = 3 if job.checkpointing is Checkpointing.NONE else 4  # a backward is two forwards; and the recompute
    on_host = on_device = 0.0
    for run, placement in placed:
        share = (run.numel - run.frozen) * run.repeat / (machine.ranks if placement.optim.split else 1)
        if placement.optim.tier is Tier.DEVICE:
            on_device += share
        else:
            on_host += share
    first, updating = traffic.up_for_forward / machine.link_bytes_s, on_host / machine.host_update_numel_s
    forward = forward_flops * job.accumulation / machine.gpu.flops
    return Times(
        compute=forwards * forward,
        network=sum(traffic.volume.values()) / machine.collective_bytes_s,
        link=max(traffic.up, traffic.down) / machine.link_bytes_s,  # which carries both ways at once
        update=on_device / machine.device_update_numel_s + updating,
        disk=traffic.disk / machine.rank_disk_bytes_s,
        link_in_turn=first + max(traffic.up - traffic.up_for_forward, traffic.down) / machine.link_bytes_s,
        behind_update=min(first, updating),
        behind_backward=min((forwards - 1) * forward, updating) if job.update_in_backward else 0.0,
    )
