"""Check: from a document to a typed configuration, with every problem found on the way and a note on every key."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any, NamedTuple

from pydantic import ValidationError

from naught.config import keys
from naught.config.contradictions import contradictions
from naught.config.old_names import modern_top, modern_zero
from naught.config.optimizers import OPTIMIZERS, SCHEDULERS
from naught.config.read import Document, Source, Spot, dotted, is_remark, read
from naught.config.refused import REFUSED, REFUSED_OPTIMIZERS, is_off
from naught.config.schema import Config, Zero
from naught.config.types import Block, Effect, shown
from naught.errors import ConfigError, Problem, UsageError

__all__ = ["Note", "Report", "check", "fill", "load", "refuse_auto", "to_document"]


class Note(NamedTuple):
    """What becomes of one key."""

    path: str
    effect: Effect
    detail: str


@dataclass(frozen=True)
class Report:
    """The outcome of a check; `config` stands only if there are no problems."""

    source: str
    config: Config
    notes: tuple[Note, ...]
    problems: tuple[Problem, ...]


def load(source: Source) -> Config:
    """The configuration, or one ConfigError with everything that is wrong with it."""
    report = check(source)
    if report.problems:
        raise ConfigError(report.source, report.problems)
    return report.config


def check(source: Source | Document, kind: type[Config] = Config) -> Report:
    """Everything there is to say about a configuration. Raises only if there is no object to be read."""
    document = source if isinstance(source, Document) else read(source)
    walk = _Walk(document, kind)
    built = walk.block(kind, document.values, (), "")
    assert isinstance(built, Config)
    config = _with_old_clipping(built.model_copy(update={"auto": frozenset(walk.auto)}))
    problems = document.problems + walk.problems
    troubled = {problem.path for problem in problems}
    for paths, what, fix in contradictions(config):
        spellings = [walk.spellings.get(path, path) for path in paths]
        if not any(_within(spelling, trouble) for spelling in spellings for trouble in troubled):
            problems.append(Problem(spellings[0], what, walk.line(walk.places.get(paths[0], tuple(paths[0].split(".")))), fix))
    notes = [_note_in_context(note, config) for note in walk.notes]
    return Report(document.source, config, tuple(notes), tuple(sorted(problems, key=lambda problem: problem.line or 0)))


def _with_old_clipping(config: Config) -> Config:
    """The optimizer's max_grad_norm is what gradient_clipping was called."""
    old = config.optimizer.params.max_grad_norm if config.optimizer else None
    said = "gradient_clipping" in config.model_fields_set or "gradient_clipping" in config.auto
    return config if old is None or said else config.model_copy(update={"gradient_clipping": old})


def _within(path: str, block: str) -> bool:
    """Whether a path is a key or lies below it."""
    return path == block or path.startswith(f"{block}.")


_ADAPTIVE = ("initial_scale_power", "loss_scale_window", "hysteresis", "consecutive_hysteresis", "min_loss_scale")


def _note_in_context(note: Note, config: Config) -> Note:
    """A key that is honoured in general may have no effect beside the others."""
    block, _, name = note.path.rpartition(".")
    why = ""
    if name.startswith("stage3_") and config.zero_optimization.stage < 3 and "zero_optimization.stage" not in config.auto:
        why = f"stage 3 only; this is stage {config.zero_optimization.stage}"
    elif block == "fp16" and name in _ADAPTIVE and config.fp16.enabled and config.fp16.loss_scale:
        why = "the loss scale is fixed"
    elif block and "." not in block and name != "enabled" and f"{block}.enabled" not in config.auto:
        switch = getattr(getattr(config, block, None), "enabled", True)
        why = "" if switch else f"{block} is not enabled"
    return Note(note.path, Effect.NONE, why) if why and note.effect is Effect.HONOURED else note


@dataclass
class _Walk:
    """One pass over a document, along the schema."""

    document: Document
    root: type[Config]
    problems: list[Problem] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)
    auto: set[str] = field(default_factory=set)
    places: dict[str, Spot] = field(default_factory=dict)  # canonical path -> where it stands in the document
    spellings: dict[str, str] = field(default_factory=dict)  # canonical path -> path as the user wrote it

    def block(self, kind: type[Block], values: Mapping[str, Any], place: Spot, path: str) -> Block:
        """Build one block from its members, with defaults where a member is wrong."""
        members: dict[str, Any] = {}
        for spelling, value in self._modern(kind, values).items():
            spot = (*place, spelling)
            if is_remark(spelling):
                continue
            name = keys.spelled(kind, spelling)
            here = f"{path}.{name or spelling}".removeprefix(".")
            if here in REFUSED:
                self._refuse(here, value, spot)
            elif name is None:
                self.problem(spot, "unknown key", keys.nearest(kind, spelling, path, self.root))
            elif name in members or here in self.auto:
                self.problem(spot, f"says again what {self.spellings[here].rpartition('.')[2]} says", "remove one")
            else:
                self.places[here], self.spellings[here] = spot, dotted(spot)
                self._member(kind, name, value, here, members)
        return self._validate(kind, members, place, path)

    def _modern(self, kind: type[Block], values: Mapping[str, Any]) -> Mapping[str, Any]:
        """The members of a block, in the words of today."""
        if kind is not Zero and kind is not self.root:
            return values
        modern = modern_zero(values) if kind is Zero else modern_top(values)
        for path, what, fix in modern.faults:
            self.problem(path, what, fix)
        self.notes += [Note(dotted(path), Effect.HONOURED, detail) for path, detail in modern.remarks]
        for new, old in modern.stands_for.items():
            if old in self.document.lines:
                self.document.lines.setdefault(new, self.document.lines[old])
        return modern.values

    def _member(self, kind: type[Block], name: str, value: Any, path: str, members: dict[str, Any]) -> None:
        info = keys.fields(kind)[name]
        inner = keys.variants(info)
        spot = self.places[path]
        if inner:
            if value is None:
                return  # null stands for an absent block, as Hugging Face writes it
            if not isinstance(value, dict):
                self.problem(spot, f"must be an object, is {shown(value)}")
                return
            variant = self._variant(name, inner, value, spot)
            if variant:
                members[name] = self.block(variant, value, spot, path)
            return
        key = keys.key_of(info)
        if value == "auto" and isinstance(value, str) and not keys.takes_auto(info):
            self.auto.add(path)
            self.notes.append(Note(path, key.effect, "to be filled by whoever starts the run"))
            return
        members[name] = value
        self.notes.append(Note(path, key.effect, key.does or key.why))

    def _variant(self, name: str, inner: tuple[type[Block], ...], value: dict[str, Any], spot: Spot) -> type[Block] | None:
        """The block that an optimizer's or schedule's type names."""
        known = {"optimizer": OPTIMIZERS, "scheduler": SCHEDULERS}.get(name)
        if known is None or len(inner) == 1:
            return inner[0]
        wanted = value.get("type")
        if not isinstance(wanted, str):
            self.problem(
                (*spot, "type"), "is missing" if wanted is None else f"must be a text, is {shown(wanted)}", _choices(inner)
            )
            return None
        lowered = wanted.lower()
        if lowered in known:
            value["type"] = known[lowered].model_fields["type"].default
            return known[lowered]
        if name == "optimizer" and lowered in REFUSED_OPTIMIZERS:
            self.notes.append(Note(f"{name}.type", Effect.REFUSED, REFUSED_OPTIMIZERS[lowered]))
            self.problem((*spot, "type"), f'"{wanted}" is not available: {REFUSED_OPTIMIZERS[lowered]}', _choices(inner))
            return None
        near = get_close_matches(lowered, known, n=1)
        guess = f"did you mean {known[near[0]].model_fields['type'].default}?" if near else _choices(inner)
        self.problem((*spot, "type"), f"{shown(wanted)} is not known by name", guess)
        return None

    def _refuse(self, path: str, value: Any, spot: Spot) -> None:
        if is_off(path, value):
            self.notes.append(Note(path, Effect.NONE, f"switched off; {REFUSED[path]}"))
            return
        self.notes.append(Note(path, Effect.REFUSED, REFUSED[path]))
        self.problem(spot, f"is not available: {REFUSED[path]}", "remove it")

    def _validate(self, kind: type[Block], members: dict[str, Any], place: Spot, path: str) -> Block:
        try:
            return kind.model_validate(members)
        except ValidationError as error:
            wrong = dict.fromkeys(str(item["loc"][0]) for item in error.errors(include_url=False))
        for name in wrong:
            value = members.pop(name)
            here = f"{path}.{name}".removeprefix(".")
            info = keys.fields(kind)[name]
            what = f"must be {keys.allowed(info)}, is {shown(value)}"
            self.problem(self.places.get(here, (*place, name)), what, keys.key_of(info).why if keys.is_fixed(info) else "")
        return kind.model_validate(members)

    def problem(self, spot: Spot, what: str, fix: str = "") -> None:
        self.problems.append(Problem(dotted(spot), what, self.line(spot), fix))

    def line(self, spot: Spot) -> int | None:
        """The line of a key, or of the nearest block around it that was written."""
        while spot and spot not in self.document.lines:
            spot = spot[:-1]
        return self.document.lines.get(spot)


def _choices(inner: tuple[type[Block], ...]) -> str:
    return "choose " + ", ".join(str(variant.model_fields["type"].default) for variant in inner)


# --- filling in "auto" ------------------------------------------------------------------------------------------------


def to_document(config: Config) -> dict[str, Any]:
    """The configuration as the JSON object that says the same: what was given, and "auto" where it was."""
    document: dict[str, Any] = config.model_dump(mode="json", exclude_unset=True)
    for path in sorted(config.auto):
        _put(document, path, "auto")
    return document


def fill(config: Config, values: Mapping[str, Any]) -> Config:
    """The configuration with values for keys that are "auto", by path; other keys are the user's and stay."""
    document = to_document(config)
    for path, value in values.items():
        if path in config.auto:
            _put(document, path, value)
    return load(document)


def refuse_auto(config: Config) -> None:
    """Somebody was to fill in what is "auto"."""
    if config.auto:
        raise UsageError(f'"auto" is left in {", ".join(sorted(config.auto))}', fix="give values; nobody has filled them in")


def _put(document: dict[str, Any], path: str, value: Any) -> None:
    *blocks, name = path.split(".")
    for block in blocks:
        document = document.setdefault(block, {})
    document[name] = value
