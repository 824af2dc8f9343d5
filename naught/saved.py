"""Saved: tensors that a backward will need, and that rest elsewhere until then. Autograd asks for each as it saves it, and again
when it needs it: what checkpoints keep of a forward, or all that it keeps."""

from __future__ import annotations

import logging
import sys
import weakref
from contextlib import AbstractContextManager
from types import FrameType

import torch
import torch.utils.checkpoint
from torch import Tensor, nn

from naught.activation_rests import Rest, Resting
from naught.comm import is_dtensor

__all__ = ["Saves"]

_LOG = logging.getLogger("naught")
_BETWEEN = {__file__, torch.autograd.function.__file__}  # between what saves a tensor and us
_LEAST_BYTES = 1 << 16  # what is smaller stays: moving it would cost more than it gains


class _Saved:
    """What autograd holds instead of a tensor."""

    __slots__ = ("__weakref__", "resting", "shape", "was_back")

    def __init__(self, resting: Resting, shape: torch.Size) -> None:
        self.resting, self.shape = resting, shape
        self.was_back = False  # it may live on for a while, as one of several that an operation needs


class Saves:
    """Puts tensors away while a forward runs, those that checkpoints keep or all of them, and brings them back: the last one
    first, and the one before it meanwhile."""

    def __init__(self, rest: Rest, *, everything: bool = False) -> None:
        self.rest, self.everything = rest, everything
        self.order: list[weakref.ref[_Saved]] = []
        self.put_any = self.told = False

    def look_back(self) -> None:
        """After the first step: whoever has asked for this and has nothing of it should know."""
        if not self.put_any and not self.told:
            _LOG.warning(
                "activations are to rest elsewhere, and none did in the first step: the model has no checkpoints, or what they "
                'keep is smaller than %d KiB. Set naught.saved_tensors to "all" for a model without them',
                _LEAST_BYTES >> 10,
            )
        self.told = True

    def open(self) -> AbstractContextManager[None]:
        """While a forward runs."""
        self.order = [ref for ref in self.order if ref() is not None]
        return torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    def _pack(self, tensor: Tensor) -> Tensor | _Saved:
        if not self._goes(tensor):
            # An operation that saves its own result would hold itself by it: what nobody goes back through would stay for ever.
            return tensor if tensor.is_leaf else tensor.detach()
        saved = _Saved(self.rest.put(tensor.detach().contiguous().view(-1)), tensor.shape)
        self.order.append(weakref.ref(saved))
        self.put_any = True
        return saved

    def _goes(self, tensor: Tensor) -> bool:
        """Weights stay, and what is a part of them: an engine moves those itself."""
        if tensor.nbytes < _LEAST_BYTES or not tensor.is_floating_point() or isinstance(tensor, nn.Parameter):
            return False
        if is_dtensor(tensor):  # whose part, and whether it is a weight's, torch knows
            return False
        if self.everything:
            return not isinstance(tensor._base, nn.Parameter)
        return _by_a_checkpoint()

    def _unpack(self, held: Tensor | _Saved) -> Tensor:
        if isinstance(held, Tensor):
            return held
        held.was_back = True
        before: _Saved | None = None
        while self.order and ((before := self.order[-1]()) is None or before.was_back):
            self.order.pop()
            before = None
        found = held.resting.back().view(held.shape)
        if before is not None:
            before.resting.ask()
        return found


def _by_a_checkpoint() -> bool:
    """Whether it is torch's checkpoint that saves a tensor: its inputs, from which it computes the rest again."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename in _BETWEEN:
        frame = frame.f_back
    return frame is not None and frame.f_code.co_filename == torch.utils.checkpoint.__file__
