"""Zero: DeepSpeed's names for what a script does to parameters that are split."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import AbstractContextManager, ExitStack
from types import TracebackType
from typing import Any, cast

import torch
from torch import Tensor, nn

from naught import comm
from naught.accelerator import get_accelerator
from naught.born import Keeping, Nursery, lend, split, take_back
from naught.comm import Ledger, lineup_of, make_group
from naught.config import Config, disk_folder, load, placement_of
from naught.dividing import refuse_divided, tile_linears
from naught.engine import Engine, engines
from naught.errors import UsageError
from naught.flat import Meter
from naught.hints import register_external_parameter, unregister_external_parameter
from naught.local_parts import part_of
from naught.needs import (
    estimate_zero2_model_states_mem_needs,
    estimate_zero2_model_states_mem_needs_all_cold,
    estimate_zero2_model_states_mem_needs_all_live,
    estimate_zero3_model_states_mem_needs,
    estimate_zero3_model_states_mem_needs_all_cold,
    estimate_zero3_model_states_mem_needs_all_live,
)
from naught.placement import Tier
from naught.seats import find_seat
from naught.spill import Stored
from naught.tiers import disk_side
from naught.tiled import TiledEmbedding, TiledLinear, chunked_cross_entropy
from naught.vertical import Vertical

__all__ = [
    "GatheredParameters",
    "Init",
    "TiledEmbedding",
    "TiledLinear",
    "Vertical",
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


_WINDOW_BYTES = 1 << 30


class Init(AbstractContextManager["Init"]):
    """A context for building a model that does not fit. Parameters are split over the ranks while it is built: those that were
    touched last are whole, up to `window_bytes` of them, and every rank keeps its part of the others in host memory, or on disk
    where the configuration has parameters there. Initializers that run over the model afterwards, inside of the context, find
    them whole one after the other, and draw the numbers that they would draw without it. Outside they read as NaN until
    `initialize` has the model; look at them inside of `GatheredParameters`. All ranks must build the same model.

    DeepSpeed's signature. A `module` that is built already is split at once. Weights keep their 32 bits until `initialize`
    lowers them, so masters start from numbers that were not rounded.
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
        window_bytes: int = _WINDOW_BYTES,
        **_: Any,
    ) -> None:
        del data_parallel_group, mem_efficient_linear, remote_device, pin_memory, dtype
        if enabled and lineup_of(None, mpu) is not None:
            raise UsageError(
                "a model that several ranks have together is not split while it is built", fix="build it without Init"
            )
        source = config_dict_or_path if config_dict_or_path is not None else config
        self.nursery: Nursery | None = None  # None: models are built as ever
        if not enabled:
            return
        settings = None if source is None else load(source)  # a mistake in it is told before a long construction
        if not comm.is_initialized() and find_seat(os.environ) is not None:
            comm.init_distributed()
        self.nursery = Nursery(_keeping_of(settings), window_bytes)
        if module is not None:
            for param in module.parameters():
                split(param, self.nursery.keeping)

    def __enter__(self) -> Init:
        if self.nursery is not None:
            self.nursery.__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        if self.nursery is not None:
            self.nursery.__exit__(*raised)


def _keeping_of(settings: Config | None) -> Keeping:
    """Parts in host memory, or on disk where the configuration has parameters there."""
    accelerator = torch.device(get_accelerator().current_device_name())
    desk = make_group(Ledger(), accelerator, reduce_numel=1).desk
    group = make_group(Ledger(), desk, reduce_numel=1)
    folder = None if settings is None or placement_of(settings).param.tier is not Tier.DISK else disk_folder(settings)
    if settings is None or folder is None:
        return Keeping(group, desk, lambda part: part.cpu().clone())
    disk = disk_side(settings, torch.device("cpu"), Meter(), settings.aio.block_size // 4)
    assert disk is not None

    def put_away(part: Tensor) -> Stored:
        stored = disk.take(part.numel(), part.dtype, "weights")
        stored.fill(part)
        return stored

    return Keeping(group, desk, put_away)


class GatheredParameters(AbstractContextManager[None]):
    """While open, these parameters are whole, those of an engine and those that were built under `Init`. With a `modifier_rank`,
    what that rank writes is kept on all; without one, all ranks must write the same."""

    def __init__(
        self,
        params: nn.Parameter | nn.Module | Iterable[nn.Parameter] | None,
        modifier_rank: int | None = None,
        fwd_module: nn.Module | None = None,
        enabled: bool = True,
    ) -> None:
        del fwd_module
        self.params = _listed(params) if enabled and params is not None else []
        refuse_divided(self.params)
        self.writer = modifier_rank
        self.open = ExitStack()

    def __enter__(self) -> None:
        lent = lend(self.params)
        self.open.callback(lambda: take_back(lent, self.writer))
        for engine in _engines_of(self.params):
            mine = [param for param in self.params if engines.owner_of(param) is engine]
            self.open.enter_context(engine.gathered(mine, writer=self.writer))

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.open.__exit__(kind, error, trace)


def _listed(params: nn.Parameter | nn.Module | Iterable[nn.Parameter]) -> list[nn.Parameter]:
    if isinstance(params, Tensor):
        return [part_of(cast(nn.Parameter, params))]
    return [part_of(param) for param in (params.parameters() if isinstance(params, nn.Module) else params)]


def _engines_of(params: Iterable[nn.Parameter]) -> list[Engine]:
    """Each once, in the order of their first parameter: all ranks must open them alike."""
    found = (engines.owner_of(param) for param in params)
    return list({id(engine): engine for engine in found if engine is not None}.values())
