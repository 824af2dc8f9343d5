"""Rank: the life of one rank of a run, from its recipe to its status. All ranks live it together."""

from __future__ import annotations

import logging
import os
import sys
import traceback
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from naught import comm
from naught.accelerator import get_accelerator
from naught.comm import Group, Ledger
from naught.config.recipe import Recipe
from naught.config.resolving import Resolved
from naught.errors import NaughtError, UsageError
from naught.observing import be_heard
from naught.report import write_report
from naught.trainer.console import Console
from naught.trainer.failing import failure_of, forget, leave, status_of, tell_folder, tell_saved
from naught.trainer.introducing import Introduction, device_title, environment
from naught.trainer.measures import Measures, peak_flops
from naught.trainer.parting import now, part
from naught.trainer.preparing import prepare
from naught.trainer.run_folder import RunFolder, shown_path
from naught.trainer.seating import agree_on_folder, launch_names, redirect_output
from naught.trainer.stopping import Stop, listening
from naught.trainer.telling import Teller
from naught.trainer.training import Training

__all__ = ["STOPPED", "Asked", "run_rank"]

STOPPED = 75  # the status of a run that a signal has ended, after it was saved: start it again and it goes on


@dataclass(frozen=True)
class Asked:
    """What a command line asks for."""

    resolved: Resolved
    runs: Path
    name: str
    resumed: Path | None  # the run to go on with; None: a new one
    command: str
    quiet: bool = False
    as_json: bool = False
    traceback: bool = False

    @property
    def recipe(self) -> Recipe:
        return self.resolved.recipe


def run_rank(asked: Asked) -> int:
    """Live the life of this rank, and return its status: 0, or 75 if a signal has ended it, or that of an error."""
    be_heard(logging.WARNING)
    with listening() as stop:
        life = _Life(asked, stop)
        try:
            return life.live()
        except (Exception, KeyboardInterrupt) as error:
            return life.fail(error)


class _Life:
    """One rank's, until it ends."""

    def __init__(self, asked: Asked, stop: Stop) -> None:
        self.asked, self.stop = asked, stop
        self.rank = 0
        self.folder: Path | None = None  # None: the ranks have not met yet
        self.run: RunFolder | None = None  # None: likewise, or another rank writes it
        self.console = Console(quiet=asked.quiet, as_json=asked.as_json)

    def live(self) -> int:
        recipe = self.asked.recipe
        if recipe.train.deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # else sums of a GPU depend on its mood
            torch.use_deterministic_algorithms(True)
        comm.init_distributed(_backend(recipe))
        group = Group(Ledger(), torch.device("cpu"), reduce_numel=1)
        self.rank = group.rank
        forget(self.rank)
        self.folder, goes_on = agree_on_folder(group, self.asked.runs, self.asked.name, self.asked.resumed)
        with group.together():
            if self.rank == 0:
                self._move_in(self.folder, goes_on)
        if self.rank > 0:
            redirect_output(self._log)
            self.console = Console(quiet=True)
        found = prepare(recipe, group, self.folder, self._introduce)
        intro, engine = found.introduction, found.engine
        measures = Measures(
            engine,
            intro.expected,
            tokens=intro.batch.train * recipe.data.seq,
            peak=peak_flops(device_title()),
            bytes_per_token=intro.corpus.bytes_per_token,
        )
        teller = Teller(self.run, self.console, steps=recipe.train.steps, every=recipe.train.log_every)
        training = Training(engine, recipe, found.validation, self.folder / "ckpt", measures, teller, self.stop)
        if goes_on:
            self._go_on(training)
        outcome = training.go()
        if self.run is not None:
            part(self.run, self.console, training, outcome, intro)
        if outcome.stopped_by is not None:
            tell_saved()
        engine.destroy()
        comm.shut_down()
        return 0 if outcome.stopped_by is None else STOPPED

    @property
    def _log(self) -> Path:
        assert self.folder is not None
        return self.folder / "logs" / f"rank{self.rank}.log"

    def _move_in(self, folder: Path, goes_on: bool) -> None:
        """Write down what will be done."""
        run = RunFolder(folder)
        run.claim()
        self.run = run
        tell_folder(folder)
        if goes_on:
            run.reread()
        resolved = self.asked.resolved
        settings = resolved.recipe.model_dump(mode="json", exclude={"auto"})
        run.write("config.json", {"settings": settings, "origins": resolved.origins, "given": resolved.given})
        run.write("env.json", environment())
        run.write("command.txt", self.asked.command + "\n")
        number, _, name = folder.name.partition("-")
        run.tell(
            name=name,
            number=int(number) if number.isdigit() else 0,
            status="running",
            started=run.facts.get("started", now()),
            ended=None,
            error=None,
            command=self.asked.command,
            launch=launch_names(os.environ),
            peak=run.facts.get("peak"),
        )

    def _introduce(self, introduction: Introduction) -> None:
        if self.run is not None:
            self.run.tell(**introduction.facts())
            for title, text in introduction.lines(shown_path(self.run.path)):
                self.console.say(title, text)

    def _go_on(self, training: Training) -> None:
        """Take up the newest whole checkpoint. A restart of a run that has none begins again."""
        group = training.engine.schedule.group
        there = any(training.checkpoints.glob("global_step*"))
        if not bool(group.exchange(torch.tensor([there]))[0]):  # as rank 0 sees it
            if self.asked.resumed is not None:
                where = shown_path(training.checkpoints.parent)
                raise UsageError(
                    "the run has no checkpoint to go on from", where=where, fix="start a run anew, with save_every=N"
                )
            self._say_resumed(0, "", training)
            return
        path, _ = training.engine.load_checkpoint(str(training.checkpoints))
        step, steps = training.engine.global_steps, self.asked.recipe.train.steps
        if self.asked.resumed is not None and step >= steps:
            raise UsageError(f"the run is at step {step} of {steps} already", where="train.steps", fix="give more: steps=N")
        self._say_resumed(step, Path(path).name, training)

    def _say_resumed(self, step: int, tag: str, training: Training) -> None:
        if self.run is not None:
            stage = self.asked.recipe.zero_optimization.stage
            self.run.record("resume", step, **{"from": tag, "world": training.engine.world_size, "stage": stage})
        source = tag or "the beginning, for there is no checkpoint yet"
        self.console.say("resume", f"from {source}: {self.asked.recipe.train.steps - step} steps to go")

    def fail(self, error: BaseException) -> int:
        """Leave the traceback in the log and the cause where it is told, once."""
        failure = failure_of(error, self.rank)
        story = "".join(traceback.format_exception(error))
        self.console.close()
        if self.asked.traceback:
            sys.stderr.write(story)
        told = leave(failure)
        if not told and self.rank == 0:
            print(failure.text, file=sys.stderr)
        # The cause is told: a disk that is full, say, must not take its place.
        with suppress(OSError):
            self._write_log(story)
        with suppress(OSError, NaughtError):
            if self.run is not None:
                self.run.tell(status="failed", ended=now(), error=failure.text)
                write_report([self.run.path], self.run.path / "report.html")
        return status_of(error)

    def _write_log(self, story: str) -> None:
        if self.folder is not None:
            self._log.parent.mkdir(parents=True, exist_ok=True)
            with self._log.open("a", encoding="utf-8") as log:
                log.write(story)


def _backend(recipe: Recipe) -> str | None:
    """What ranks speak. Several of them on one GPU cannot speak NCCL."""
    asked = recipe.train.backend
    if get_accelerator().device_name() == "cpu":
        return None if asked == "auto" else asked
    return "gloo" if asked == "gloo" or (asked == "auto" and comm.shares_device()) else None
