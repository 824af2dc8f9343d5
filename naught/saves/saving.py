"""Saving: an engine's training becomes a checkpoint. Every rank writes what it has; all of them succeed, or none."""

from __future__ import annotations

import json
import logging
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from naught.answers import Answers
from naught.checkpoints import Draft, Keep, Manifest, Param, Piece, Run, Sealed, Store, Table, header_of, retire, sweep
from naught.comm import Together
from naught.errors import CheckpointError, NaughtError, RankMismatch, UsageError
from naught.saves.inventory import NAMES_BY_DTYPE, names_of, stretches, whole_of, wholes_in
from naught.saves.memory import memory_of
from naught.saves.numbers import told
from naught.saves.own_states import OWN, own_tensors
from naught.saves.snapshot import Kept
from naught.stored_part import StoredPart

__all__ = ["Asked", "Save", "begin", "undone_on_error", "write"]

_LOG = logging.getLogger("naught")
_LEFT = "files that no checkpoint needs are left behind"


class Save(NamedTuple):
    """A save that has begun: all ranks have agreed on it, and there is a folder to write to."""

    draft: Draft
    manifest: Manifest  # but for the tables
    table: Table  # of this rank, but for the checksums
    header: bytes
    tensors: Sequence[Kept]  # what follows the header
    stays: Keep  # of the older ones
    points: bool  # a text at it


class Asked(NamedTuple):
    """What is asked of a save. All ranks ask for the same."""

    tag: str
    points: bool = True  # a text at it
    frozen: bool = True  # parameters, too
    beside: bool = False  # training


def begin(engine: Answers, store: Store, asked: Asked, client_state: Mapping[str, Any]) -> Save:
    """Begin to save between two steps. An error is raised on every rank, and then nothing has begun."""
    group = engine.schedule.group
    _refuse_disagreement(group.exchange_texts(json.dumps(asked)))
    identity = group.exchange_texts(secrets.token_hex(16))[0]
    group.look_for_faults(midway=engine.schedule.is_midway)
    with group.together():
        _refuse_now(engine)
        engine.heed_writes()
        own = own_tensors(engine)
        manifest = _manifest(engine, identity, own, client_state, frozen=asked.frozen)
        table, header, tensors = _contents(engine, identity, own, frozen=asked.frozen)
    settings = engine.settings.naught
    draft = Draft(store, asked.tag, identity)
    save = Save(draft, manifest, table, header, tensors, Keep(settings.keep_last, settings.keep_every), asked.points)
    needed = int(group.exchange(torch.tensor([table.nbytes])).sum())
    with undone_on_error(save, group), group.together():
        if group.rank == 0:
            draft.begin(needed)
            _warn_if_not(lambda: sweep(store), _LEFT)
    return save


def write(save: Save, peers: Together, data: Callable[[], Iterable[memoryview]], *, threads: Executor | None = None) -> None:
    """Write what this rank has; when all have, make it a checkpoint. An error is raised on every rank. Threads help where
    there are some; a script that ends cannot have new ones."""
    with undone_on_error(save, peers):
        with peers.together():
            blocks = data()
            sealed = save.draft.write_rank(save.table, save.header, blocks, threads=threads)
        texts = peers.exchange_texts(sealed.model_dump_json())
        with peers.together():
            if peers.rank == 0:
                tables = tuple(Sealed.model_validate_json(text) for text in texts)
                save.draft.commit(save.manifest.model_copy(update={"tables": tables}))
    if peers.rank == 0 and save.points:
        _warn_if_not(save.draft.point, "the text latest is not written")
    if peers.rank == 0 and not save.stays.all:
        _warn_if_not(lambda: retire(save.draft.store, save.manifest.step, save.stays), _LEFT)


@contextmanager
def undone_on_error(save: Save, peers: Together) -> Iterator[None]:
    """Remove what is left of a save that fails, before anybody hears of it."""
    try:
        yield
    except Exception:
        if peers.rank == 0:
            _warn_if_not(save.draft.abandon, _LEFT)
        peers.meet()
        raise


def _warn_if_not(act: Callable[[], object], otherwise: str) -> None:
    """Do what no checkpoint depends on, and no save fails for."""
    try:
        act()
    except NaughtError as error:
        _LOG.warning("%s: %s", otherwise, error)


def _refuse_disagreement(texts: Sequence[str]) -> None:
    """Ranks that ask for different saves are told in what they differ."""
    asked = [Asked(*json.loads(text)) for text in texts]
    for name, values in zip(Asked._fields, zip(*asked, strict=True), strict=True):
        if len(set(values)) > 1:
            shown = ", ".join(dict.fromkeys(map(str, values)))
            raise RankMismatch(f"the ranks ask for different saves: {name} is {shown}", fix="ask for the same on every rank")


def _refuse_now(engine: Answers) -> None:
    engine.refuse_away()
    engine.refuse_inside_gathered()
    engine.passes.refuse_midway()
    if engine.accumulation.ended:
        raise UsageError("gradients of a step that is not over are not saved", fix="save after the last micro-batch of a step")


def _contents(engine: Answers, identity: str, own: Mapping[str, Tensor], *, frozen: bool) -> tuple[Table, bytes, list[Kept]]:
    """This rank's table, the beginning of its file, and the tensors that follow."""
    group = engine.schedule.group
    runs: list[tuple[str, Kept, tuple[Piece, ...]]] = [
        (stretch.kind, Kept(stretch.tensor, stretch.private), stretch.pieces)
        for stretch in stretches(engine, share=True, frozen=frozen)
        if stretch.pieces
    ]
    runs += [
        (OWN, Kept(tensor.contiguous().reshape(-1), private=False), (Piece(param=name, first=0, count=tensor.numel(), at=0),))
        for name, tensor in own.items()
        if tensor.numel()
    ]
    named = [
        (f"{at}.{kind}", _type_name(tensor, pieces), (tensor.numel(),)) for at, (kind, (tensor, _), pieces) in enumerate(runs)
    ]
    header, entries = header_of(named, {"format": "naught", "save": identity, "rank": str(group.rank)})
    described = tuple(
        Run(kind=kind, dtype=entry.dtype, start=entry.start, count=tensor.numel(), pieces=pieces)
        for (kind, (tensor, _), pieces), entry in zip(runs, entries, strict=True)
    )
    nbytes = entries[-1].stop if entries else len(header)
    table = Table.model_construct(
        format=1, save=identity, rank=group.rank, nbytes=nbytes, checksums=(), runs=described, numbers=_numbers(engine)
    )
    return table, header, [kept for _, kept, _ in runs]


def _type_name(tensor: Tensor | StoredPart, pieces: Sequence[Piece]) -> str:
    if tensor.dtype not in NAMES_BY_DTYPE:
        raise CheckpointError(
            f'"{pieces[0].param}" is of the type {tensor.dtype}, which cannot be saved',
            fix="convert it, or make it not persistent",
        )
    return NAMES_BY_DTYPE[tensor.dtype]


def _numbers(engine: Answers) -> dict[str, dict[str, tuple[str, float]]]:
    """What an optimizer keeps of whole parameters."""
    found: dict[str, dict[str, tuple[str, float]]] = {}
    withins = wholes_in(engine)
    for unit in engine.schedule.units.values():
        for segment in unit.trained:
            for slot, numbers in zip(segment.layout.slots, segment.states.numbers, strict=True):
                if numbers:
                    found[whole_of(slot, withins).name] = {name: told(value) for name, value in numbers.items()}
    return found


def _manifest(
    engine: Answers, identity: str, own: Mapping[str, Tensor], client_state: Mapping[str, Any], *, frozen: bool
) -> Manifest:
    """Of the whole checkpoint, but for the tables that the ranks have yet to write."""
    names, withins = names_of(engine), wholes_in(engine)
    params: dict[str, Param] = {}
    for unit in engine.schedule.units.values():
        for segment in unit.segments if frozen else unit.trained:
            for slot, updates in zip(segment.layout.slots, segment.states.steps, strict=True):
                name, shape = (whole := whole_of(slot, withins)).name, whole.shape
                params[name] = Param(shape=shape, trained=segment.trained, updates=updates, also=tuple(names[name][1:]))
    for name, tensor in own.items():
        params[name] = Param(shape=tuple(tensor.shape), trained=False)
    memory = memory_of(engine, client_state)
    return Manifest(format=1, save=identity, step=engine.global_steps, tables=(), params=params, engine=memory)
