"""Starting: the process group, from whatever launcher started this process. Does nothing where there is one already."""

from __future__ import annotations

import atexit
import logging
import os
import time
from datetime import timedelta

import torch.distributed as dist

from naught.accelerator import get_accelerator
from naught.comm.listening import meeting_store, stay_on_this_machine
from naught.comm.standing import is_initialized, standing
from naught.errors import UsageError
from naught.seats import DEFAULT_PORT, Seat, find_seat, local_ranks, number

__all__ = ["get_local_rank", "init_distributed", "shares_device", "shut_down"]

_LOG = logging.getLogger("naught")


def init_distributed(
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,
    distributed_port: int = DEFAULT_PORT,
    verbose: bool = True,
    timeout: timedelta | None = None,
    init_method: str | None = None,
    dist_init_required: bool | None = None,
    config: object = None,
    rank: int = -1,
    world_size: int = -1,
) -> None:
    """Start the process group that torchrun, OpenMPI or Slurm meant, or a group of one where no launcher is at work.

    The launcher's variables are set as torchrun names them, and the device of this process is the one of its local
    rank. A timeout is half an hour unless given here or, in minutes, by DEEPSPEED_TIMEOUT. `config` is DeepSpeed's
    and is not read.
    """
    del config
    if is_initialized():
        return
    # Torch imports this later by itself, and it keeps whatever group there is then alive for ever, threads and all.
    import torch.distributed.nn.functional  # noqa: F401

    if dist_init_required is False:
        raise UsageError(
            "dist_init_required=False says that there is a process group, and there is none",
            fix="leave it out, or call torch.distributed.init_process_group first",
        )
    backend = _backend(dist_backend)
    timeout = timeout or timedelta(minutes=number(os.environ, "DEEPSPEED_TIMEOUT", 30))
    url = init_method or "env://"
    seat = _seat(url, {"RANK": rank, "WORLD_SIZE": world_size}, port=distributed_port, mpi=auto_mpi_discovery)
    if seat is None:
        # No port: any number of such processes may run beside each other.
        alone = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=alone, rank=0, world_size=1, timeout=timeout)
        return
    _take_device(seat.local_rank)
    if verbose and seat.rank == 0:
        _LOG.info("starting %d ranks over %s, which meet at %s:%d", seat.world, backend, seat.address, seat.port)
    store = None
    if url == "env://":
        stay_on_this_machine(seat)
        store = meeting_store(seat, timeout)
    where = url if store is None else None
    dist.init_process_group(backend, init_method=where, store=store, rank=seat.rank, world_size=seat.world, timeout=timeout)


def _backend(asked: str | None) -> str:
    """What was asked for, if this process can have it; else what its devices speak."""
    accelerator = get_accelerator()
    alone = accelerator.device_name() == "cpu"
    if asked is None:
        name = accelerator.communication_backend_name()
        return name if alone else f"cpu:gloo,{accelerator.device_name()}:{name}"
    for name in (part.rpartition(":")[2] for part in asked.lower().split(",")):
        if not dist.is_backend_available(name) or (alone and name == "nccl"):
            raise UsageError(
                f'this process has no backend "{name}"',
                where=f"dist_backend={asked!r}",
                fix="leave dist_backend out to get what this machine can do, which is gloo on CPUs",
            )
    return asked


def _seat(url: str, given: dict[str, int], *, port: int, mpi: bool) -> Seat | None:
    """This process's seat, as torchrun's variables say it from here on. Arguments win over the environment."""
    env = dict(os.environ) | {name: str(value) for name, value in given.items() if value >= 0}
    if url == "env://":
        seat = find_seat(env, port=port, mpi=mpi)
        if seat is not None:
            os.environ.update(MASTER_ADDR=seat.address, MASTER_PORT=str(seat.port))
    else:
        seat = find_seat(env | {"MASTER_ADDR": url}, port=port, mpi=mpi)
        if seat is None:
            raise UsageError(
                "init_method says where the ranks meet, and nobody says which of them this is",
                where=f"init_method={url!r}",
                fix="give rank and world_size too, or set RANK and WORLD_SIZE",
            )
    if seat is not None:
        os.environ.update(RANK=str(seat.rank), WORLD_SIZE=str(seat.world), LOCAL_RANK=str(seat.local_rank))
    return seat


def _take_device(local_rank: int) -> None:
    """Make the device of a local rank the current one; a launcher may also show each process just its own."""
    accelerator = get_accelerator()
    count = accelerator.device_count()
    index = local_rank if count > 1 else 0
    if index >= count:
        raise UsageError(
            f"local rank {local_rank} has no device of its own: this node has {count}",
            where="LOCAL_RANK",
            fix="start as many processes on a node as it has devices, or train on CPUs with DS_ACCELERATOR=cpu",
        )
    accelerator.set_device(index)


def shares_device() -> bool:
    """Whether there are more ranks on this machine than devices: they cannot speak NCCL then."""
    return local_ranks(os.environ) > int(get_accelerator().device_count())


# Note [let go]: gloo's threads let go of the tensors of a collective just after it is over, and need the interpreter for that;
# a group that is destroyed in this very moment holds the interpreter, and waits for them for ever.
_LET_GO_S = 0.1


def shut_down() -> None:
    """End the process group, if there is one. Without this its threads may outlive what they need, and abort the process."""
    if dist.is_initialized():
        if dist.get_world_size() > 1:
            time.sleep(_LET_GO_S)
        dist.destroy_process_group()


def _shut_down_at_exit() -> None:
    """A script need not do it. NCCL is left alone: it might wait for ranks that a failing one leaves behind."""
    if dist.is_initialized() and "nccl" not in dist.get_backend_config():
        shut_down()


atexit.register(_shut_down_at_exit)


def get_local_rank() -> int:
    """Which process this is among those of its node, as its launcher counts; 0 for a process that is alone."""
    here = standing()
    return number(os.environ, "LOCAL_RANK", 0) if here is None else here.rank
