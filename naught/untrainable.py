"""Untrainable: models that cannot be trained as they are, which is told before anything changes."""

from __future__ import annotations

from typing import NamedTuple

from torch import nn

from naught.born import splits
from naught.errors import ModelError, UsageError
from naught.precision import DTYPES

__all__ = ["refuse_model"]


def refuse_model(model: nn.Module) -> None:
    for name, param in model.named_parameters():
        if param.requires_grad and param.dtype not in DTYPES.values():
            raise UsageError(f'"{name}" is {param.dtype}, which is not trained', fix="call model.float() first")
        if not splits(param) and _is_expanded(param):
            if not param.is_meta and bool(param.isnan().any()):
                raise ModelError(
                    f'"{name}" has no weights: an engine whose update had failed could not give them back',
                    fix="build the model anew, and load a checkpoint",
                )
            if param.requires_grad:
                fix = "call param.data = param.data.clone()"
                raise ModelError(f'"{name}" was expanded: many of its elements are one', fix=fix)
    _refuse_shared(model)
    for name, module in model.named_modules():
        if not isinstance(module, nn.Embedding | nn.EmbeddingBag):
            continue
        if module.sparse:
            raise ModelError(f'"{name}" has sparse gradients, which do not go into a flat', fix="set sparse=False")
        if module.max_norm is not None:
            raise ModelError(
                f'"{name}" rewrites its weights in its forward (max_norm), on each rank by its own batch: ranks would part',
                fix="set max_norm=None and scale the weights inside engine.gathered()",
            )


def _is_expanded(param: nn.Parameter) -> bool:
    return any(not stride and extent > 1 for stride, extent in zip(param.stride(), param.shape, strict=True))


class _Stretch(NamedTuple):
    """Where a parameter lies: in which storage, and from which byte to which."""

    storage: int
    start: int
    stop: int
    name: str

    @classmethod
    def of(cls, name: str, param: nn.Parameter) -> _Stretch:
        reach = 1 + sum((extent - 1) * stride for extent, stride in zip(param.shape, param.stride(), strict=True))
        start = param.storage_offset() * param.itemsize
        dense = reach == param.numel()  # else others may lie between its elements: its first one must do
        return cls(param.untyped_storage().data_ptr(), int(start), int(start) + (param.nbytes if dense else 1), name)


def _refuse_shared(model: nn.Module) -> None:
    """Two parameters that have memory in common would be trained apart, for each is moved into a flat."""
    params = {
        name: param for name, param in model.named_parameters() if param.numel() and not param.is_meta and not splits(param)
    }
    farthest: dict[bool, _Stretch] = {}  # that is trained, and that is not, of those that lie before
    for one in sorted(_Stretch.of(*each) for each in params.items()):
        trained = params[one.name].requires_grad
        for other in (farthest.get(True), farthest.get(False) if trained else None):
            if other is not None and other.storage == one.storage and one.start < other.stop:
                raise ModelError(
                    f'"{other.name}" and "{one.name}" are two parameters with the same memory, and would be trained apart',
                    fix="tie them by the parameter itself, as in head.weight = embedding.weight, not by its data",
                )
        before = farthest.get(trained)
        if before is None or before.storage != one.storage or before.stop < one.stop:
            farthest[trained] = one
