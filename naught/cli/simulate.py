"""`naught simulate`: the engine as one rank of many that are not there."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from typing import TYPE_CHECKING, Any

from naught.cli.files import write_new
from naught.cli.machines import machine_of, machine_text, rates_text
from naught.cli.rehearse import run_rehearsal
from naught.errors import UsageError
from naught.machine import Machine
from naught.model_names import parse_model
from naught.pacing import Pace, pace
from naught.placement import Tier
from naught.quantity import show_bytes, show_count, show_seconds
from naught.text import print_table

if TYPE_CHECKING:
    from naught.simulation import Simulated
    from naught.trainer.simulating import Batch

__all__ = ["run_simulate"]

_SEQ = 1024


def run_simulate(options: argparse.Namespace) -> int:
    shape = parse_model(options.model).shape
    if shape is None:
        raise UsageError(f"{options.model} has no shape that a module could be built of", fix="name a preset, or gpt:layers=...")
    from naught.comm import World
    from naught.trainer.simulating import Batch, simulate_gpt

    if options.real:
        _refuse_disk(options)
        return run_rehearsal(options, shape, _config(options, "fp32"))
    if options.steps is not None:
        raise UsageError("--steps is for --real: a simulation takes one step", fix="leave it out, or add --real")
    machine, note = machine_of(options)
    config = _config(options, "bf16" if machine.gpu.has_bf16 else "fp16")
    batch = Batch(int(config["train_micro_batch_size_per_gpu"]), options.seq or _SEQ, not options.keep_activations)
    found = simulate_gpt(shape, config, World(machine.ranks, options.rank or 0, options.backend or "nccl", machine), batch)
    paced = pace(found.course, machine)
    if options.timeline:
        write_new(options.timeline, json.dumps(_trace(paced)))
    if options.json:
        told = {"job": _job(config, batch), "rank": options.rank or 0, "machine": machine_text(machine)}
        print(json.dumps(told | _data(found) | {"seconds": paced.seconds, "busy_s": paced.busy}, indent=2))
        return 0
    print(f"model    {show_count(found.numel)} parameters in {found.units} units; rank {options.rank or 0} of {found.ranks}")
    print(f"machine  {machine_text(machine)}")
    print(f"job      {_job(config, batch)}")
    if note:
        print(f"note     {note}")
    print()
    whole = found.numel * _element_bytes(config)
    rows = [(name, show_bytes(nbytes), f"{nbytes / whole:.3f}") for name, nbytes in found.sent.items() if nbytes]
    total = sum(found.sent.values())
    print_table(
        "sent in a step", ("collective", "bytes", "Psi"), [*rows, ("together", show_bytes(total), f"{total / whole:.3f}")]
    )
    print()
    if found.moved:
        print_table("moved in a step", ("where", "bytes"), [(name, show_bytes(nbytes)) for name, nbytes in found.moved.items()])
        print()
    held = [(name, show_bytes(nbytes), _told(found.planned.get(name), nbytes)) for name, nbytes in found.peak.items() if nbytes]
    held += [("activations", show_bytes(found.activations.most), "-")]
    print_table("held at most", ("what", "bytes", "planned"), held)
    print(f"activations: {show_bytes(found.activations.kept)} on the device from a forward to its backward\n")
    print_table("together, if all of that came at once", ("tier", "bytes", "of", "fits"), _fits(found, machine))
    print()
    updates = f"updates of {show_count(machine.host_update_numel_s)} elements/s on the host"
    print(f"a step takes {show_seconds(paced.seconds)} ({rates_text(machine)}, {updates})")
    print_table("busy meanwhile", ("lane", "time"), [(lane, show_seconds(seconds)) for lane, seconds in paced.busy.items()])
    print()
    print_table("in the plan of a step", ("verb", "times"), [(verb, str(count)) for verb, count in found.verbs.items()])
    return 0


def _job(config: dict[str, Any], batch: Batch) -> str:
    dtype = next((name for name in ("bf16", "fp16") if config.get(name, {}).get("enabled")), "fp32")
    ours, zero = config.get("naught", {}), config.get("zero_optimization", {})
    places = [f"{name} on {block['device']}" for name in ("offload_optimizer", "offload_param") if (block := zero.get(name))]
    places += [f"{name} {ours[name]}" for name in ("placement", "gradients", "activations") if ours.get(name)]
    accumulation = config.get("gradient_accumulation_steps") or 1
    parts = [
        f"stage {zero.get('stage', 0)}",
        dtype,
        f"micro-batch {batch.micro} x {batch.seq} tokens",
        f"accumulation {accumulation}",
    ]
    return ", ".join([*parts, *places])


_STATES = ("weights", "masters", "rests", "states")
# Gradients have a place of their own on the host and on disk, and come and go on the device.
_AT_REST = {*_STATES, *(f"{tier} {name}" for tier in ("host", "disk") for name in (*_STATES, "gradients"))}


def _fits(found: Simulated, machine: Machine) -> list[tuple[str, str, str, str]]:
    """Peaks need not come together: if all of them have room it fits, and if what always rests there has none it does not."""
    total, resting = Counter({Tier.DEVICE: found.activations.most}), Counter[Tier]()
    for name, nbytes in found.peak.items():
        tier = {"host": Tier.DEVICE if machine.unified else Tier.HOST, "disk": Tier.DISK}.get(name.split()[0], Tier.DEVICE)
        total[tier] += nbytes
        resting[tier] += nbytes if name in _AT_REST else 0
    rows = []
    for tier, nbytes in total.items():
        room = machine.capacity(tier)
        if room:  # else nobody says how much there is
            fits = "yes" if nbytes <= room else "no" if resting[tier] > room else "perhaps: naught plan tells"
            rows.append((str(tier), show_bytes(nbytes), show_bytes(room), fits))
    return rows


def _data(found: Simulated) -> dict[str, Any]:
    names = ("ranks", "numel", "units", "sent", "moved", "peak", "planned", "verbs", "flops")
    return {name: getattr(found, name) for name in names} | {"activations": found.activations._asdict()}


def _trace(paced: Pace) -> dict[str, Any]:
    """As browsers' tracing pages read it: a row for each lane."""
    lanes = {lane: at for at, lane in enumerate(paced.busy)}
    bars = [
        {
            "ph": "X",
            "pid": 0,
            "tid": lanes[lane],
            "name": f"{what} {unit or 'root'}",
            "ts": start * 1e6,
            "dur": (stop - start) * 1e6,
        }
        for lane, what, unit, start, stop in paced.bars
    ]
    names = [{"ph": "M", "pid": 0, "tid": at, "name": "thread_name", "args": {"name": lane}} for lane, at in lanes.items()]
    return {"traceEvents": [*names, *bars]}


def _told(planned: int | None, held: int) -> str:
    return "-" if planned is None else "the same" if planned == held else show_bytes(planned)


def _element_bytes(config: dict[str, Any]) -> int:
    return 2 if any(config.get(name, {}).get("enabled") for name in ("bf16", "fp16")) else 4


_FOLDER = "/local_nvme"  # which is not looked at
_HOST, _DISK = {"device": "cpu"}, {"device": "nvme", "nvme_path": _FOLDER}
_BELOW = {"offload_optimizer": _DISK, "offload_param": _DISK | {"max_in_cpu": 0}}
_OFFLOADS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "none": ({}, {}),
    "optimizer": ({"offload_optimizer": _HOST}, {}),
    "both": ({"offload_optimizer": _HOST, "offload_param": _HOST}, {}),
    "disk": (_BELOW, {}),
    "disk-all": (_BELOW, {"gradients": "disk"}),
    "auto": ({}, {"placement": "auto", "nvme_path": _FOLDER}),
}


_OF_A_CONFIGURATION = ("stage", "offload", "activations", "accumulation", "dtype")


def _refuse_beside_a_configuration(options: argparse.Namespace) -> None:
    given = [f"--{name}" for name in _OF_A_CONFIGURATION if getattr(options, name) is not None]
    if options.config and given:
        raise UsageError(
            f"{options.config} says this already: {', '.join(given)} would not be heard", fix="leave one of the two out"
        )


def _refuse_disk(options: argparse.Namespace) -> None:
    """What is real needs a real folder."""
    zero, ours = _OFFLOADS[options.offload or "none"]
    to_disk = [f"--offload {options.offload}"] if any("nvme_path" in block for block in (ours, *zero.values())) else []
    to_disk += ["--activations disk"] if options.activations == "disk" else []
    if to_disk:
        raise UsageError(
            f"--real would write to a disk of which nobody says where ({', '.join(to_disk)})",
            fix="name a folder in a configuration, and give --config",
        )


def _config(options: argparse.Namespace, usual: str) -> dict[str, Any]:
    """What `--config` says, else what the options say; `usual` is the precision where neither does."""
    micro = 1 if options.batch is None else options.batch
    _refuse_beside_a_configuration(options)
    if options.config:
        from naught.config import load, to_document

        document: dict[str, Any] = to_document(load(options.config))
        if options.batch is not None or not document.get("train_micro_batch_size_per_gpu"):
            document["train_micro_batch_size_per_gpu"] = micro
        document.pop("train_batch_size", None)
        return document
    zero, ours = _OFFLOADS[options.offload or "none"]
    if options.activations:
        ours = ours | {"activations": options.activations, "nvme_path": _FOLDER}
        ours |= {"saved_tensors": "all"} if options.keep_activations else {}
    dtype = options.dtype or usual
    precision = {} if dtype == "fp32" else {dtype: {"enabled": True}}
    return {
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": 1 if options.accumulation is None else options.accumulation,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {}},
        "zero_optimization": {"stage": 3 if options.stage is None else options.stage, **zero},
        "naught": ours,
        **precision,
    }
