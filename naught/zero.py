"""Zero: DeepSpeed's names for what a script does to parameters that are split."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, ExitStack
from types import TracebackType
from typing import Any

from torch import nn

from naught.config import load
from naught.engine import Engine, engines
from naught.hints import register_external_parameter, unregister_external_parameter
from naught.needs import (
    estimate_zero2_model_states_mem_needs,
    estimate_zero2_model_states_mem_needs_all_cold,
    estimate_zero2_model_states_mem_needs_all_live,
    estimate_zero3_model_states_mem_needs,
    estimate_zero3_model_states_mem_needs_all_cold,
    estimate_zero3_model_states_mem_needs_all_live,
)
from naught.tiled import TiledLinear, chunked_cross_entropy, tile_linears

__all__ = [
    "GatheredParameters",
    "Init",
    "TiledLinear",
    "chunked_cross_entropy",
    "estimate_zero2_model_states_mem_needs",
    "estimate_zero2_model_states_mem_needs_all_cold",
    "estimate_zero2_model_states_mem_needs_all_live",
    "estimate_zero3_model_states_mem_needs",
    "estimate_zero3_model_states_mem_needs_all_cold",
    "estimate_zero3_model_states_mem_needs_all_live",
    "register_external_parameter",
    "tile_linears",
    "unregister_external_parameter",
]


class Init(AbstractContextManager["Init"]):
    """A context for building a model that will be split. DeepSpeed's signature; so far models inside are built whole, and
    `initialize` splits them a unit at a time. To build one that does not fit, build it on the meta device:
    `with torch.device("meta")`.

    Weights keep their 32 bits until `initialize` lowers them, so masters start from numbers that were not rounded.
    """

    def __init__(
        self,
        module: nn.Module | None = None,
        data_parallel_group: Any = None,
        mem_efficient_linear: bool = True,
        remote_device: str | None = None,
        pin_memory: bool = False,
        config_dict_or_path: Any = None,
        config: Any = None,
        enabled: bool = True,
        dtype: Any = None,
        mpu: Any = None,
        **_: Any,
    ) -> None:
        del module, data_parallel_group, mem_efficient_linear, remote_device, pin_memory, dtype, mpu
        source = config_dict_or_path if config_dict_or_path is not None else config
        if enabled and source is not None:
            load(source)  # a mistake in it is told before a long construction, not after

    def __exit__(self, *_: object) -> None:
        return None


class GatheredParameters(AbstractContextManager[None]):
    """While open, these parameters are whole. With a `modifier_rank`, what that rank writes is kept on all; without one,
    all ranks must write the same. Parameters that belong to no engine are whole anyway."""

    def __init__(
        self,
        params: nn.Parameter | nn.Module | Iterable[nn.Parameter] | None,
        modifier_rank: int | None = None,
        fwd_module: nn.Module | None = None,
        enabled: bool = True,
    ) -> None:
        del fwd_module
        self.params = _listed(params) if enabled and params is not None else []
        self.writer = modifier_rank
        self.open = ExitStack()

    def __enter__(self) -> None:
        for engine in _engines_of(self.params):
            mine = [param for param in self.params if engines.owner_of(param) is engine]
            self.open.enter_context(engine.gathered(mine, writer=self.writer))

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.open.__exit__(kind, error, trace)


def _listed(params: nn.Parameter | nn.Module | Iterable[nn.Parameter]) -> list[nn.Parameter]:
    if isinstance(params, nn.Parameter):
        return [params]
    return list(params.parameters() if isinstance(params, nn.Module) else params)


def _engines_of(params: Iterable[nn.Parameter]) -> list[Engine]:
    """Each once, in the order of their first parameter: all ranks must open them alike."""
    found = (engines.owner_of(param) for param in params)
    return list({id(engine): engine for engine in found if engine is not None}.values())
