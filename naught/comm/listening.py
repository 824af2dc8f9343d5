"""Listening: the store in which ranks meet, open on no other interface than the one that MASTER_ADDR names."""

from __future__ import annotations

import ipaddress
import os
import socket
from datetime import timedelta

from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import Store

from naught.errors import UsageError
from naught.seats import Seat

__all__ = ["meeting_store", "stay_on_this_machine"]

_INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def meeting_store(seat: Seat, timeout: timedelta) -> Store | None:
    """Rank 0 listens where MASTER_ADDR says, and the others call there. None: torchrun has a store of its own.

    torch's own way would have rank 0 listen on every interface.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return None
    listens = seat.rank == 0
    listener = _listen(seat) if listens else None
    store: Store = TCPStore(
        seat.address, seat.port, seat.world, listens, timeout, wait_for_workers=False, master_listen_fd=listener
    )
    return store


def _listen(seat: Seat) -> int:
    """An open socket of rank 0, which the store closes."""
    try:
        family, _, _, _, address = socket.getaddrinfo(seat.address, seat.port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise UsageError(
            f'nobody knows "{seat.address}": {error}', where="MASTER_ADDR", fix="give an address or a known name"
        ) from error
    if _is_loopback(str(address[0])) and not _says_loopback(seat.address) and _spans_machines():
        raise UsageError(
            f"{seat.address} is {address[0]} on its own machine, where no other can call it",
            where="MASTER_ADDR",
            fix="give the machine's address on the network",
        )
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(max(128, seat.world))
    except OSError as error:
        listener.close()
        raise UsageError(
            f"rank 0 cannot listen at {seat.address}:{seat.port}: {error.strerror or error}",
            where="MASTER_ADDR, MASTER_PORT",
            fix="give an address of the machine on which rank 0 runs, and a port that nobody uses",
        ) from error
    return listener.detach()


def stay_on_this_machine(seat: Seat) -> None:
    """Ranks that meet on the loopback are all here: they also talk there, unless somebody has named an interface."""
    if _says_loopback(seat.address):
        loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), None)
        for variable in _INTERFACES:
            if loopback is not None:
                os.environ.setdefault(variable, loopback)


def _says_loopback(address: str) -> bool:
    return address == "localhost" or _is_loopback(address)


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False  # a name


def _spans_machines() -> bool:
    """As far as a launcher has told."""
    env = os.environ
    nodes = env.get("SLURM_STEP_NUM_NODES") or env.get("SLURM_NNODES") or "1"
    local = env.get("LOCAL_WORLD_SIZE") or env.get("OMPI_COMM_WORLD_LOCAL_SIZE")
    return nodes != "1" or (local is not None and local != env.get("WORLD_SIZE"))
