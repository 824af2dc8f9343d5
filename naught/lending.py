"""Lending: parameters that are whole and the user's for a while."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from naught.amiss import tampered
from naught.errors import UsageError
from naught.schedule import Schedule
from naught.unit import Unit

__all__ = ["Lending"]


class Lending:
    """Lends units and takes them back. `homes` tells the unit of each parameter."""

    def __init__(self, schedule: Schedule, homes: Mapping[nn.Parameter, str]) -> None:
        self.schedule, self.homes = schedule, homes
        self.lent: set[str] = set()

    @contextmanager
    def open(self, params: Iterable[nn.Parameter] | None, writer: int | None, *, keeps: bool = True) -> Iterator[None]:
        """While open, the units of these parameters, or all, are whole and the user's. What the writer's rank has written
        is kept; without one, all ranks must write the same. What is lent already stays so. Unless it `keeps` what is written they
        are lent for reading."""
        wanted = self._wanted(params)
        if writer is not None and not 0 <= writer < self.schedule.group.size:
            raise UsageError(f"there is no rank {writer}", fix=f"ranks go from 0 to {self.schedule.group.size - 1}")
        source = None if writer is None else self.schedule.group.seat_of(writer)
        units = [unit for unit in wanted if unit.name not in self.lent]
        fault = tampered(units)
        if any(unit.lazy or unit.placement.param.split for unit in units):  # else a rank may do this by itself
            self.schedule.gather_anew()
        gathers = any(unit.placement.param.split or not unit.present for unit in units)
        if gathers:
            self.schedule.group.raise_together(fault)
        elif fault is not None:  # nothing is to be gathered: a rank may do this by itself
            raise fault
        held = self._held_anywhere(units)
        for unit in units:
            unit.lend()
        if gathers:
            try:
                self.schedule.group.look_for_faults(midway=self.schedule.is_midway)
            except Exception:  # what is missing must not be taken back for what was written
                for unit in units:
                    unit.forget_loan()
                raise
        mine = {unit.name for unit in units}
        self.lent |= mine
        try:
            yield
        finally:
            self.lent -= mine
            if source is not None:
                for unit in wanted:
                    unit.spread(source)
            for unit in units:
                if keeps:
                    unit.take_back()
                else:
                    unit.forget_loan()
            for unit in held:  # a pass that is still open counts on them
                unit.make_whole()

    def _wanted(self, params: Iterable[nn.Parameter] | None) -> list[Unit]:
        """In the order of the units, which is the same on every rank."""
        if params is None:
            return list(self.schedule.units.values())
        names: set[str] = set()
        for param in params:
            if param not in self.homes:
                raise UsageError(
                    f"a parameter of shape {list(param.shape)} is not one of the engine's", fix="give parameters of its module"
                )
            names.add(self.homes[param])
        return [unit for name, unit in self.schedule.units.items() if name in names]

    def _held_anywhere(self, units: Sequence[Unit]) -> list[Unit]:
        """Split units that some rank holds, or has begun to gather, for the backward that is to come."""
        if self.schedule.current is None or not units:
            return []
        held = [unit.placement.param.split and (unit.present or bool(unit.pending)) for unit in units]
        anywhere = self.schedule.group.exchange(torch.tensor(held, dtype=torch.int64)).amax(0).tolist()
        return [unit for unit, held in zip(units, anywhere, strict=True) if held]
