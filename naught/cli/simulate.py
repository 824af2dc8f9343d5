"""`naught simulate`: the engine as one rank of many that are not there."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import Any

from naught.errors import UsageError
from naught.model_names import parse_model
from naught.quantity import show_bytes, show_count
from naught.text import print_table

__all__ = ["run_simulate"]


def run_simulate(options: argparse.Namespace) -> int:
    shape = parse_model(options.model).shape
    if shape is None:
        raise UsageError(f"{options.model} has no shape that a module could be built of", fix="name a preset, or gpt:layers=...")
    from naught.comm import World
    from naught.trainer.simulating import Batch, simulate_gpt

    config = _config(options)
    batch = Batch(int(config["train_micro_batch_size_per_gpu"]), options.seq, not options.keep_activations)
    found = simulate_gpt(shape, config, World(options.ranks, options.rank, options.backend), batch)
    if options.json:
        print(json.dumps(asdict(found), indent=2))
        return 0
    print(f"{show_count(found.numel)} parameters in {found.units} units; rank {options.rank}, one of {found.ranks} ranks\n")
    whole = found.numel * _element_bytes(config)
    rows = [(name, show_bytes(nbytes), f"{nbytes / whole:.3f}") for name, nbytes in found.sent.items() if nbytes]
    total = sum(found.sent.values())
    print_table(
        "sent in a step", ("collective", "bytes", "Psi"), [*rows, ("together", show_bytes(total), f"{total / whole:.3f}")]
    )
    if found.moved:
        print_table("moved in a step", ("where", "bytes"), [(name, show_bytes(nbytes)) for name, nbytes in found.moved.items()])
    held = [(name, show_bytes(nbytes), _told(found.planned.get(name), nbytes)) for name, nbytes in found.peak.items() if nbytes]
    print_table("held at most, without activations", ("what", "bytes", "planned"), held)
    print_table("in the plan of a step", ("verb", "times"), [(verb, str(count)) for verb, count in found.verbs.items()])
    return 0


def _told(planned: int | None, held: int) -> str:
    return "-" if planned is None else "the same" if planned == held else show_bytes(planned)


def _element_bytes(config: dict[str, Any]) -> int:
    return 2 if any(config.get(name, {}).get("enabled") for name in ("bf16", "fp16")) else 4


def _config(options: argparse.Namespace) -> dict[str, Any]:
    if options.config:
        from naught.config import load, to_document

        document: dict[str, Any] = to_document(load(options.config))
        if not document.get("train_micro_batch_size_per_gpu"):
            document["train_micro_batch_size_per_gpu"] = options.batch
        document.pop("train_batch_size", None)
        return document
    zero: dict[str, Any] = {"stage": options.stage}
    if options.offload in ("optimizer", "both"):
        zero["offload_optimizer"] = {"device": "cpu"}
    if options.offload == "both":
        zero["offload_param"] = {"device": "cpu"}
    precision = {} if options.dtype == "fp32" else {options.dtype: {"enabled": True}}
    return {
        "train_micro_batch_size_per_gpu": options.batch,
        "gradient_accumulation_steps": options.accumulation,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {}},
        "zero_optimization": zero,
        **precision,
    }
