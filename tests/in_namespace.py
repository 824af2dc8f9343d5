"""Trains in a network namespace of its own, where the kernel's counters of the loopback interface see nothing else.

Prints, for each stage, the bytes that went over the interface and the bytes that the ranks' ledgers counted.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import struct
from pathlib import Path

from workers import World

os.environ["DS_ACCELERATOR"] = "cpu"  # the ranks' bytes are to go over the interface, on a machine with a GPU too

STEPS = 4


def raise_loopback() -> None:
    up_and_running, set_flags = 0x1 | 0x40, 0x8914
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as handle:
        fcntl.ioctl(handle, set_flags, struct.pack("16sh14x", b"lo", up_and_running))


def bytes_over_loopback() -> int:
    rows = Path("/proc/net/dev").read_text(encoding="ascii").splitlines()
    return next(int(row.split(":")[1].split()[8]) for row in rows if row.strip().startswith("lo:"))


def count(stage: int) -> tuple[int, int, int]:
    """Bytes over the interface in some steps, those in this rank's ledger, and those of all parameters."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from training import config_of, engine_of

    torch.manual_seed(0)
    engine = engine_of(nn.Sequential(*(nn.Linear(512, 512) for _ in range(6))), config_of(stage, overlap_comm=False))

    def steps(number: int) -> None:
        for _ in range(number):
            engine.backward(engine(torch.ones(2, 512)).sum())
            engine.step()

    steps(2)
    dist.barrier()
    before, counted = bytes_over_loopback(), engine.watch.ledger.total()
    dist.barrier()
    steps(STEPS)
    dist.barrier()
    return bytes_over_loopback() - before, engine.watch.ledger.total() - counted, sum(p.nbytes for p in engine.parameters())


def main() -> None:
    raise_loopback()
    world = World(2)
    for stage in range(4):
        (crossed, mine, whole), (_, theirs, _) = world.run(count, stage)
        print(json.dumps({"stage": stage, "interface": crossed, "ledger": mine + theirs, "parameters": whole, "steps": STEPS}))
    world.stop()


if __name__ == "__main__":
    main()
