"""Snapshot: copies of tensors in host memory, a block at a time: while they are written, or before training goes on."""

from __future__ import annotations

import ctypes
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from naught.devices import free_host_bytes
from naught.errors import StorageError
from naught.quantity import show_bytes
from naught.stored_part import StoredPart
from naught.streams import HostCopies

__all__ = ["Kept", "Snapshot", "bytes_of", "refuse_too_large"]

_BLOCK_BYTES = 16 << 20  # a power of two: pinned memory is handed out in those


def refuse_too_large(nbytes: int) -> None:
    """Copies of so many bytes must find room in this host's memory."""
    free = free_host_bytes()
    if nbytes > free:
        raise StorageError(
            f"saving beside training needs {show_bytes(nbytes)} of this host's memory, and {show_bytes(free)} are free",
            fix="save with asynchronous=False",
        )


class Kept(NamedTuple):
    """A tensor that is to be saved. What is private only a step, or what waits for copies like one, ever changes."""

    tensor: Tensor | StoredPart
    private: bool


def bytes_of(kept: Sequence[Kept]) -> Iterator[memoryview]:
    """What a file of these tensors holds, each block brought to the host when it is its turn."""
    device = next((tensor.device for tensor, _ in kept if tensor.device.type != "cpu"), torch.device("cpu"))
    host = HostCopies(device)
    for tensor, _ in kept:
        for block in _blocks(tensor):
            if isinstance(block, StoredPart):
                yield _raw(block.cpu())
            elif block.device.type == "cpu":
                yield _raw(block)
            else:
                copy = host.copy(block)
                host.arrive()
                yield _raw(copy)


class Snapshot:
    """Copies for a file that is written while training goes on. What a user can reach is copied at once; the rest while
    the next micro-batch is computed, and nobody changes it before it `settled`."""

    def __init__(self, kept: Sequence[Kept], device: torch.device) -> None:
        self.nbytes = sum(tensor.nbytes for tensor, _ in kept)
        self.settled = threading.Event()
        self.host = HostCopies(device)
        pairs = [(block, private) for tensor, private in kept for block in _blocks(tensor)]
        self.waiting = [block if private else None for block, private in pairs]
        self.copies: deque[Tensor | None] = deque(None if private else self._copy(block) for block, private in pairs)
        self.host.follow()

    def let_go(self) -> None:
        """It is written, or never will be: nobody waits for it any more, and its memory is free."""
        self.waiting.clear()
        self.copies.clear()
        self.settled.set()

    def bytes(self) -> Iterator[memoryview]:
        """What a file holds; for the thread that writes it, and once: a copy is let go when it has been written. All of it is
        copied first: somebody may be waiting to change it."""
        self._copy_the_rest()
        return self._written_once()

    def _written_once(self) -> Iterator[memoryview]:
        while self.copies:
            block = self.copies.popleft()
            assert block is not None
            yield _raw(block)

    def _copy_the_rest(self) -> None:
        try:
            with self.host.beside():
                for at, block in enumerate(self.waiting):
                    if block is not None:
                        self.copies[at] = self._copy(block)
                self.host.arrive()
        finally:
            self.waiting.clear()
            self.settled.set()

    def _copy(self, block: Tensor | StoredPart) -> Tensor:
        return block.cpu() if isinstance(block, StoredPart) else self.host.copy(block)


def _blocks(tensor: Tensor | StoredPart) -> Iterable[Tensor | StoredPart]:
    if isinstance(tensor, StoredPart):
        return tensor.split()
    return torch.split(tensor.detach(), max(1, _BLOCK_BYTES // tensor.element_size())) if tensor.numel() else ()


def _raw(block: Tensor) -> memoryview:
    """A tensor's own bytes. Not by numpy(): a storage that numpy has seen can never be freed in its life."""
    raw = (ctypes.c_char * block.nbytes).from_address(block.data_ptr())
    raw.tensor = block  # type: ignore[attr-defined]  # which lives as long as this
    return memoryview(raw).cast("B")
