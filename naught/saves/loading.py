"""Loading: a checkpoint becomes an engine's training, whatever world, stage and precision wrote it. All ranks, or none.

Everything is read and checked first. States that were not there before are filled at once; what would be overwritten is read
again into place when all ranks have agreed. A rank reads no more than the bytes that it keeps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from naught.answers import Answers
from naught.checkpoints import Manifest, Store, Table
from naught.comm import Group
from naught.errors import CheckpointError, RankMismatch
from naught.saves.contents import Contents
from naught.saves.inventory import WEIGHTS, refuse_differences, shapes_of, stretches, whole_of, wholes_in
from naught.saves.memory import Memory, recall, recall_rates, refuse_other_rates
from naught.saves.numbers import number_of
from naught.saves.own_states import OWN, RANDOM, buffer_shapes, own_tensors, put_own
from naught.saves.places import Places, tensor_of, unusable_on_error, weights_written
from naught.segment import Segment
from naught.states import States, Updating
from naught.stored_part import StoredPart

__all__ = ["Wanted", "find", "load"]


class Wanted(NamedTuple):
    """What of a checkpoint is to be loaded."""

    strict: bool = True
    optimizer: bool = True
    rates: bool = True
    module_only: bool = False


def find(group: Group, store: Store, tag: str | None) -> Contents:
    """The checkpoint that all ranks mean."""
    tags = group.exchange_texts("" if tag is None else str(tag))
    if len(set(tags)) > 1:
        raise RankMismatch(f"the ranks want to load different tags: {', '.join(sorted(set(tags)))}", fix="agree on one")
    with group.together():
        chosen = tags[0] or (store.newest().tag if group.rank == 0 else "")
    chosen = group.exchange_texts(chosen)[0]
    with group.together():
        found = Contents(store, store.find(chosen))
    return found  # noqa: RET504 - to the type checker a context may swallow what is raised inside, and end here with nothing


def load(engine: Answers, contents: Contents, wanted: Wanted) -> dict[str, Any]:
    """Returns the client's own state. If anything is wrong on any rank, nothing has changed on any."""
    group, chosen = engine.schedule.group, contents.saved.tag
    engine.refuse_away()
    engine.before_a_change()
    engine.passes.close()
    with group.together():
        reading = _Reading(engine, contents, wanted)
    try:
        with group.together():
            reading.check()
        _refuse_different(group.exchange_texts(reading.manifest.save), chosen)
    except BaseException:  # an interrupt, too
        reading.undo()
        raise
    with unusable_on_error(engine):
        group.forget_notes()
        with group.together():
            reading.copy()
            _finish(engine, reading)
        weights_written(engine)
        group.look_for_faults(midway=False)
    return dict(reading.memory.client_state)


def _refuse_different(identities: Sequence[str], tag: str) -> None:
    if len(set(identities)) > 1:
        raise CheckpointError(f"the ranks see different checkpoints as {tag}", fix="load from a folder that all hosts share")


class _Reading:
    """One rank's way through a checkpoint: which bytes it needs, and where they belong."""

    def __init__(self, engine: Answers, contents: Contents, wanted: Wanted) -> None:
        self.engine, self.contents, self.wanted = engine, contents, wanted
        self.made: list[tuple[States, set[str]]] = []  # moments that were not there before
        self.places, self.new_places = Places(), Places()
        self.blanks: list[tuple[Tensor | StoredPart, float]] = []  # states that no update has touched, and what they start from
        self.memory = Memory.of(contents.saved.manifest.engine, contents.saved.tag)
        self.own: dict[str, Tensor] = {}  # what a rank had for itself
        self.withins = wholes_in(engine)

    def names(self, segment: Segment) -> list[str]:
        """What the checkpoint calls the parameters of a segment."""
        return [whole_of(slot, self.withins).name for slot in segment.layout.slots]

    @property
    def manifest(self) -> Manifest:
        return self.contents.saved.manifest

    @property
    def with_optimizer(self) -> bool:
        return self.wanted.optimizer and not self.wanted.module_only and self.engine.optimizer is not None

    @property
    def with_rates(self) -> bool:
        return self.wanted.rates and not self.wanted.module_only and self.engine.optimizer is not None

    def check(self) -> None:
        """Find every byte that this rank needs, and see that it is what was written. What was not there before is filled."""
        theirs = {name: param.shape for name, param in self.manifest.params.items() if not name.startswith(RANDOM)}
        refuse_differences(shapes_of(self.engine) | buffer_shapes(self.engine), theirs, strict=self.wanted.strict)
        if self.with_rates:
            refuse_other_rates(self.engine, self.memory)
        if self.with_optimizer:
            self._refuse_other_states({kind for kind, _ in self.contents.located} - {WEIGHTS, OWN})
            self._make_moments()
        self._read_own()
        self._find_places()
        self.places.check(self.contents.files)
        self.new_places.fill(self.contents.files)

    def copy(self) -> None:
        for target, start in self.blanks:
            target.fill_(start)
        self.places.fill(self.contents.files)

    def undo(self) -> None:
        """Nothing has been loaded: what was made for it goes."""
        for states, names in self.made:
            states.forget(names)

    def _make_moments(self) -> None:
        """Of what has been updated; the rest is made when it first is."""
        assert self.engine.optimizer is not None
        how = Updating(self.engine.optimizer.rule, self.engine.optimizer.param_groups, 0)
        for unit in self.engine.schedule.units.values():
            for segment in unit.trained:
                known = map(self.manifest.params.get, self.names(segment))
                if any(param is not None and param.updates for param in known):
                    before = set(segment.states.held)
                    segment.states.prepare(how)
                    self.made.append((segment.states, set(segment.states.held) - before))

    def _refuse_other_states(self, theirs: set[str]) -> None:
        assert self.engine.optimizer is not None
        rule = self.engine.optimizer.rule
        ours = {name for hyper in self.engine.optimizer.param_groups for name in rule.states(hyper)}
        if theirs - ours:
            raise CheckpointError(
                f"{self.contents.saved.tag} is of another optimizer: it has {', '.join(sorted(theirs - ours))}",
                fix="use the optimizer that was saved; load_optimizer_states=False takes the weights only",
            )

    def _read_own(self) -> None:
        """This rank's, if there are as many ranks as there were, else the first one's."""
        rank = self.engine.schedule.group.rank if self.same_world else 0
        numels = {name: tensor.numel() for name, tensor in own_tensors(self.engine).items()}
        for run in self.contents.tables[rank].runs:
            name = run.pieces[0].param if run.kind == OWN and len(run.pieces) == 1 else ""
            if numels.get(name) == run.count:  # else it is of another torch's source of random numbers, or nobody's
                self.own[name] = tensor_of(self.contents.files[rank].read(run.start, run.stop), run.dtype)

    @property
    def same_world(self) -> bool:
        """Whether every rank is what a rank was: else nobody's random numbers are another's."""
        world = self.manifest.world
        here = (self.engine.schedule.group.size, self.engine.schedule.group.parts)
        return (world, world if self.memory.parts is None else self.memory.parts) == here

    def _find_places(self) -> None:
        made = {(id(states), name) for states, names in self.made for name in names}
        for kind, segment, tensor, pieces in stretches(self.engine, share=False):
            if isinstance(tensor, StoredPart):
                tensor.mends = self.wanted.strict
            if kind != WEIGHTS and not self.with_optimizer:
                continue
            for piece in pieces:
                param = self.manifest.params.get(piece.param)
                if param is None:
                    continue  # the model has more than the checkpoint, and was told not to mind
                target = tensor[piece.at : piece.at + piece.count]
                if kind != WEIGHTS and param.updates == 0:
                    self.blanks.append((target, self._start(segment, piece.param, kind)))
                    continue
                places = self.new_places if (id(segment.states), kind) in made else self.places
                located = self.contents.located.get((kind, piece.param), ())
                if not all(places.add(tensor[at : at + numel], first, located) for first, numel, at in piece.lines()):
                    raise CheckpointError(
                        f'{self.contents.saved.tag} does not have all of "{piece.param}" ({kind})',
                        fix="load_optimizer_states=False takes the weights only; or use the optimizer that was saved",
                    )

    def _start(self, segment: Segment, param: str, kind: str) -> float:
        assert self.engine.optimizer is not None
        hyper = self.engine.optimizer.param_groups[segment.states.groups[self.names(segment).index(param)]]
        return self.engine.optimizer.rule.states(hyper).get(kind, 0.0)


def _finish(engine: Answers, reading: _Reading) -> None:
    """Counters go on, and what every rank has for itself."""
    wanted, params = reading.wanted, reading.manifest.params
    for segment in (segment for unit in engine.schedule.units.values() for segment in unit.trained):
        if reading.with_optimizer:
            names = reading.names(segment)
            segment.states.steps = [params[name].updates if name in params else 0 for name in names]
            segment.states.numbers = [_numbers(reading.contents.tables, name, engine) for name in names]
    put_own(engine, reading.own, random_too=reading.same_world and not wanted.module_only)
    if not wanted.module_only:
        recall(engine, reading.memory)
    if reading.with_rates:
        recall_rates(engine, reading.memory)


def _numbers(tables: Sequence[Table], name: str, engine: Answers) -> dict[str, Any]:
    found = next((table.numbers[name] for table in tables if name in table.numbers), {})
    return {key: number_of(kind, value, engine.device) for key, (kind, value) in found.items()}
