"""Parting: how a run that was not cut off ends on paper: its status, its page and its last lines. On the rank that writes."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from datetime import UTC, datetime

from naught.quantity import show_bytes, show_clock
from naught.report import write_report
from naught.report.words import against_plan
from naught.trainer.console import Console
from naught.trainer.introducing import Introduction
from naught.trainer.run_folder import RunFolder, shown_path
from naught.trainer.training import Outcome, Training

__all__ = ["now", "part"]


def part(run: RunFolder, console: Console, training: Training, outcome: Outcome, introduction: Introduction) -> None:
    """Write down how the run has ended, and say so."""
    measures = training.measures
    status = "done" if outcome.stopped_by is None else "stopped"
    run.record("end", training.engine.global_steps, status=status)
    peak = {"measured": measures.most_bytes or None, "plan": measures.expected.total}
    run.tell(status=status, ended=now(), peak=peak if measures.most_bytes else run.facts["peak"])
    write_report([run.path], run.path / "report.html")
    lines = _stopped(run, training, outcome.stopped_by) if outcome.stopped_by else _done(run, training, outcome, introduction)
    for title, text in lines:
        console.say(title, text)
    console.say("report", shown_path(run.path / "report.html"))
    console.close()


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _stopped(run: RunFolder, training: Training, by: int) -> Iterator[tuple[str, str]]:
    name, step = signal.Signals(by).name, training.engine.global_steps
    goes_on = f"naught train --resume {shown_path(run.path)} goes on"
    yield "stopped", f"by {name} after step {step} of {training.recipe.train.steps}, and saved; {goes_on}"


def _done(run: RunFolder, training: Training, outcome: Outcome, introduction: Introduction) -> Iterator[tuple[str, str]]:
    assert outcome.loss is not None
    measures, steps = training.measures, training.recipe.train.steps
    told = f"{steps} steps in {show_clock(run.seconds)}  validation loss {outcome.loss:.4f}"
    bits = measures.bits(outcome.loss)
    if bits is not None:
        yardsticks = ", ".join(f"{name} {value:.2f}" for name, value in introduction.corpus.yardsticks.items())
        told += f"  {bits:.3f} bits per byte" + (f" ({yardsticks})" if yardsticks else "")
    yield "done", told
    if measures.most_bytes:
        plan = measures.expected.total
        told = against_plan(plan, f" ({round(100 * (measures.most_bytes / plan - 1)):+d}%)")
        yield "memory", f"peak {show_bytes(measures.most_bytes)} a rank, {told}"
