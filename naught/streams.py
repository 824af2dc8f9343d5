"""Streams: orders of their own beside a device's, and host memory that a device can reach by itself. A CPU has one order only:
there everything happens at once. Beside `devices`, the only file that calls torch.cuda."""

from __future__ import annotations

import ctypes
import logging
import mmap
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor

__all__ = ["HostCopies", "Lane", "Point", "Slab", "here", "host_of", "stand_on"]

_LOG = logging.getLogger("naught")


class Point:
    """A point in an order, which others can wait for."""

    __slots__ = ("event",)

    def __init__(self, stream: torch.cuda.Stream | None, *, asleep: bool = False) -> None:
        self.event: torch.cuda.Event | None = None  # None: it was reached when it was made
        if stream is not None:
            self.event = torch.cuda.Event(blocking=asleep)  # type: ignore[no-untyped-call]
            self.event.record(stream)

    @property
    def reached(self) -> bool:
        return self.event is None or self.event.query()  # type: ignore[no-untyped-call]

    def hold(self, device: torch.device) -> None:
        """What this thread asks of the device from here on comes later."""
        if self.event is not None:
            torch.cuda.current_stream(device).wait_event(self.event)

    def wait(self) -> None:
        """Keep the host until it is reached."""
        if self.event is not None:
            self.event.synchronize()


def here(device: torch.device) -> Point:
    """Where this thread's order on a device is now."""
    return Point(torch.cuda.current_stream(device) if device.type == "cuda" else None)


def stand_on(device: torch.device) -> None:
    """Have this thread ask a device for what it does not say otherwise: a new one stands on the first, and takes memory there."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def host_of(device: torch.device) -> torch.device:
    """Where a device's host keeps its tensors; the host of what has no contents has none either."""
    return device if device.type == "meta" else torch.device("cpu")


class Lane:
    """An order beside the device's own. What is computed in an urgent one goes before what is waiting elsewhere."""

    def __init__(self, device: torch.device, *, urgent: bool = False) -> None:
        self.stream: torch.cuda.Stream | None = None  # None: there is only one order
        if device.type == "cuda":
            self.stream = torch.cuda.Stream(device, priority=-1 if urgent else 0)  # type: ignore[no-untyped-call]

    def follow(self, point: Point) -> None:
        """What is asked of this lane from here on comes after a point of another order."""
        if self.stream is not None and point.event is not None:
            self.stream.wait_event(point.event)

    @contextmanager
    def open(self) -> Iterator[None]:
        """What this thread asks of the device while this is open is asked of the lane."""
        if self.stream is None:
            yield
            return
        # A thread that has not chosen a device is on the first one: it would go back there without this, and take memory of it.
        with torch.cuda.device(self.stream.device), torch.cuda.stream(self.stream):
            yield

    def point(self, *, asleep: bool = False) -> Point:
        """Where it is now. Threads that wait for it `asleep` leave their core to others, and wake some microseconds later."""
        return Point(self.stream, asleep=asleep)


class HostCopies:
    """Copies of tensors in host memory. Made inside of `beside`, in a thread, they come after all that the device had been
    asked before `follow`, and nothing waits for them."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.lane = device, Lane(device)

    def follow(self) -> None:
        self.lane.follow(here(self.device))

    def beside(self) -> AbstractContextManager[None]:
        return self.lane.open()

    def copy(self, tensor: Tensor) -> Tensor:
        """Under way until `arrive`."""
        pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=self.device.type == "cuda")
        return pinned.copy_(tensor, non_blocking=True)

    def arrive(self) -> None:
        """Wait for the copies that this thread has asked for."""
        here(self.device).wait()


_HUGE_PAGES = 14  # MADV_HUGEPAGE: fewer entries for the processor to look up, and registering is three times faster
_LARGE_BYTES = 1 << 20


class Slab:
    """Host memory of exactly so many bytes, zero at first. Registered, a device copies from and to it by itself; torch's own
    allocator of such memory would round up to a power of two."""

    def __init__(self, nbytes: int, *, register: bool) -> None:
        self.memory = mmap.mmap(-1, max(nbytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        # A process that is forked, such as a loader of data, has no use for it. It would share every page until the next update,
        # which had to copy all of them; and a device might go on using the page that the child has got.
        self.memory.madvise(mmap.MADV_DONTFORK)
        if nbytes >= _LARGE_BYTES:
            self.memory.madvise(_HUGE_PAGES)
        # What tensors hold. It goes before the mapping does, so its end is the time to unregister.
        self.view = (ctypes.c_char * max(nbytes, 1)).from_buffer(self.memory)
        address = ctypes.addressof(self.view)
        if register and nbytes > 0 and _register(address, nbytes):
            weakref.finalize(self.view, _unregister, address).atexit = False  # the driver may be gone by then

    def tensor(self, numel: int, dtype: torch.dtype) -> Tensor:
        return torch.frombuffer(self.view, dtype=dtype, count=numel)


def _register(address: int, nbytes: int) -> bool:
    code = torch.cuda.cudart().cudaHostRegister(address, nbytes, 0)  # type: ignore[no-untyped-call]
    if int(code) != 0:
        _LOG.warning("the driver does not register %d bytes of host memory (%s): copies will be slow", nbytes, code)
    return int(code) == 0


def _unregister(address: int) -> None:
    torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]
