"""Console: what a run says while it trains: one dense line a step, a bar where somebody looks, records where a program reads."""

from __future__ import annotations

import json
import os
import shutil
import sys
from typing import Any, TextIO

from naught.quantity import show_bytes, show_clock, show_count

__all__ = ["Console", "step_line"]

_BAR_WIDTH = 24


class Console:
    """Speaks for all ranks: only one rank has a console that is not quiet."""

    def __init__(self, stream: TextIO | None = None, *, quiet: bool = False, as_json: bool = False) -> None:
        self.stream = stream or sys.stdout
        self.quiet, self.as_json = quiet, as_json
        self.bar = not quiet and not as_json and self.stream.isatty()
        self.drawn = False  # a bar is on the line where the cursor is

    def say(self, title: str, text: str) -> None:
        """A line of its own: what it is about, and what is to be said of it."""
        if not self.quiet and not self.as_json:
            self._print(f"{title:<6} {text}")

    def record(self, found: dict[str, Any], line: str | None) -> None:
        """A record of the metrics: as it is for programs, and for people as a line, if it is worth one."""
        if self.as_json:
            self._print(json.dumps({name: value for name, value in found.items() if name != "memory"}))
        elif line is not None and not self.quiet:
            self._print(line)

    def progress(self, step: int, steps: int, text: str) -> None:
        """Draw the bar anew; nothing where nobody looks."""
        if self.bar:
            full = _BAR_WIDTH * step // max(1, steps)
            room = max(10, shutil.get_terminal_size().columns - _BAR_WIDTH - 4)
            self.stream.write(f"\r\x1b[K[{'#' * full}{'.' * (_BAR_WIDTH - full)}] {text[:room]}")
            self.stream.flush()
            self.drawn = True

    def _print(self, line: str) -> None:
        if self.drawn:
            self.stream.write("\r\x1b[K")
            self.drawn = False
        try:
            self.stream.write(line + "\n")
            self.stream.flush()
        except BrokenPipeError:  # the reader (head, say) has seen enough; training goes on
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.stream.fileno())
            self.quiet, self.bar = True, False

    def close(self) -> None:
        if self.drawn:
            self._print("")


def step_line(found: dict[str, Any], *, steps: int, planned_bytes: int | None, held_bytes: int | None, eta_s: float) -> str:
    """A step as one dense line."""
    step = found["step"]
    width = len(str(steps))
    parts = [f"{'step':<7}{step:>{width}}/{steps} {100 * step // steps:>3}%", f"loss {found['loss']:.4f}"]
    parts += [f"bpb {found['bpb']:.3f}"] if found["bpb"] is not None else []
    parts += [f"|g| {found['grad_norm']:.3g}"] if found["grad_norm"] is not None else []
    parts += [f"lr {found['lr']:.2e}", f"{show_count(found['tokens_s'])} tok/s"]
    parts += [f"mfu {100 * found['mfu']:.1f}%"] if found["mfu"] is not None else []
    if held_bytes is not None:
        plan = f" (plan {show_bytes(planned_bytes)})" if planned_bytes else ""
        parts.append(f"mem {show_bytes(held_bytes)}{plan}")
    if found["waited"]:
        parts.append(f"comm {100 * min(1.0, sum(found['waited'].values()) / found['seconds']):.0f}%")
    parts += [f"skipped {found['skipped']}"] if found["skipped"] else []
    return "  ".join([*parts, f"eta {show_clock(eta_s)}"])
