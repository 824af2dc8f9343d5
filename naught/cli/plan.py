"""`naught plan`: from a command line to advice, printed or written as a configuration."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from naught import showing
from naught.advice import Advice, advise, pool
from naught.cli.arguments import SCALING
from naught.cli.files import write_new
from naught.cli.machines import machine_of, machine_text, rates_text
from naught.cli.plan_file import UNNAMED_FOLDER, Wanted, asked_beside, base_of, document_of, undecided
from naught.errors import UsageError
from naught.estimate import Forecast, forecast_with_most_staging
from naught.formulas import recipe
from naught.job import Checkpointing, Job, transformer_activations
from naught.machine import Machine
from naught.model_names import parse_model
from naught.papers import TABLES
from naught.presets import PRESETS
from naught.quantity import show_count
from naught.scaling import CURVES
from naught.shapes import Model, Run
from naught.sizes import PlacedRun
from naught.text import print_table

if TYPE_CHECKING:
    from naught.config import Config

__all__ = ["run_plan"]


def run_plan(options: argparse.Namespace) -> int:
    if options.html and options.paper not in (SCALING, *CURVES):
        *names, last = SCALING, *CURVES
        raise UsageError("--html draws what the papers say of scaling", fix=f"give --paper {', '.join(names)} or {last}")
    if options.models:
        _print_models()
        return 0
    if options.paper:
        _refuse_beside_a_paper(options)
        if options.html:  # first: nothing is printed if it cannot be
            _draw_papers(options.paper, Path(options.html))
        _print_papers(options.paper, as_json=options.json)
        return 0
    if not options.model:
        raise UsageError("no model is given", fix="naught plan 7.5B, or naught plan --models for the presets")
    if options.placement and not options.write:
        raise UsageError("--placement names what --write writes", fix="give --write too")
    question = _question(options)
    advice = advise(question.model, None, question.machine, question.job, automatic=options.activations == "auto")
    with redirect_stdout(sys.stderr if options.write == "-" else sys.stdout):  # which is for the configuration alone then
        if options.json:
            print(json.dumps(_data(question) | showing.as_data(advice), indent=2))
        else:
            _print(question, advice)
    if options.write:
        _write(options, advice, question)
    return 0 if advice.best else 1


def _refuse_beside_a_paper(options: argparse.Namespace) -> None:
    """A paper has its own models and machines."""
    given = [f"--{name.replace('_', '-')}" for name in _OF_A_QUESTION if getattr(options, name) is not None]
    given = [*([options.model] if options.model else []), *given]
    if given:
        raise UsageError(
            f"--paper prints what a paper says of its own models and machines: {', '.join(given)} cannot be meant with it",
            fix="leave one of them out",
        )


_OF_A_QUESTION = (
    *("ranks", "per_node", "gpu", "host", "disk", "tflops", "link", "network", "disk_speed"),
    *("config", "batch", "seq", "accumulation", "dtype", "optimizer", "write", "placement"),
)


def _print_models() -> None:
    rows = []
    for name, shape in PRESETS.items():
        numel = sum(run.numel * run.repeat for run in shape.runs)
        size = (show_count(numel), shape.layers, shape.hidden, shape.heads, shape.vocab or "-")
        rows.append((name, *map(str, size)))
    print_table("models", ("preset", "parameters", "layers", "hidden", "heads", "vocab"), rows)


def _print_papers(name: str, *, as_json: bool) -> None:
    tables = [make() for make in CURVES.values()] if name == SCALING else [{**TABLES, **CURVES}[name]()]
    if as_json:
        data = [table._asdict() for table in tables]
        print(json.dumps(data if name == SCALING else data[0], indent=2))
        return
    for at, table in enumerate(tables):
        print("\n" * (at > 0), end="")
        print_table(table.title, table.header, table.rows)
        for note in table.notes:
            print(note)


def _draw_papers(name: str, out: Path) -> None:
    from naught.report import write_scaling
    from naught.statements import STATEMENTS

    write_scaling([make() for key, make in STATEMENTS.items() if name in (SCALING, key)], out)
    print(f"wrote {out}", file=sys.stderr)


@dataclass(frozen=True)
class _Question:
    """What is asked: a model, a machine and a job, and how they came about."""

    model: Model
    machine: Machine
    job: Job
    dtype: str
    optimizer: str
    notes: tuple[str, ...]
    config: Config | None

    @property
    def asked(self) -> Forecast | None:
        """The forecast of just what the configuration says."""
        if self.config is None:
            return None
        assert self.model.shape is not None
        measured, ours, machine = transformer_activations(self.model.shape, self.job), self.config.naught, self.machine
        if ours.placement == "stage":
            placed = _placed(self.model.runs, self.config, machine.ranks)
        else:
            machine = machine if ours.nvme_path else replace(machine, disk_bytes=0)
            placed, found = pool(self.model.runs, lambda _: measured, machine, self.job, automatic=False, tiles=False)
            machine = replace(machine, berths=found.berths)
        return forecast_with_most_staging("configuration", placed, measured, machine, self.job, tiles=ours.tiles)


def _question(options: argparse.Namespace) -> _Question:
    model = parse_model(options.model)
    machine, found = machine_of(options)
    config = _config(options.config)
    machine = _within_limits(machine, options, config)
    dtype, optimizer = _precision(options, config, machine)
    ours = config.naught if config else None
    small = {"small_masters": ours.small_masters, "small_moments": ours.small_moments} if ours else {}
    job = replace(_job(options, config, machine.ranks), recipe=recipe(dtype, optimizer, **small))
    if config is not None:
        from naught.config import load, refuse_accumulation

        refuse_accumulation(load(_asked_of(options, config, job)), job.accumulation)
    notes = [note for note in (model.note, found) if note]
    if model.shape and model.shape.positions and job.seq > model.shape.positions:
        notes.append(f"the model has {model.shape.positions} positions, and a sample {job.seq} tokens")
    if not machine.host_bytes and not machine.unified:
        notes.append("no host memory is counted, so nothing fits that needs some: say what a node has, as --host 512GB")
    return _Question(model, machine, job, dtype, optimizer, tuple(notes), config)


def _placed(runs: Sequence[Run], config: Config, world: int) -> list[PlacedRun]:
    """Every unit as the configuration places it: neighbours that are alike make a run again."""
    from naught.config import place_by_stage

    units = [run._replace(repeat=1) for run in runs for _ in range(run.repeat)]
    alike = groupby(zip(units, place_by_stage([unit.numel for unit in units], config, world), strict=True))
    return [PlacedRun(unit._replace(repeat=len(list(members))), placement) for (unit, placement), members in alike]


def _config(path: str | None) -> Config | None:
    if path is None:
        return None
    from naught.config import load

    return load(path)


def _within_limits(machine: Machine, options: argparse.Namespace, config: Config | None) -> Machine:
    """A configuration's own limits hold, unless the command line says that there is less."""
    if config is None:
        return machine
    gpu, host = config.naught.gpu_memory, config.naught.host_memory
    if gpu is not None and (options.gpu is None or gpu < machine.gpu.memory_bytes):
        machine = replace(machine, gpu=machine.gpu._replace(memory_bytes=gpu))
    if host is not None and (options.host is None or host < machine.host_for_states):
        machine = replace(machine, host_bytes=host, host_share=1.0)
    return machine


def _precision(options: argparse.Namespace, config: Config | None, machine: Machine) -> tuple[str, str]:
    """Flags win over the configuration, the configuration over what suits the machine."""
    dtype = "bf16" if machine.gpu.has_bf16 else "fp16"
    optimizer = "adamw"
    if config is not None:
        wanted = [name for name in ("bf16", "fp16") if f"{name}.enabled" in config.auto]
        wanted = [name for name in ("bf16", "fp16") if getattr(config, name).enabled] or wanted
        dtype = (dtype if dtype in wanted else wanted[0]) if wanted else "fp32"
        if config.optimizer:
            optimizer = config.optimizer.type.lower()
            optimizer += "-momentum" if getattr(config.optimizer.params, "momentum", 0) else ""
    return options.dtype or dtype, options.optimizer or optimizer


def _job(options: argparse.Namespace, config: Config | None, world: int) -> Job:
    given: dict[str, Any] = {"fused_attention": options.attention == "fused"}
    if config is not None:
        from naught.config import derive_batch

        if config.train_batch_size or config.train_micro_batch_size_per_gpu:
            _, given["micro_batch"], given["accumulation"] = derive_batch(config, world)
        if config.naught.activations == "disk":
            given["checkpointing"] = Checkpointing.DISK
        elif config.naught.activations == "host" or config.activation_checkpointing.cpu_checkpointing:
            given["checkpointing"] = Checkpointing.HOST
        if config.data_types.grad_accum_dtype in ("bf16", "fp16"):
            given["summed_grad"] = 2
        given["wide_gradients"] = config.naught.wide_gradients
        given["host_sums"] = config.naught.host_sums
        given["update_in_backward"] = config.naught.update_in_backward
    flags = {"micro_batch": options.batch, "seq": options.seq, "accumulation": options.accumulation}
    given |= {name: value for name, value in flags.items() if value is not None}
    if options.activations != "auto":
        given["checkpointing"] = Checkpointing(options.activations)
    return Job(**given)


def _print(question: _Question, advice: Advice) -> None:
    model, job = question.model, question.job
    assert model.shape is not None
    units = sum(run.repeat for run in model.runs)
    print(f"model    {model.name}: {show_count(model.numel)} parameters in {units} units")
    print(f"machine  {machine_text(question.machine)}")
    print(f"         {rates_text(question.machine)}")
    print(
        f"job      micro-batch {job.micro_batch} x {job.seq} tokens, accumulation {job.accumulation}, "
        f"{question.dtype}, {question.optimizer}"
    )
    print(f"         activations by {transformer_activations(model.shape, job).source}")
    for note in question.notes:
        print(f"note     {note}")
    print()
    print_table("memory of each rank", showing.MEMORY_HEADER, showing.memory_rows(advice.forecasts))
    print()
    print_table(
        "traffic and time of one step, and the largest GPT that would fit", showing.TIME_HEADER, showing.time_rows(advice)
    )
    print()
    if question.asked is not None:
        print_table("as the configuration says", showing.MEMORY_HEADER, showing.memory_rows([question.asked]))
        fits = "fits" if question.asked.fits else f"does not fit: it lacks {showing.lacking(question.asked)}"
        print(f"the configuration {fits}, {showing.span(question.asked)}\n")
    print(showing.verdict(advice))


def _data(question: _Question) -> dict[str, Any]:
    model, machine, job = question.model, question.machine, question.job
    return {
        "model": {"name": model.name, "numel": model.numel, "units": [run._asdict() for run in model.runs]},
        "machine": {
            "ranks": machine.ranks,
            "ranks_per_node": machine.local_ranks,
            "gpu_bytes": machine.gpu.memory_bytes,
            "host_bytes": machine.host_bytes,
            "disk_bytes": machine.disk_bytes,
            "flops": machine.gpu.flops,
            "collective_bytes_s": machine.collective_bytes_s,
            "link_bytes_s": machine.link_bytes_s,
            "disk_bytes_s": machine.disk_bytes_s,
            "update_numel_s": machine.update_numel_s,
        },
        "job": {
            "micro_batch": job.micro_batch,
            "seq": job.seq,
            "accumulation": job.accumulation,
            "dtype": question.dtype,
            "optimizer": question.optimizer,
        },
        "notes": list(question.notes),
        "configuration": showing.forecast_data(question.asked) if question.asked else None,
    }


# --- writing the configuration of a placement -------------------------------------------------------------------------


def _write(options: argparse.Namespace, advice: Advice, question: _Question) -> None:
    names = {row.name: row for row in advice.forecasts}
    if options.placement and options.placement not in names:
        raise UsageError(f'no placement "{options.placement}"', fix=f"choose one of {', '.join(names)}")
    row = names[options.placement] if options.placement else advice.best
    if row is None:
        raise UsageError("nothing fits, so nothing was written", fix="name one with --placement to write it all the same")
    from naught.config import load, named_folder

    job, config = question.job, question.config
    base = base_of(job, question.dtype, question.optimizer) if config is None else undecided(_asked_of(options, config, job))
    folder = options.nvme_path or (named_folder(config) if config else None)
    document, lacks_folder = document_of(row, Wanted(question.machine, folder, base))
    load(document)  # what is written here must be what is accepted there
    if lacks_folder:
        print(f"nvme_path is {UNNAMED_FOLDER}: change it to a folder on a fast local disk, or give --nvme-path", file=sys.stderr)
    text = json.dumps(document, indent=2) + "\n"
    if options.write == "-":
        sys.stdout.write(text)
        return
    write_new(options.write, text)
    print(f"wrote {options.write} for {row.name}", file=sys.stderr)


def _asked_of(options: argparse.Namespace, config: Config, job: Job) -> dict[str, Any]:
    """What a configuration says, and the command line beside it."""
    from naught.config import to_document

    batch = options.batch is not None or options.accumulation is not None
    return asked_beside(to_document(config), job, batch=batch, dtype=options.dtype, optimizer=options.optimizer)
