"""Stages data: stages.json, the same training under every placement, as frozen, typed data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from naught.errors import UsageError
from naught.quantity import show_count
from naught.report.documents import Document, number_of, read_document

__all__ = ["Moment", "Stage", "Stages", "Trained", "read_stages"]


@dataclass(frozen=True)
class Moment:
    """Bytes held after each phase of one step."""

    step: int
    forward: float | None
    backward: float | None
    after_step: float | None


@dataclass(frozen=True)
class Trained:
    """What was measured. `held` is at rest, by kind of state; a loss that is no number is NaN."""

    memory: tuple[Moment, ...]
    peak_bytes: float | None
    held: Mapping[str, float]
    seconds: float | None
    sent: Mapping[str, float]
    losses: tuple[float, ...]


@dataclass(frozen=True)
class Stage:
    """One way to train. Nothing trained: `reason` says why."""

    name: str
    title: str
    why: str
    reason: str
    trained: Trained | None


@dataclass(frozen=True)
class Stages:
    """`counts` says which bytes were counted; `setting` what all the runs had in common."""

    title: str
    setting: Mapping[str, str]
    iterations: int | None
    counts: str
    stages: tuple[Stage, ...]


def read_stages(folder: Path) -> Stages:
    document = read_document(folder / "stages.json")
    if document is None:
        raise UsageError(f'"{folder}" has no stages.json', fix="give a folder that a comparison of stages wrote")
    return Stages(
        title=folder.resolve().name,
        setting=_setting(document),
        iterations=document.count("iterations"),
        counts=document.text("counts") or "",
        stages=tuple(_stage(row) for row in document.rows("runs")),
    )


def _setting(document: Document) -> dict[str, str]:
    """What all runs had in common, by short names."""
    model, batch = document.inner("model"), document.inner("batch")
    numel, micro, seq, warmup = model.number("numel"), batch.count("micro"), batch.count("seq"), document.count("warmup")
    naught, torch = document.text("naught"), document.text("torch")
    facts: dict[str, list[str | float | None]] = {
        "model": [model.text("name"), numel and f"{show_count(numel)} parameters"],
        "batch of a rank": [micro and str(micro), seq and f"{seq} tokens each"],
        "iterations": [_whole(document, "iterations"), warmup and f"after {warmup} to warm up"],
        "ranks": [_whole(document, "world")],
        "device": [document.text("device")],
        "versions": [naught and f"naught {naught}", torch and f"torch {torch}"],
        "host": [document.text("host")],
    }
    joined = {name: ", ".join(str(part) for part in parts if part) for name, parts in facts.items()}
    return {name: text for name, text in joined.items() if text}


def _whole(document: Document, key: str) -> str | None:
    value = document.count(key)
    return None if value is None else f"{value:,}"


def _stage(row: Document) -> Stage:
    name = row.text("name") or "?"
    return Stage(
        name=name,
        title=row.text("title") or name,
        why=row.text("why") or "",
        reason=row.text("reason") or "not available",
        trained=_trained(row) if row.flag("available") else None,
    )


def _trained(row: Document) -> Trained:
    losses = row.values.get("losses")
    numbers = [number_of(loss) for loss in losses] if isinstance(losses, list) else []
    return Trained(
        memory=tuple(_moment(moment) for moment in row.rows("memory")),
        peak_bytes=row.number("peak"),
        held=row.inner("held").numbers(),
        seconds=row.number("seconds"),
        sent=row.inner("sent").numbers(),
        losses=tuple(float("nan") if loss is None else loss for loss in numbers),
    )


def _moment(moment: Document) -> Moment:
    return Moment(moment.count("step") or 0, *(moment.number(key) for key in ("forward", "backward", "step_")))
