"""Present: what a rank has around it: memory, a disk, neighbours on its host. Of this computer; or of the machine of a world that
is only thought of."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple, Protocol

import torch

from naught.comm import World, standing
from naught.devices import free_host_bytes, room_on
from naught.errors import UsageError
from naught.machine import Machine, detect
from naught.seats import local_ranks

__all__ = ["Present", "present"]


class Present(Protocol):
    @property
    def machine(self) -> Machine:
        """Its rates."""

    @property
    def local_ranks(self) -> int:
        """Ranks that share a host."""

    def is_apart(self, device: torch.device) -> bool:
        """Whether a device has memory of its own, beside the host's."""

    def device_bytes(self, device: torch.device, own: int) -> int:
        """That one rank may have there, or all of a host where it is the host's memory. So much of it a rank's model has."""

    def host_bytes(self) -> int:
        """That the ranks of a host may still have together."""

    def disk_bytes(self, folder: str) -> int | None:
        """Of the file system that a folder is on, or will be: what one rank may have. None: nobody says."""


def present() -> Present:
    here = standing()
    return _Imagined(here) if isinstance(here, World) else _Here()


class _Here:
    @property
    def machine(self) -> Machine:
        return detect()[0]

    @property
    def local_ranks(self) -> int:
        return local_ranks(os.environ)

    def is_apart(self, device: torch.device) -> bool:
        return device.type != "cpu"

    def device_bytes(self, device: torch.device, own: int) -> int:
        room = room_on(device)
        return room.free + (room.kept or 0) + own * (1 if self.is_apart(device) else self.local_ranks)

    def host_bytes(self) -> int:
        return free_host_bytes()

    def disk_bytes(self, folder: str) -> int | None:
        here = Path(folder).resolve()
        while not here.exists():
            here = here.parent
        found = os.statvfs(here)
        return found.f_bavail * found.f_frsize // self.local_ranks


class _Imagined(NamedTuple):
    world: World

    @property
    def machine(self) -> Machine:
        if self.world.machine is None:
            raise UsageError(
                "nobody says what memory the ranks have that are only thought of",
                fix="give the world a machine: World(ranks, machine=Machine(...)); or --gpu, --host and --disk",
            )
        return self.world.machine

    @property
    def local_ranks(self) -> int:
        return 1 if self.world.machine is None else self.world.machine.local_ranks

    def is_apart(self, device: torch.device) -> bool:
        del device
        return self.world.machine is None or not self.world.machine.unified

    def device_bytes(self, device: torch.device, own: int) -> int:
        del device, own
        return self.machine.gpu.memory_bytes

    def host_bytes(self) -> int:
        return self.machine.gpu.memory_bytes if self.machine.unified else self.machine.host_bytes

    def disk_bytes(self, folder: str) -> int | None:
        del folder
        if self.world.machine is None or not self.world.machine.disk_bytes:
            return None
        return self.world.machine.disk_bytes // self.local_ranks
