"""Loading: a checkpoint becomes an engine's training, whatever world, stage and precision wrote it. All ranks, or none.

Everything is read and checked first, and only then, when all ranks have agreed, read again into place: a rank reads no more
than the bytes that it keeps.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from naught.answers import Answers
from naught.checkpoints import SIZES, Manifest, Saved, Store, Table
from naught.errors import CheckpointError, NaughtError
from naught.inventory import DTYPES_BY_NAME, WEIGHTS, stretches
from naught.memory import recall, recall_rates
from naught.numbers import number_of
from naught.own_states import OWN, own_tensors, put_own
from naught.states import Updating
from naught.unit import Segment

__all__ = ["Wanted", "load"]

_SHOWN = 4


class Wanted(NamedTuple):
    """What of a checkpoint is to be loaded."""

    strict: bool = True
    optimizer: bool = True
    rates: bool = True
    module_only: bool = False


class _Source(NamedTuple):
    """Elements of a parameter in a file."""

    first: int
    numel: int
    rank: int
    start: int  # byte
    dtype: str


class _Copy(NamedTuple):
    """Bytes of a file that belong into a tensor of this rank."""

    target: Tensor
    rank: int
    start: int
    stop: int
    dtype: str


def load(engine: Answers, store: Store, tag: str | None, wanted: Wanted) -> tuple[str, dict[str, Any]]:
    """Returns the tag and the client's own state. If anything is wrong on any rank, nothing has changed on any."""
    group = engine.schedule.group
    engine.refuse_away()
    engine.refuse_inside_gathered()
    engine.passes.close()
    with group.together():
        chosen = tag or (_newest(store) if group.rank == 0 else "")
    chosen = group.exchange_texts(chosen)[0]
    with group.together():
        saved = store.find(chosen)
        reading = _Reading(engine, store, saved, wanted)
        reading.check()
    if len(set(group.exchange_texts(saved.manifest.save))) > 1:
        raise CheckpointError(f"the ranks see different checkpoints as {chosen}", fix="load from a folder that all hosts share")
    try:
        with group.together():
            reading.copy()
        _finish(engine, reading)
    except NaughtError as error:
        engine.passes.away = CheckpointError(
            f"a checkpoint was being loaded when this happened: {error}", fix="make the engine anew, and load again"
        )
        raise
    return chosen, dict(saved.manifest.engine.get("client_state", {}))


def _newest(store: Store) -> str:
    found = store.all()
    if not found:
        raise CheckpointError(f"there is no whole checkpoint in {store.root}", fix="look at the path, or begin training anew")
    return found[-1].tag


class _Reading:
    """One rank's way through a checkpoint: which bytes it needs, and where they belong."""

    def __init__(self, engine: Answers, store: Store, saved: Saved, wanted: Wanted) -> None:
        self.engine, self.saved, self.wanted = engine, saved, wanted
        self.tables = [store.table(saved, rank) for rank in range(saved.manifest.world)]
        self.files = [store.shard(saved, table) for table in self.tables]
        self.with_optimizer = wanted.optimizer and not wanted.module_only and engine.optimizer is not None
        _refuse_other_model(engine, saved.manifest, strict=wanted.strict)
        self.copies: list[_Copy] = []
        self.blanks: list[tuple[Tensor, float]] = []  # states that no update has touched, and what they start from

    @property
    def memory(self) -> Mapping[str, Any]:
        return self.saved.manifest.engine

    def check(self) -> None:
        """Find every byte that this rank needs, and see that it is what was written."""
        if self.with_optimizer:
            _make_moments(self.engine, self.saved.manifest)
        self.copies = list(self._copies())
        for _, data in self._read():
            del data

    def copy(self) -> None:
        for target, start in self.blanks:
            target.fill_(start)
        for copy, data in self._read():
            source = torch.frombuffer(bytearray(data), dtype=DTYPES_BY_NAME[copy.dtype])
            copy.target.copy_(source)

    def own(self) -> dict[str, Tensor]:
        """What a rank had for itself: this rank's, if there are as many ranks as there were, else the first one's."""
        rank = self.engine.schedule.group.rank if self.same_world else 0
        found: dict[str, Tensor] = {}
        for run in self.tables[rank].runs:
            if run.kind == OWN:
                data = self.files[rank].read(run.start, run.stop)
                found[run.pieces[0].param] = torch.frombuffer(bytearray(data), dtype=DTYPES_BY_NAME[run.dtype])
        return found

    @property
    def same_world(self) -> bool:
        return self.saved.manifest.world == self.engine.schedule.group.size

    def _read(self) -> Iterator[tuple[_Copy, bytes]]:
        for copy in self.copies:
            yield copy, self.files[copy.rank].read(copy.start, copy.stop)

    def _copies(self) -> Iterator[_Copy]:
        sources = _sources(self.tables)
        for kind, segment, tensor, pieces in stretches(self.engine, share=False):
            if kind != WEIGHTS and not self.with_optimizer:
                continue
            for piece in pieces:
                param = self.saved.manifest.params.get(piece.param)
                if param is None:
                    continue  # the model has more than the checkpoint, and was told not to mind
                target = tensor[piece.at : piece.at + piece.count]
                if kind != WEIGHTS and param.updates == 0:
                    self.blanks.append((target, self._start(segment, piece.param, kind)))
                    continue
                yield from _cut(sources[kind, piece.param], target, piece.first, self._story(kind, piece.param))

    def _start(self, segment: Segment, param: str, kind: str) -> float:
        assert self.engine.optimizer is not None
        at = next(index for index, slot in enumerate(segment.layout.slots) if slot.name == param)
        hyper = self.engine.optimizer.param_groups[segment.states.groups[at]]
        return self.engine.optimizer.rule.states(hyper).get(kind, 0.0)

    def _story(self, kind: str, param: str) -> str:
        return f'{self.saved.tag} does not have all of "{param}" ({kind})'


def _sources(tables: Sequence[Table]) -> Mapping[tuple[str, str], list[_Source]]:
    """By kind and parameter, in the order of the elements."""
    found: defaultdict[tuple[str, str], list[_Source]] = defaultdict(list)
    for table in tables:
        for run in table.runs:
            size = SIZES[run.dtype]
            for piece in run.pieces:
                source = _Source(piece.first, piece.count, table.rank, run.start + size * piece.at, run.dtype)
                found[run.kind, piece.param].append(source)
    for sources in found.values():
        sources.sort()
    return found


def _cut(sources: Sequence[_Source], target: Tensor, first: int, story: str) -> Iterator[_Copy]:
    """The bytes of the elements from `first` on that fill a tensor."""
    done, stop = first, first + target.numel()
    for source in sources:
        begin, end = max(done, source.first), min(stop, source.first + source.numel)
        if begin >= end:
            continue
        if begin > done:
            break
        size = SIZES[source.dtype]
        start = source.start + size * (begin - source.first)
        yield _Copy(target[begin - first : end - first], source.rank, start, start + size * (end - begin), source.dtype)
        done = end
    if done < stop:
        raise CheckpointError(
            story, fix="load with load_optimizer_states=False to take the weights only, or with the optimizer that was saved"
        )


def _refuse_other_model(engine: Answers, manifest: Manifest, *, strict: bool) -> None:
    own = set(own_tensors(engine))
    ours = {
        slot.name: slot.shape
        for unit in engine.schedule.units.values()
        for segment in unit.segments
        for slot in segment.layout.slots
    }
    theirs = {name: param.shape for name, param in manifest.params.items() if ":" not in name}
    differing = [
        f'"{name}": {theirs[name]} there, {ours[name]} here' for name in ours if name in theirs and theirs[name] != ours[name]
    ]
    missing = [f'"{name}"' for name in ours if name not in theirs] if strict else []
    more = [f'"{name}"' for name in theirs if name not in ours and name not in own] if strict else []
    parts = [
        f"{len(found)} parameters {what} ({', '.join(found[:_SHOWN])}{' ...' if len(found) > _SHOWN else ''})"
        for found, what in ((missing, "are missing in it"), (more, "are not in the model"), (differing, "have another shape"))
        if found
    ]
    if parts:
        raise CheckpointError(
            f"the checkpoint is of another model: {'; '.join(parts)}. Nothing was loaded",
            fix="build the model as it was; load_module_strict=False takes what both have",
        )


def _make_moments(engine: Answers, manifest: Manifest) -> None:
    """Of what has been updated; the rest is made when it first is."""
    assert engine.optimizer is not None
    how = Updating(engine.optimizer.rule, engine.optimizer.param_groups, 0)
    for unit in engine.schedule.units.values():
        for segment in unit.trained:
            known = (manifest.params.get(slot.name) for slot in segment.layout.slots)
            if any(param is not None and param.updates for param in known):
                segment.states.prepare(how, segment.target)


def _finish(engine: Answers, reading: _Reading) -> None:
    """Weights follow their masters, counters go on, and everybody has what the owners have."""
    wanted, params = reading.wanted, reading.saved.manifest.params
    for unit in engine.schedule.units.values():
        for segment in unit.segments:
            if segment.trained:
                segment.written()
            if reading.with_optimizer and segment.trained:
                names = [slot.name for slot in segment.layout.slots]
                segment.states.steps = [params[name].updates if name in params else 0 for name in names]
                segment.states.numbers = [_numbers(reading.tables, name, engine) for name in names]
        unit.outdate(hide=False)
        if not unit.placement.param.split:
            unit.fetch()
    engine.passes.drop_gradients()
    put_own(engine, reading.own(), random_too=reading.same_world and not wanted.module_only)
    if not wanted.module_only:
        recall(engine, reading.memory)
        if wanted.rates and engine.optimizer is not None:
            recall_rates(engine, reading.memory)


def _numbers(tables: Sequence[Table], name: str, engine: Answers) -> dict[str, Any]:
    found = next((table.numbers[name] for table in tables if name in table.numbers), {})
    return {key: number_of(kind, value, engine.device) for key, (kind, value) in found.items()}
