"""Host update: what rests on the host, or on disk, is updated there, beside everything else."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from naught.disk_sum import DiskSum
from naught.host_crew import Crew
from naught.rules import Part
from naught.segment import Segment
from naught.spill import Stored
from naught.stash import HostSum
from naught.states import Updating
from naught.tile_update import TileUpdate
from naught.torn import BESIDE_TRAINING, tearing

__all__ = ["update_beside"]

_PIECE_NUMEL = 1 << 22  # that a thread updates at a time: with less, threads wait for each other's Python
_ROOM_NUMEL = 1 << 20  # the same of what is widened, scaled or unpacked first, which the rule finds nearer than in memory then


def update_beside(segment: Segment, how: Updating, used: Sequence[bool], coefficient: float, *, delayed: bool) -> None:
    """Have a segment updated on the host, by whichever threads, a piece at a time. Its last update may still be under way."""
    if isinstance(segment.kept.master, Stored):
        _update_on_disk(segment, how, used, coefficient)
        return
    stash, host, states = segment.grads.owned, segment.home.host, segment.kept
    assert isinstance(stash, HostSum)
    assert stash.sent is not None
    assert states.masters is not None
    assert host is not None
    assert segment.beside is not None
    crew, masters, home, arrived = host.crew, states.masters, stash.home, stash.sent.arrived
    most_numel = _ROOM_NUMEL if states.rest.small else _PIECE_NUMEL
    cuts = states.cuts(how._replace(most_numel=min(how.most_numel, most_numel)), used)

    def update_piece(at: int) -> None:
        arrived.wait()
        with tearing(BESIDE_TRAINING):
            _take(states.part(cuts[at], masters, home), how, coefficient, crew)

    if how.rule.defers:
        segment.update_beside(len(cuts), update_piece, delayed=delayed)
        return
    segment.beside.wait()
    for at in range(len(cuts)):
        update_piece(at)
    segment.written()


def _update_on_disk(segment: Segment, how: Updating, used: Sequence[bool], coefficient: float) -> None:
    """Have a segment updated whose states rest on disk: each tile is read, updated, and written by one thread, and while one
    waits for the disk others work."""
    stash, beside = segment.grads.owned, segment.beside
    assert isinstance(stash, HostSum | DiskSum)
    assert beside is not None
    cuts = segment.kept.cuts(how, used)
    update_tile = TileUpdate(segment, stash.due(), partial(how.take, coefficient=coefficient))
    pieces = update_tile.pieces(cuts, apart=how.rule.apart)

    def update_piece(at: int) -> None:
        with tearing(BESIDE_TRAINING):
            update_tile.do(pieces[at])

    if how.rule.defers:
        segment.update_on_disk(len(pieces), update_piece)
        return
    with segment.home.group.noting():
        beside.wait()
        segment.update_on_disk(0, lambda _: None)
        for at in range(len(pieces)):
            update_piece(at)


def _take(part: Part, how: Updating, coefficient: float, crew: Crew) -> None:
    """Apply the rule to a part. Its gradients stay as they are: those that have to be widened or scaled are so in a room, a block
    at a time, since the host's memory is what an update waits for."""
    hyper = how.hypers[part.group]
    if part.grads.dtype == torch.float32 and coefficient == 1.0:
        how.rule.update([part], hyper)
    else:
        for block in [part] if how.rule.apart else part.split(_ROOM_NUMEL):
            room = crew.scratch(block.grads.numel())
            how.rule.update([block._replace(grads=_scaled(block.grads, coefficient, room))], hyper)
    for do in part.after:
        do()


def _scaled(grads: Tensor, coefficient: float, room: Tensor) -> Tensor:
    """In 32 bits, in a room."""
    if grads.dtype == torch.float32:
        return torch.mul(grads, coefficient, out=room)
    return room.copy_(grads).mul_(coefficient) if coefficient != 1.0 else room.copy_(grads)
