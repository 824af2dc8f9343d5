"""Local parts: a model that several ranks have together, as the parts that this one has.

Parameters that are torch's DTensors become plain ones of what this rank has of them, and keep their names. Modules go on to see
DTensors: one is made of the part whenever a module asks for its parameter. Those that somebody has cut by hand, as Megatron's
layers are, are plain already and carry marks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, cast

from torch import Tensor, nn

from naught.comm import Lineup, Whole, is_dtensor, local_of
from naught.errors import ModelError
from naught.within import Within

__all__ = ["has_dtensors", "is_repeated", "localize", "part_of", "parts_within", "put_back", "refuse_parts"]

_WHOLES = "_naught_wholes"  # of a module: what its parameters are of, by their short names
_MARKS = ("tensor_model_parallel", "model_parallel")  # of a parameter that was cut by hand


def has_dtensors(model: nn.Module) -> bool:
    return any(map(is_dtensor, model.parameters())) or any(_WHOLES in vars(module) for module in model.modules())


def refuse_parts(model: nn.Module, lineup: Lineup) -> None:
    """Before anything changes: what cannot be trained in parts."""
    cut = False
    for name, param in model.named_parameters(remove_duplicate=False):
        if is_dtensor(param):
            cut = _whole_of(param, name, lineup).dim is not None or cut
        elif any(getattr(param, mark, False) for mark in _MARKS):
            cut = _dim_by_hand(param, name) >= 0
    for name, buffer in model.named_buffers():
        if is_dtensor(buffer):
            raise ModelError(f'buffer "{name}" is a DTensor', fix="keep it out of the modules that are parallelized")
    if not cut:
        raise ModelError(
            "several ranks are to have a model together, and no parameter is cut",
            fix="parallelize the model first, or leave mesh and mpu out",
        )


def localize(model: nn.Module, lineup: Lineup) -> dict[nn.Parameter, list[nn.Parameter]]:
    """Put plain parameters in the place of DTensors. Returns them by what they have replaced."""
    found: dict[nn.Parameter, list[nn.Parameter]] = {}
    for name, module in model.named_modules():
        wholes = {}
        for short, param in module._parameters.items():
            if param is None or not is_dtensor(param):
                continue
            wholes[short] = _whole_of(param, f"{name}.{short}".removeprefix("."), lineup)
            if param not in found:
                found[param] = [nn.Parameter(local_of(param), param.requires_grad)]
            module._parameters[short] = found[param][0]
        if wholes:
            setattr(module, _WHOLES, wholes)
            module.__class__ = _seeing(cast(Any, type(module)), tuple(wholes))
    return found


def _whole_of(param: nn.Parameter, name: str, lineup: Lineup) -> Whole:
    whole = Whole.around(param)
    if not whole.lies_on(lineup):
        raise ModelError(
            f'"{name}" lies on {whole.mesh}, which are not the ranks that have a model together',
            fix='parallelize the model over the mesh\'s other dimension: parallelize_module(model, mesh["tp"], plan)',
        )
    if param.is_meta:
        raise ModelError(f'"{name}" is a DTensor without contents', fix="call model.to_empty(device=...) and fill it first")
    if not whole.plain:
        raise ModelError(f'"{name}" is placed as {whole.placements[0]}, which is not trained', fix="use Shard or Replicate")
    if whole.dim is not None and param.shape[whole.dim] % lineup.model_size:
        raise ModelError(
            f'"{name}" {list(param.shape)} cannot be cut into {lineup.model_size} equal parts along dimension {whole.dim}',
            fix="pad that dimension, or have every rank keep all of it",
        )
    return whole


@cache
def _seeing(kind: type[nn.Module], names: tuple[str, ...]) -> type[nn.Module]:
    """The same class, of which some parameters are seen whole."""

    def seen(name: str) -> property:
        def get(module: nn.Module) -> Tensor:
            part = module._parameters[name]
            assert part is not None
            whole = cast(Whole, getattr(module, _WHOLES)[name]).of(part)
            whole.naught_part = part  # type: ignore[attr-defined]  # for whoever is given it instead of the parameter
            return whole

        return property(get)

    members: dict[str, Any] = {name: seen(name) for name in names}
    return type(kind.__name__, (kind,), {**members, "__module__": kind.__module__, "__qualname__": kind.__qualname__})


def part_of(tensor: nn.Parameter) -> nn.Parameter:
    """The parameter that this is, or was made of."""
    return cast(nn.Parameter, getattr(tensor, "naught_part", tensor))


def put_back(model: nn.Module) -> dict[nn.Parameter, list[nn.Parameter]]:
    """Give modules DTensors again, with what their parts hold now. Returns them by what they have replaced."""
    made: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        wholes: dict[str, Whole] = module.__dict__.pop(_WHOLES, {})
        for short, whole in wholes.items():
            part = module._parameters[short]
            assert part is not None
            if part not in made:
                made[part] = nn.Parameter(whole.of(part.detach()), part.requires_grad)
            module._parameters[short] = made[part]
        if wholes:
            module.__class__ = type(module).__base__  # type: ignore[assignment]
    return {part: [whole] for part, whole in made.items()}


def is_repeated(model: nn.Module, lineup: Lineup | None) -> Callable[[nn.Parameter], bool]:
    """Whether all ranks that have a model together have a parameter, and not each a part of it."""
    if lineup is None:
        return lambda _: False
    cut = {id(param) for _, param, whole in _parts(model) if whole is None or whole.dim is not None}
    return lambda param: id(param) not in cut


def _parts(model: nn.Module) -> Iterator[tuple[str, nn.Parameter, Whole | None]]:
    """Parameters, by all of their names, that are of others; None: they were cut by hand."""
    for name, module in model.named_modules():
        wholes: dict[str, Whole] = getattr(module, _WHOLES, {})
        for short, param in module._parameters.items():
            if param is not None and (short in wholes or any(getattr(param, mark, False) for mark in _MARKS)):
                yield f"{name}.{short}".removeprefix("."), param, wholes.get(short)


def parts_within(model: nn.Module, lineup: Lineup | None) -> dict[str, Within]:
    """Where what this rank has lies in what the ranks have together, by the parameters' names."""
    found: dict[str, Within] = {}
    for name, param, whole in _parts(model) if lineup is not None else ():
        assert lineup is not None
        dim = _dim_by_hand(param, name) if whole is None else whole.dim
        if dim is not None:
            shape = [extent * (lineup.model_size if at == dim else 1) for at, extent in enumerate(param.shape)]
            found[name] = Within.cut(name, tuple(shape), dim, lineup.model_rank, lineup.model_size)
    return found


def _dim_by_hand(param: nn.Parameter, name: str) -> int:
    dim = getattr(param, "partition_dim", None)
    if not isinstance(dim, int) or not 0 <= dim < param.ndim:
        raise ModelError(
            f'"{name}" is cut by hand, and nobody says along which dimension: it could not be put together',
            fix="set partition_dim of the parameter, as Megatron's layers do",
        )
    if getattr(param, "partition_stride", 1) != 1:
        raise ModelError(
            f'"{name}" is cut with a partition_stride of {param.partition_stride}: it could not be put together',  # type: ignore[attr-defined]
            fix="cut each of the matrices that it consists of by itself",
        )
    return dim
