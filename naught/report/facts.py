"""Facts: what a run was: its status, model, data, batch and place; its configuration, environment and command."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from naught.quantity import show_clock, show_count
from naught.report.comparing import show_value
from naught.report.html import Html, element, joined, table
from naught.report.run_data import Run
from naught.report.words import counted, moment

__all__ = ["commands", "configuration", "environment", "errors", "facts_of", "origin", "progress", "status_of"]


def status_of(run: Run) -> Html:
    """The status as a word; its colour only underlines it."""
    known = run.course.status if run.course.status in ("running", "done", "stopped", "failed") else "unknown"
    return element("span", run.course.status, class_=f"status {known}")


def progress(run: Run) -> str:
    """How far, how long, and since when."""
    last = run.metrics.steps.steps[-1] if run.metrics.steps.steps else 0
    steps = f"{last:,} of {run.course.steps:,} steps" if run.course.steps else f"{last:,} steps"
    took = f"in {show_clock(run.metrics.time_s)}" if run.metrics.time_s else None
    began = f"started {moment(run.course.started)}" if run.course.started else None
    resumed = f"resumed {len(run.metrics.resumes)} time{'s' * (len(run.metrics.resumes) > 1)}" if run.metrics.resumes else None
    return ", ".join(filter(None, [" ".join(filter(None, [steps, took])), resumed, began]))


def errors(runs: Iterable[Run]) -> Html:
    """What ended a run that failed, and lines that could not be read."""
    said = []
    for run in runs:
        if run.course.error:
            said.append(
                element("div", element("strong", f"{run.title} failed"), element("pre", run.course.error), class_="trouble")
            )
        if run.metrics.unreadable:
            lines = "1 line" if run.metrics.unreadable == 1 else f"{run.metrics.unreadable} lines"
            said.append(
                element("p", f"{lines} of {run.title}/metrics.jsonl could not be read and are left out.", class_="trouble")
            )
    return joined(said)


def facts_of(run: Run) -> dict[str, str]:
    """What was trained on what, by short names. A fact that nobody wrote down is left out."""
    model, data, versions = run.model, run.data, run.environment
    facts = {
        "model": _listed(model.name, _size(run)),
        "data": _listed(
            data.name,
            data.train_tokens and f"{show_count(data.train_tokens)} tokens",
            data.val_tokens and f"{show_count(data.val_tokens)} held out",
            data.bytes_per_token and f"{data.bytes_per_token:.3g} byte{'s' * (data.bytes_per_token != 1)} a token",
        ),
        "batch": _batch(run),
        "ranks": _listed(None if model.world is None else str(model.world)),
        "device": _listed(model.device),
        "precision": _listed(model.dtype),
        "placement": _listed(model.placement),
        "versions": _listed(
            versions.naught and f"naught {versions.naught}",
            versions.torch and f"torch {versions.torch}",
            versions.python and f"Python {versions.python}",
        ),
    }
    return {name: text for name, text in facts.items() if text}


def _listed(*parts: str | float | None) -> str:
    return ", ".join(str(part) for part in parts if part)


def _size(run: Run) -> str | None:
    units = counted(run.model.units, "unit")
    return f"{show_count(run.model.numel)} parameters" + (f" in {units}" if units else "") if run.model.numel else None


def _batch(run: Run) -> str:
    batch, world = run.model.batch, run.model.world
    known = None not in (batch.micro, batch.accumulation, world)
    product = f" = {batch.micro} x {batch.accumulation} x {world} ranks" if known else ""
    length = f", {batch.seq} tokens each" if batch.seq else ""
    return f"{batch.train}{product}{length}" if batch.train else ""


def configuration(run: Run) -> Html | None:
    """What somebody chose, with where; the defaults folded away."""
    values, origins = run.settings.values, run.settings.origins
    if not values:
        return None
    chosen = [(key, show_value(value), origin(origins[key])) for key, value in values.items() if key in origins]
    defaults = [(key, show_value(value)) for key, value in values.items() if key not in origins]
    none = element("p", "Every key has its default.", class_="note")
    shown = table(("key", "value", "from"), chosen, class_="keys") if chosen else none
    return joined([shown, _folded(f"{len(defaults)} keys have their defaults", "key", defaults)])


def _folded(summary: str, head: str, rows: Sequence[tuple[str, str]]) -> Html | None:
    inside = table((head, "value"), rows, class_="keys")
    return element("details", element("summary", summary), inside) if rows else None


def origin(text: str) -> Html:
    """Where a key came from, in one line: `--stage` must not be broken at its dashes."""
    return element("span", text, class_="origin")


def environment(run: Run) -> Html | None:
    values = {"host": run.environment.host, **run.environment.values}
    rows = [(key, show_value(value)) for key, value in values.items() if value is not None]
    return _folded(f"host, versions and variables: {len(rows)}", "name", rows)


def commands(runs: Sequence[Run]) -> Html | None:
    given = [run.course.command for run in runs if run.course.command]
    return element("pre", "\n".join(given), class_="command") if given else None
