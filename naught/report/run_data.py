"""Run data: a run folder as frozen, typed data. Tolerates all that a run may not have written yet; changes nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from naught.errors import UsageError
from naught.report.documents import Document, read_document
from naught.report.records import Metrics, read_metrics

__all__ = ["Batch", "Course", "Data", "Environment", "Model", "Plan", "Run", "Settings", "read_run"]


@dataclass(frozen=True)
class Course:
    """How a run went. `steps` are those that were asked for; `peak_bytes` is what its end wrote down."""

    status: str
    error: str | None
    started: str | None
    ended: str | None
    steps: int | None
    command: str | None
    peak_bytes: float | None


@dataclass(frozen=True)
class Environment:
    """The versions that ran, and all that env.json has."""

    naught: str | None
    torch: str | None
    python: str | None
    host: str | None
    values: Mapping[str, object]


@dataclass(frozen=True)
class Batch:
    train: int | None
    micro: int | None
    accumulation: int | None
    seq: int | None


@dataclass(frozen=True)
class Model:
    """What is trained, and how it lies on the ranks."""

    name: str | None
    numel: float | None
    units: int | None
    batch: Batch
    world: int | None
    device: str | None
    dtype: str | None
    placement: str | None


@dataclass(frozen=True)
class Data:
    """`yardsticks` are bits per byte that others need for the same text."""

    name: str | None
    train_tokens: float | None
    val_tokens: float | None
    bytes_per_token: float | None
    yardsticks: Mapping[str, float]


@dataclass(frozen=True)
class Plan:
    """What was forecast for one rank: bytes by category, and bytes that a step sends by collective."""

    memory: Mapping[str, float]
    total: float
    sent: Mapping[str, float]


@dataclass(frozen=True)
class Settings:
    """Every key by its dotted path; one that has no origin is a default."""

    values: Mapping[str, object]
    origins: Mapping[str, str]


@dataclass(frozen=True)
class Run:
    """A run as its folder tells it. No plan: none was made."""

    title: str
    course: Course
    model: Model
    data: Data
    plan: Plan | None
    settings: Settings
    environment: Environment
    metrics: Metrics


def read_run(folder: Path) -> Run:
    document = read_document(folder / "run.json")
    if document is None:
        raise UsageError(f'"{folder}" is no run: it has no run.json', fix="give the folder of a run, its number or its name")
    return Run(
        title=folder.resolve().name,
        course=_course(document, folder),
        model=_model(document),
        data=_data(document.inner("data")),
        plan=_plan(document.inner("plan")),
        settings=_settings(read_document(folder / "config.json") or Document({})),
        environment=_environment(document, read_document(folder / "env.json") or Document({})),
        metrics=read_metrics(folder / "metrics.jsonl"),
    )


def _course(document: Document, folder: Path) -> Course:
    written = folder / "command.txt"
    command = document.text("command") or (written.read_text(encoding="utf-8", errors="replace") if written.is_file() else None)
    return Course(
        status=document.text("status") or "unknown",
        error=document.text("error"),
        started=document.text("started"),
        ended=document.text("ended"),
        steps=document.count("steps"),
        command=command,
        peak_bytes=document.inner("peak").number("measured"),
    )


def _model(document: Document) -> Model:
    model, batch = document.inner("model"), document.inner("batch")
    stage = document.count("stage")
    return Model(
        name=model.text("name"),
        numel=model.number("numel"),
        units=model.count("units"),
        batch=Batch(*(batch.count(key) for key in ("train", "micro", "accumulation", "seq"))),
        world=document.count("world"),
        device=document.text("device"),
        dtype=document.text("dtype"),
        placement=document.text("placement") or (None if stage is None else f"stage{stage}"),
    )


def _data(data: Document) -> Data:
    return Data(
        name=data.text("name"),
        train_tokens=data.number("train_tokens"),
        val_tokens=data.number("val_tokens"),
        bytes_per_token=data.number("bytes_per_token"),
        yardsticks=data.inner("yardsticks").numbers(),
    )


def _plan(plan: Document) -> Plan | None:
    memory = plan.inner("memory").numbers()
    total = plan.number("total") or sum(memory.values())
    return Plan(memory, total, plan.inner("sent").numbers()) if total else None


def _settings(config: Document) -> Settings:
    origins = {key: str(origin) for key, origin in config.inner("origins").values.items()}
    return Settings(dict(config.inner("settings").flattened()), origins)


def _environment(document: Document, environment: Document) -> Environment:
    naught, torch, python, host = (document.text(key) for key in ("naught", "torch", "python", "host"))
    return Environment(naught, torch, python, host, dict(environment.flattened()))
