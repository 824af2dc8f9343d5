"""Observation: the monitors, loggers and timers that a configuration can ask for."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from naught.config.types import Block, Flag, Key, Names, Positive, Share, Text, Whole, idle

__all__ = ["CommsLogger", "CsvMonitor", "FlopsProfiler", "Tensorboard", "Throughput", "Timers", "Wandb"]


class Tensorboard(Block):
    enabled: Annotated[Flag, Key("write scalars for TensorBoard")] = False
    output_path: Annotated[Text, Key("folder for the files")] = ""
    job_name: Annotated[Text, Key("folder of this run below it", "no name of another product", peer="DeepSpeedJobName")] = (
        "naught"
    )


class CsvMonitor(Block):
    enabled: Annotated[Flag, Key("write scalars as CSV")] = False
    output_path: Annotated[Text, Key("folder for the files")] = ""
    job_name: Annotated[Text, Key("folder of this run below it", "no name of another product", peer="DeepSpeedJobName")] = (
        "naught"
    )


class Wandb(Block):
    enabled: Annotated[Flag, Key("send scalars to Weights & Biases")] = False
    group: Annotated[Text | None, Key("group of the run")] = None
    team: Annotated[Text | None, Key("team of the run")] = None
    project: Annotated[Text, Key("project of the run", "no name of another product", peer="deepspeed")] = "naught"


class CommsLogger(Block):
    enabled: Annotated[Flag, Key("log every collective with its bytes")] = False
    verbose: Annotated[Flag, Key("a line for each call, not only the sum")] = False
    prof_all: Annotated[Flag, Key("log all collectives, not only prof_ops")] = True
    prof_ops: Annotated[Names, Key("names of the collectives to log")] = ()
    debug: Annotated[Flag, Key("name the unit that called")] = False


class FlopsProfiler(Block):
    enabled: Annotated[Flag, Key("count the operations of one step")] = False
    profile_step: Annotated[Positive, Key("which step")] = 1
    module_depth: Annotated[Whole, Field(ge=-1), Key("how deep to list modules; -1 is all")] = -1
    top_modules: Annotated[Positive, Key("how many modules to list on each level")] = 1
    detailed: Annotated[Flag, Key("list every module")] = True
    output_file: Annotated[Text | None, Key("file for the listing; null is the console")] = None
    recompute_fwd_factor: Annotated[Share, Key("share of the forward that is recomputed")] = 0.0


class Throughput(Block):
    enabled: Annotated[Flag, Key("measure samples a second")] = True
    synchronized: Annotated[Flag, idle("no timer waits for the device")] = True


class Timers(Block):
    throughput: Annotated[Throughput, Key("the throughput timer")] = Throughput()
