"""Own states: what every rank has for itself: the buffers of its modules, and its sources of random numbers."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from naught.accelerator import get_accelerator
from naught.answers import Answers

__all__ = ["BUFFER", "OWN", "RANDOM", "buffer_shapes", "kept_buffers", "own_tensors", "put_own"]

OWN = "own"  # their kind
BUFFER, RANDOM = "buffer:", "random:"  # what their names begin with


def own_tensors(engine: Answers) -> dict[str, Tensor]:
    """By name; copies, or the buffers themselves."""
    buffers = {f"{BUFFER}{name}": buffer for name, buffer in kept_buffers(engine).items()}
    return buffers | {f"{RANDOM}{name}": get() for name, (get, _) in _sources(engine).items()}


def buffer_shapes(engine: Answers) -> dict[str, tuple[int, ...]]:
    """Of the buffers that are saved, by the names of own states."""
    return {f"{BUFFER}{name}": tuple(buffer.shape) for name, buffer in kept_buffers(engine).items()}


def put_own(engine: Answers, found: Mapping[str, Tensor], *, random_too: bool) -> None:
    """Put back what was saved; sources of random numbers only where every rank gets its own."""
    for name, buffer in engine.module.named_buffers():
        saved = found.get(f"{BUFFER}{name}")
        if saved is not None and _is_spread(buffer):
            holder, _, short = name.rpartition(".")
            setattr(engine.module.get_submodule(holder), short, saved.reshape(buffer.shape).to(buffer))
        elif saved is not None:
            buffer.copy_(saved.reshape(buffer.shape))
    for name, (_, put) in _sources(engine).items() if random_too else ():
        saved = found.get(f"{RANDOM}{name}")
        if saved is not None:
            put(saved)


def _is_spread(buffer: Tensor) -> bool:
    """Whether one element of memory stands for several, as expand() makes them: it cannot be written to."""
    return any(stride == 0 and extent > 1 for stride, extent in zip(buffer.stride(), buffer.shape, strict=True))


def kept_buffers(engine: Answers) -> dict[str, Tensor]:
    """By name. Those that a module has said not to save are made anew by it."""
    found: dict[str, Tensor] = {}
    for name, buffer in engine.module.named_buffers():
        holder, _, short = name.rpartition(".")
        if short not in engine.module.get_submodule(holder)._non_persistent_buffers_set:
            found[name] = buffer
    return found


def _sources(engine: Answers) -> dict[str, tuple[Callable[[], Tensor], Callable[[Tensor], None]]]:
    found: dict[str, tuple[Callable[[], Tensor], Callable[[Tensor], None]]] = {
        "torch": (torch.get_rng_state, torch.set_rng_state),
        "python": (_python_state, _set_python_state),
    }
    if engine.device.type != "cpu":
        module = get_accelerator()
        found["device"] = (lambda: module.get_rng_state(engine.device), lambda state: module.set_rng_state(state, engine.device))
    return found


def _python_state() -> Tensor:
    """As whole numbers, of which every rank has as many."""
    version, numbers, gauss = random.getstate()
    (bits,) = struct.unpack("<q", struct.pack("<d", gauss or 0.0))
    return torch.tensor([version, gauss is not None, bits, *numbers], dtype=torch.int64)


def _set_python_state(state: Tensor) -> None:
    version, has_gauss, bits, *numbers = state.tolist()
    (gauss,) = struct.unpack("<d", struct.pack("<q", bits))
    random.setstate((version, tuple(numbers), gauss if has_gauss else None))
