"""`naught plan`: from a command line to advice, printed or written as a configuration."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from naught import showing
from naught.advice import POOLED, Advice, advise
from naught.cli.files import write_new
from naught.errors import UsageError
from naught.estimate import Checkpointing, Forecast, Job
from naught.formulas import recipe
from naught.machine import Machine, detect, parse_gpu
from naught.papers import TABLES
from naught.placement import PLACEMENTS, Placement, Tier
from naught.quantity import parse_bytes, show_bytes, show_count
from naught.shapes import PRESETS, Model, parse_model
from naught.text import print_table

if TYPE_CHECKING:
    from naught.config import Config

__all__ = ["run_plan"]


def run_plan(options: argparse.Namespace) -> int:
    if options.models:
        _print_models()
        return 0
    if options.paper:
        _print_paper(options.paper)
        return 0
    if not options.model:
        raise UsageError("no model is given", fix="naught plan 7.5B, or naught plan --models for the presets")
    model = parse_model(options.model)
    machine, found = _machine(options)
    config = _config(options.config)
    job, precision = _job(options, config, machine.ranks)
    advice = advise(model, None, machine, job, automatic=options.activations == "auto")
    if options.json:
        print(json.dumps(_data(model, machine, job) | showing.as_data(advice), indent=2))
    else:
        _print(model, machine, found, job, precision, advice)
        if config is not None:
            _print_asked(config, advice)
    if options.write:
        _write(options, advice, job, precision)
    return 0 if advice.best else 1


def _print_models() -> None:
    rows = []
    for name, shape in PRESETS.items():
        numel = sum(run.numel * run.repeat for run in shape.runs)
        rows.append((name, show_count(numel), str(shape.layers), str(shape.hidden), str(shape.heads), str(shape.vocab or "-")))
    print_table("models", ("preset", "parameters", "layers", "hidden", "heads", "vocab"), rows)


def _print_paper(name: str) -> None:
    table = TABLES[name]()
    print_table(table.title, table.header, table.rows)
    for note in table.notes:
        print(note)


def _machine(options: argparse.Namespace) -> tuple[Machine, str]:
    """The machine asked for; without a GPU's name or size, the present one with what was asked changed."""
    machine, found = detect() if options.gpu is None else (Machine(), "")
    ranks = machine.ranks if options.ranks is None else options.ranks
    changes: dict[str, Any] = {"ranks": ranks}
    changes["ranks_per_node"] = options.per_node if options.per_node is not None else min(ranks, max(8, machine.ranks_per_node))
    gpu = parse_gpu(options.gpu) if options.gpu else machine.gpu
    if options.tflops:
        gpu = gpu._replace(flops=options.tflops * 1e12)
    if options.link:
        gpu = gpu._replace(link_bytes_s=parse_bytes(options.link, what="--link"))
    changes["gpu"] = gpu
    for name, field in (
        ("host", "host_bytes"),
        ("disk", "disk_bytes"),
        ("network", "network_bytes_s"),
        ("disk_speed", "disk_bytes_s"),
    ):
        text = getattr(options, name)
        if text is not None:
            changes[field] = parse_bytes(text, what="--" + name.replace("_", "-"))
    if not (
        gpu.flops > 0 and gpu.link_bytes_s > 0 and min(changes.get("network_bytes_s", 1), changes.get("disk_bytes_s", 1)) > 0
    ):
        raise UsageError("rates must be above 0")
    changes["unified"] = machine.unified and options.gpu is None
    return replace(machine, **changes), found


def _config(path: str | None) -> Config | None:
    if path is None:
        return None
    from naught.config import load

    return load(path)


def _job(options: argparse.Namespace, config: Config | None, world: int) -> tuple[Job, str]:
    """Flags win over the configuration, the configuration over the defaults."""
    batch, accumulation, dtype, optimizer = 1, 1, "bf16", "adamw"
    if config is not None:
        from naught.config import derive_batch

        if config.train_batch_size or config.train_micro_batch_size_per_gpu:
            _, batch, accumulation = derive_batch(config, world)
        dtype = "fp16" if config.fp16.enabled else "bf16" if config.bf16.enabled or "bf16.enabled" in config.auto else "fp32"
        optimizer = config.optimizer.type.lower() if config.optimizer else optimizer
    given = {"micro_batch": options.batch, "seq": options.seq, "accumulation": options.accumulation}
    given = {name: value for name, value in given.items() if value is not None}
    dtype, optimizer = options.dtype or dtype, options.optimizer or optimizer
    job = Job(
        **{"micro_batch": batch, "accumulation": accumulation} | given,
        recipe=recipe(dtype, optimizer),
        checkpointing=Checkpointing.BLOCK if options.activations == "auto" else Checkpointing(options.activations),
        fused_attention=options.attention == "fused",
    )
    return job, f"{dtype}, {optimizer}"


def _print(model: Model, machine: Machine, found: str, job: Job, precision: str, advice: Advice) -> None:
    from naught.estimate import transformer_activations

    assert model.shape is not None
    units = sum(run.repeat for run in model.runs)
    print(f"model    {model.name}: {show_count(model.numel)} parameters in {units} units")
    if model.note:
        print(f"         {model.note}")
    print(f"machine  {_machine_text(machine)}")
    if found:
        print(f"         {found}")
    print(f"job      micro-batch {job.micro_batch} x {job.seq} tokens, accumulation {job.accumulation}, {precision}")
    print(f"         activations by {transformer_activations(model.shape, job).source}")
    print()
    print_table("memory of each rank", showing.MEMORY_HEADER, showing.memory_rows(advice))
    print()
    print_table(
        "traffic and time of one step, and the largest GPT that would fit", showing.TIME_HEADER, showing.time_rows(advice)
    )
    print()
    print(showing.verdict(advice))


def _machine_text(machine: Machine) -> str:
    ranks = f"{machine.ranks} rank{'s' * (machine.ranks > 1)}"
    nodes = f", {machine.local_ranks} on a node" if machine.ranks > 1 else ""
    device, host, disk = (show_bytes(size) for size in (machine.gpu.memory_bytes, machine.host_bytes, machine.disk_bytes))
    return f"{ranks}{nodes}: {device} each, {host} host and {disk} disk a node, {machine.gpu.flops / 1e12:.3g} TFLOP/s"


def _print_asked(config: Config, advice: Advice) -> None:
    from naught.config import placement_of

    wanted = placement_of(config)
    name = POOLED if config.naught.placement == POOLED else next((key for key, row in PLACEMENTS.items() if row == wanted), None)
    row = next((row for row in advice.forecasts if row.name == name), None)
    if row is not None:
        print(f"the configuration asks for {row.name}, which {'fits' if row.fits else 'does not fit'}")
    else:
        print(f"the configuration asks for a placement without a row above: {wanted}")


def _data(model: Model, machine: Machine, job: Job) -> dict[str, Any]:
    return {
        "model": {"name": model.name, "numel": model.numel, "units": [run._asdict() for run in model.runs], "note": model.note},
        "machine": {
            "ranks": machine.ranks,
            "ranks_per_node": machine.local_ranks,
            "gpu_bytes": machine.gpu.memory_bytes,
            "host_bytes": machine.host_bytes,
            "disk_bytes": machine.disk_bytes,
            "flops": machine.gpu.flops,
        },
        "job": {"micro_batch": job.micro_batch, "seq": job.seq, "accumulation": job.accumulation},
    }


# --- writing the configuration of a placement -------------------------------------------------------------------------


def _write(options: argparse.Namespace, advice: Advice, job: Job, precision: str) -> None:
    names = {row.name: row for row in advice.forecasts}
    if options.placement and options.placement not in names:
        raise UsageError(f'no placement "{options.placement}"', fix=f"choose one of {', '.join(names)}")
    row = names[options.placement] if options.placement else advice.best
    if row is None:
        raise UsageError("nothing fits, so nothing was written", fix="name one with --placement to write it all the same")
    from naught.config import load

    document = _document(row, job, precision, options.nvme_path)
    load(document)  # what is written here must be what is accepted there
    write_new(options.write, json.dumps(document, indent=2) + "\n")
    print(f"wrote {options.write} for {row.name}", file=sys.stderr)


_DEVICES = {Tier.HOST: "cpu", Tier.DISK: "nvme"}


def _document(row: Forecast, job: Job, precision: str, nvme_path: str) -> dict[str, Any]:
    dtype, optimizer = precision.split(", ")
    types = {"adamw": "AdamW", "adam": "Adam", "lion": "Lion", "adagrad": "Adagrad", "sgd": "SGD"}
    document: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": job.micro_batch,
        "gradient_accumulation_steps": job.accumulation,
        "gradient_clipping": 1.0,
        "optimizer": {"type": types[optimizer], "params": {"lr": 1e-4}},
    }
    if dtype != "fp32":
        document[dtype] = {"enabled": True}
    ours: dict[str, Any] = {}
    if row.name == POOLED:
        document["zero_optimization"] = {"stage": 3}
        ours |= {"placement": POOLED, "nvme_path": nvme_path}
    else:
        document["zero_optimization"] = _zero(PLACEMENTS[row.name], nvme_path)
        if PLACEMENTS[row.name].grad.tier is Tier.DISK:
            ours["gradients"] = "disk"
    if row.tiles > 1:
        ours["tiles"] = row.tiles
    if row.checkpointing is Checkpointing.HOST:
        document["activation_checkpointing"] = {"cpu_checkpointing": True}
    return document | ({"naught": ours} if ours else {})


def _zero(placement: Placement, nvme_path: str) -> dict[str, Any]:
    splits = (placement.param.split, placement.grad.split, placement.optim.split)
    zero: dict[str, Any] = {"stage": sum(splits)}
    for key, place in (("offload_optimizer", placement.optim), ("offload_param", placement.param)):
        if place.tier is not Tier.DEVICE:
            zero[key] = {"device": _DEVICES[place.tier]}
            if place.tier is Tier.DISK:
                zero[key]["nvme_path"] = nvme_path
    return zero
