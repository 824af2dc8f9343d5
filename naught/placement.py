"""Placement: where each kind of state rests, as data. A ZeRO stage is a row of a table here and nowhere else."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType

from naught.errors import PlacementError

__all__ = ["PLACEMENTS", "STAGES", "Kind", "Place", "Placement", "Tier", "place_stage"]


class Tier(StrEnum):
    """A level of memory, nearest to the arithmetic first."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"


class Kind(StrEnum):
    """A kind of model state."""

    PARAM = "param"
    GRAD = "grad"
    OPTIM = "optim"


@dataclass(frozen=True)
class Place:
    """Where one kind of state rests: split over the ranks or whole on each, and on which tier."""

    split: bool
    tier: Tier = Tier.DEVICE

    def __str__(self) -> str:
        return f"{'split' if self.split else 'whole'} on {self.tier}"


@dataclass(frozen=True)
class Placement:
    """Where a unit's parameters, gradients and optimizer state rest between their uses."""

    param: Place
    grad: Place
    optim: Place

    def __post_init__(self) -> None:
        if self.param.split and not self.grad.split:
            raise PlacementError(
                "split parameters need split gradients: a rank cannot keep gradients of weights it does not keep",
                where=str(self),
                fix="split the gradients too, or keep the parameters whole",
            )
        if self.grad.split and not self.optim.split:
            raise PlacementError(
                "split gradients need split optimizer state: a rank can only update what it has gradients for",
                where=str(self),
                fix="split the optimizer state too, or keep the gradients whole",
            )
        for kind in Kind:
            place = self.of(kind)
            if not place.split and place.tier is not Tier.DEVICE:
                raise PlacementError(
                    f"whole {kind} state cannot rest on {place.tier}: every rank would store and move a full copy",
                    where=str(self),
                    fix=f"split the {kind} state, or keep it on the device",
                )

    @property
    def sums_leave(self) -> bool:
        """Whether a sum of gradients leaves its flat at once, for where it rests or for where it is used."""
        return self.grad.split or self.optim.tier is not Tier.DEVICE

    @property
    def sums_rest(self) -> Tier:
        """Where a sum of gradients waits for its update: where gradients rest, but no farther from it than the host."""
        leaves = self.grad.tier is Tier.DEVICE and self.optim.tier is not Tier.DEVICE
        return Tier.HOST if leaves else self.grad.tier

    @property
    def travels(self) -> bool:
        """Whether anything goes between the device and where it rests."""
        return any(self.of(kind).tier is not Tier.DEVICE for kind in Kind)

    def of(self, kind: Kind) -> Place:
        return {Kind.PARAM: self.param, Kind.GRAD: self.grad, Kind.OPTIM: self.optim}[kind]

    def __str__(self) -> str:
        return ", ".join(f"{kind} {self.of(kind)}" for kind in Kind)


# What each stage splits: parameters, gradients, optimizer state.
STAGES = MappingProxyType(
    {
        0: (False, False, False),
        1: (False, False, True),
        2: (False, True, True),
        3: (True, True, True),
    }
)


def place_stage(stage: int, *, optim: Tier = Tier.DEVICE, param: Tier = Tier.DEVICE, grad: Tier | None = None) -> Placement:
    """The placement that a DeepSpeed user means by a stage and two offload devices.

    Split gradients follow the optimizer off the device, but no further than the host unless told: they are
    written once and read once a step, and the disk is better spent on states.
    """
    split_param, split_grad, split_optim = STAGES[stage]
    if grad is None:
        grad = Tier.HOST if split_grad and optim is not Tier.DEVICE else Tier.DEVICE
    return Placement(param=Place(split_param, param), grad=Place(split_grad, grad), optim=Place(split_optim, optim))


# The rows people know by name, from the least communication to the most room.
PLACEMENTS = MappingProxyType(
    {
        "stage0": place_stage(0),
        "stage1": place_stage(1),
        "stage2": place_stage(2),
        "stage3": place_stage(3),
        "stage1-offload": place_stage(1, optim=Tier.HOST),
        "stage2-offload": place_stage(2, optim=Tier.HOST),
        "stage3-offload": place_stage(3, optim=Tier.HOST),
        "infinity-host": place_stage(3, optim=Tier.HOST, param=Tier.HOST),
        "infinity-disk-optim": place_stage(3, optim=Tier.DISK, param=Tier.HOST),
        "infinity-disk": place_stage(3, optim=Tier.DISK, param=Tier.DISK),
        "infinity-disk-all": place_stage(3, optim=Tier.DISK, param=Tier.DISK, grad=Tier.DISK),
    }
)
