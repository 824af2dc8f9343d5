"""Telling: what happens in a run goes to its folder and to the console. On one rank; the others keep silent."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from naught.quantity import show_bytes, show_clock
from naught.trainer.console import Console, step_line
from naught.trainer.run_folder import RunFolder, shown_path

__all__ = ["Teller"]


class Teller:
    """Writes records of a run that is to take so many steps, and speaks of those that are worth it."""

    def __init__(self, run: RunFolder | None, console: Console, *, steps: int, every: int) -> None:
        self.run, self.console, self.steps, self.every = run, console, steps, every
        self.pace_s: float | None = None  # of a step, lately; None before the first
        self.first = steps  # the first step that was told of

    @property
    def silent(self) -> bool:
        return self.run is None

    def step(self, step: int, measured: dict[str, Any], *, planned_bytes: int) -> None:
        if self.run is None:
            return
        found = self.run.record("step", step, **measured)
        self.first = min(self.first, step)
        seconds = measured["seconds"]
        eta_s = (seconds if self.pace_s is None else self.pace_s) * (self.steps - step)
        # The first step is slower than others, and says nothing of them.
        self.pace_s = seconds if self.pace_s is None or step <= self.first + 1 else 0.9 * self.pace_s + 0.1 * seconds
        if step % self.every == 0 or step in (1, self.steps):
            told = {"step": step, **measured}  # with what is not finite as it is
            held_bytes = measured["memory"]["peak"]
            line = step_line(told, steps=self.steps, planned_bytes=planned_bytes, held_bytes=held_bytes, eta_s=eta_s)
            self.console.record(found, line)
        self.console.progress(step, self.steps, f"{step}/{self.steps}  loss {measured['loss']:.4f}  eta {show_clock(eta_s)}")

    def evaluated(self, step: int, *, loss: float, bpb: float | None, seconds: float) -> None:
        if self.run is not None:
            found = self.run.record("eval", step, loss=loss, bpb=bpb, seconds=seconds)
            shown = f"  bpb {bpb:.3f}" if bpb is not None else ""
            self.console.record(found, f"{'eval':<7}step {step}  validation loss {loss:.4f}{shown}  {seconds:.1f} s")

    def saved(self, step: int, path: Path, seconds: float) -> None:
        if self.run is not None:
            nbytes = sum(file.stat().st_size for file in path.glob("*")) if path.is_dir() else None  # None: still under way
            found = self.run.record("save", step, tag=path.name, bytes=nbytes, seconds=seconds)
            size = f"{show_bytes(nbytes)}  " if nbytes is not None else "in the background  "
            self.console.record(found, f"{'save':<7}{shown_path(path)}  {size}{seconds:.1f} s")
