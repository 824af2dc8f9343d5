"""Monitors: where the scalars of a run go. CSV files, TensorBoard, Weights & Biases and Trackio; only rank 0 writes."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from naught.config import Config
from naught.config.observation import CsvMonitor, Tensorboard, Wandb
from naught.extras import need, package

__all__ = ["Event", "Monitor"]

Event = tuple[str, float, int]  # tag, value, step


class Monitor:
    """Writes scalars to every sink that the configuration names. On other ranks than 0 it is not enabled and writes nothing."""

    def __init__(self, config: Config, rank: int) -> None:
        # On every rank, though only one will write: a package that is missing must stop them all.
        for name in ("tensorboard", "wandb"):
            if getattr(config, name).enabled:
                need(name, where=f"{name}.enabled", fix=f"set {name}.enabled to false")
        self.sinks = _sinks(config) if rank == 0 else []

    @property
    def enabled(self) -> bool:
        """Whether this rank writes anywhere."""
        return bool(self.sinks)

    def write_events(self, events: Sequence[Event]) -> None:
        """Write scalars, each a tag, a value and a step. Files have them when this returns."""
        for sink in self.sinks:
            sink.write(events)

    def also_to_trackio(self, project: str, name: str) -> None:
        """Send them to Trackio too, as a run of this name."""
        trackio = package("trackio", where="train.trackio")
        self.sinks.append(_TrackedSink(trackio.init(project=project, name=name)))

    def close(self) -> None:
        """Finish the files. Nothing is written afterwards."""
        while self.sinks:
            self.sinks.pop().close()


def _sinks(config: Config) -> list[_Sink]:
    sinks: list[_Sink] = []
    if config.csv_monitor.enabled:
        sinks.append(_CsvSink(config.csv_monitor))
    if config.tensorboard.enabled:
        sinks.append(_TensorboardSink(config.tensorboard))
    if config.wandb.enabled:
        sinks.append(_TrackedSink(_wandb_run(config.wandb)))
    return sinks


class _Sink(Protocol):
    def write(self, events: Sequence[Event]) -> None: ...

    def close(self) -> None: ...


class _CsvSink:
    """A file for each tag, which is opened anew for each scalar: a run that dies loses none. Earlier rows stay."""

    def __init__(self, settings: CsvMonitor) -> None:
        self.folder = Path(settings.output_path or "csv_monitor", settings.job_name)
        self.folder.mkdir(parents=True, exist_ok=True)

    def write(self, events: Sequence[Event]) -> None:
        for tag, value, step in events:
            name = tag.replace("/", "_").replace(" ", "_")
            with (self.folder / f"{name}.csv").open("a", newline="", encoding="utf-8") as file:
                rows = csv.writer(file, lineterminator="\n")
                if file.tell() == 0:
                    rows.writerow(["step", name])
                rows.writerow([step, float(value)])

    def close(self) -> None:
        pass  # no file is open between two scalars


class _TensorboardSink:
    def __init__(self, settings: Tensorboard) -> None:
        from torch.utils.tensorboard import SummaryWriter

        folder = Path(settings.output_path or "runs", settings.job_name)
        self.writer: Any = SummaryWriter(log_dir=str(folder))

    def write(self, events: Sequence[Event]) -> None:
        for tag, value, step in events:
            self.writer.add_scalar(tag, float(value), step)
        self.writer.flush()

    def close(self) -> None:
        self.writer.close()


def _wandb_run(settings: Wandb) -> Any:
    wandb = package("wandb", where="wandb.enabled")
    return wandb.init(project=settings.project, group=settings.group, entity=settings.team)


class _TrackedSink:
    """A run of Weights & Biases, or of Trackio, which has the same functions. The service takes all scalars of a step together:
    they are sent with the first of the next, or at the close."""

    def __init__(self, run: Any) -> None:
        self.run = run

    def write(self, events: Sequence[Event]) -> None:
        for tag, value, step in events:
            self.run.log({tag: float(value)}, step=step)

    def close(self) -> None:
        self.run.finish()
