"""Saving: an engine's training becomes a checkpoint. Every rank writes what it has; all of them succeed, or none."""

from __future__ import annotations

import json
import logging
import secrets
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from naught.answers import Answers
from naught.checkpoints import Manifest, Param, Piece, Run, Sealed, Store, Table, header_of
from naught.errors import CheckpointError, NaughtError, RankMismatch, UsageError
from naught.inventory import NAMES_BY_DTYPE, stretches
from naught.memory import memory_of
from naught.numbers import told
from naught.own_states import OWN, own_tensors

__all__ = ["save"]

_LOG = logging.getLogger("naught")
_BLOCK_BYTES = 16 << 20  # that are copied to the host at a time


def save(
    engine: Answers, store: Store, tag: str | None, client_state: Mapping[str, Any], *, points: bool = True, frozen: bool = True
) -> str:
    """Save between two steps. Returns the tag. An error is raised on every rank, and then nothing has been saved."""
    group = engine.schedule.group
    tag = tag or f"global_step{engine.global_steps}"
    tags = group.exchange_texts(tag)
    if len(set(tags)) > 1:
        raise RankMismatch(f"the ranks want to save under different tags: {', '.join(sorted(set(tags)))}", fix="agree on one")
    identity = group.exchange_texts(secrets.token_hex(16))[0]
    with group.together():
        _refuse_now(engine)
        kept = _text_of_state(engine, client_state)
        table, header, tensors = _contents(engine, identity, frozen=frozen)
    needed = int(group.exchange(torch.tensor([table.nbytes])).sum())
    folder = f".tmp-{tag}-{identity}"
    try:
        with group.together():
            if group.rank == 0:
                store.make_room(needed)
                store.begin(tag, identity)
        with group.together():
            sealed = store.write_rank(folder, table, header, _bytes_of(tensors))
        texts = group.exchange_texts(sealed.model_dump_json())
        with group.together():
            if group.rank == 0:
                store.commit(folder, tag, _manifest(engine, identity, texts, kept))
                if points:
                    store.point(tag, identity)
    except NaughtError:
        if group.rank == 0:
            _tidy(store, folder)
        group.exchange(torch.zeros(1))  # nobody goes on before it is gone
        raise
    return tag


def _refuse_now(engine: Answers) -> None:
    engine.refuse_away()
    engine.refuse_inside_gathered()
    if engine.accumulation.ended:
        raise UsageError("gradients of a step that is not over are not saved", fix="save after the last micro-batch of a step")


def _tidy(store: Store, folder: str) -> None:
    """Remove what is left of a save that failed. The error that is under way is the one to be told."""
    try:
        store.abandon(folder)
    except NaughtError as error:
        _LOG.warning("a save that failed has left files behind: %s", error)


def _text_of_state(engine: Answers, client_state: Mapping[str, Any]) -> dict[str, Any]:
    """What the engine and the caller want to remember, as JSON and nothing else."""
    try:
        return dict(json.loads(json.dumps({**memory_of(engine), "client_state": dict(client_state)}, allow_nan=False)))
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"the client_state or the scheduler's state cannot be written as JSON: {error}",
            fix="use numbers, texts, lists and dicts; save tensors by themselves",
        ) from error


def _contents(engine: Answers, identity: str, *, frozen: bool) -> tuple[Table, bytes, list[Tensor]]:
    """This rank's table, the beginning of its file, and the tensors that follow."""
    group = engine.schedule.group
    runs: list[tuple[str, Tensor, tuple[Piece, ...]]] = [
        (kind, tensor, pieces) for kind, _, tensor, pieces in stretches(engine, share=True, frozen=frozen) if pieces
    ]
    runs += [
        (OWN, tensor.reshape(-1), (Piece(param=name, first=0, count=tensor.numel(), at=0),))
        for name, tensor in own_tensors(engine).items()
        if tensor.numel()
    ]
    named = [(f"{at}.{kind}", NAMES_BY_DTYPE[tensor.dtype], (tensor.numel(),)) for at, (kind, tensor, _) in enumerate(runs)]
    header, entries = header_of(named, {"format": "naught", "save": identity, "rank": str(group.rank)})
    described = tuple(
        Run(kind=kind, dtype=entry.dtype, start=entry.start, count=tensor.numel(), pieces=pieces)  # type: ignore[arg-type]
        for (kind, tensor, pieces), entry in zip(runs, entries, strict=True)
    )
    nbytes = entries[-1].stop if entries else len(header)
    table = Table.model_construct(
        format=1, save=identity, rank=group.rank, nbytes=nbytes, checksums=(), runs=described, numbers=_numbers(engine)
    )
    return table, header, [tensor for _, tensor, _ in runs]


def _numbers(engine: Answers) -> dict[str, dict[str, tuple[str, float]]]:
    """What an optimizer keeps of whole parameters."""
    found: dict[str, dict[str, tuple[str, float]]] = {}
    for unit in engine.schedule.units.values():
        for segment in unit.trained:
            for slot, numbers in zip(segment.layout.slots, segment.states.numbers, strict=True):
                if numbers:
                    found[slot.name] = {name: told(value) for name, value in numbers.items()}
    return found


def _bytes_of(tensors: Sequence[Tensor]) -> Iterator[memoryview]:
    """Copies, a block at a time: a view that numpy has seen could never be freed."""
    for tensor in tensors:
        block = max(1, _BLOCK_BYTES // tensor.element_size())
        for start in range(0, tensor.numel(), block):
            part = tensor[start : start + block].detach().to("cpu", copy=True)
            yield memoryview(part.view(torch.uint8).numpy())  # type: ignore[arg-type]


def _manifest(engine: Answers, identity: str, texts: Sequence[str], kept: dict[str, Any]) -> Manifest:
    params: dict[str, Param] = {}
    for unit in engine.schedule.units.values():
        for segment in unit.segments:
            for slot, updates in zip(segment.layout.slots, segment.states.steps, strict=True):
                params[slot.name] = Param(shape=slot.shape, trained=segment.trained, updates=updates)
    for name, tensor in own_tensors(engine).items():
        params[name] = Param(shape=tuple(tensor.shape), trained=False)
    sealed = tuple(Sealed.model_validate_json(text) for text in texts)
    return Manifest(format=1, save=identity, step=engine.global_steps, tables=sealed, params=params, engine=kept)
