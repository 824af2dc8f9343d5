"""Arguments: what each subcommand takes. Imports nothing heavy."""

from __future__ import annotations

import argparse
from typing import Any

__all__ = ["PAPERS", "STARTERS", "add_ckpt", "add_config", "add_plan"]

PAPERS = ("zero-table1", "zero-table2", "zero-figure1", "zero-c1-c5", "infinity-figure2", "infinity-bandwidth")
STARTERS = ("stage1", "stage2", "stage3", "offload", "infinity")

_PLAN = """Forecast the memory, traffic and time of a model under every ZeRO stage and offload, and recommend one.

MODEL is a preset (--models lists them), gpt:layers=48,hidden=1600,heads=25 (also kv_heads, ffn, vocab, positions,
tied), a count such as 7.5B, or a Hugging Face config.json or its folder. Sizes are decimal: 80GB is 80e9 bytes,
80GiB is binary. Host and disk belong to a node and are shared by its ranks. Any other module: naught.plan_for
from Python.
"""


def add_plan(commands: Any) -> None:
    parser = commands.add_parser(
        "plan",
        help="what a model needs on a machine, before the run",
        description=_PLAN,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", nargs="?", metavar="MODEL", help="preset, gpt:..., count or config.json")
    parser.add_argument("--models", action="store_true", help="list the presets")
    parser.add_argument("--paper", choices=PAPERS, help="print a table of the papers, as these formulas compute it")
    machine = parser.add_argument_group("machine (default: this one)")
    machine.add_argument("--ranks", type=int, metavar="N", help="data-parallel ranks, one GPU each")
    machine.add_argument("--per-node", type=int, metavar="N", help="ranks that share a node (default: up to 8)")
    machine.add_argument("--gpu", metavar="SIZE|NAME", help="memory of one GPU, such as 80GB, or its name, such as h100")
    machine.add_argument("--host", metavar="SIZE", help="memory of one node")
    machine.add_argument("--disk", metavar="SIZE", help="NVMe space of one node")
    machine.add_argument("--tflops", type=float, metavar="X", help="TFLOP/s that one GPU sustains")
    machine.add_argument("--link", metavar="SIZE", help="bytes a second between one GPU and the host, such as 55GB")
    machine.add_argument("--network", metavar="SIZE", help="bytes a second that one rank sends in a collective")
    machine.add_argument("--disk-speed", metavar="SIZE", help="bytes a second of one node's disks")
    job = parser.add_argument_group("job")
    job.add_argument("--config", metavar="FILE", help="a DeepSpeed configuration: its batch, precision and optimizer")
    job.add_argument("--batch", type=int, metavar="N", help="samples in one forward of one rank (default 1)")
    job.add_argument("--seq", type=int, metavar="N", help="tokens of a sample (default 1024)")
    job.add_argument("--accumulation", type=int, metavar="N", help="forwards before an update (default 1)")
    job.add_argument(
        "--dtype", choices=("bf16", "fp16", "fp32"), help="precision of weights (default bf16, or fp16 on a GPU without it)"
    )
    job.add_argument("--optimizer", choices=("adamw", "adam", "lion", "adagrad", "sgd", "sgd-momentum"), help="default adamw")
    job.add_argument(
        "--activations",
        choices=("auto", "none", "block", "host"),
        default="auto",
        help="checkpoints: none, one a block, or those in host memory; auto: a block, in host memory if it must be",
    )
    job.add_argument("--attention", choices=("fused", "eager"), default="fused", help="eager keeps the seq x seq scores")
    output = parser.add_argument_group("output")
    output.add_argument(
        "--write", metavar="FILE", help="write the configuration of the recommended placement; - for standard output"
    )
    output.add_argument("--placement", metavar="NAME", help="with --write: this placement instead of the recommended one")
    output.add_argument("--nvme-path", metavar="DIR", default="/local_nvme", help="with --write: folder for the disk tier")
    output.add_argument("--json", action="store_true", help="print data instead of tables")


def add_config(commands: Any) -> None:
    parser = commands.add_parser("config", help="check, explain or start a DeepSpeed configuration")
    actions = parser.add_subparsers(title="actions", dest="action", metavar="ACTION", required=True)
    check = actions.add_parser("check", help="print every problem, or what becomes of each key")
    check.add_argument("file", metavar="FILE", help="a DeepSpeed JSON, base64 of it, or - for standard input")
    check.add_argument("--world", type=int, metavar="N", help="derive the batch sizes for this many ranks too")
    check.add_argument("--json", action="store_true", help="print data instead of a table")
    explain = actions.add_parser("explain", help="say what a key does here")
    explain.add_argument("key", nargs="?", metavar="KEY", help="a key or its full path; without one, all of them")
    schema = actions.add_parser("schema", help="write the JSON Schema, for editors")
    schema.add_argument("-o", "--output", metavar="FILE", help="instead of standard output")
    init = actions.add_parser("init", help="write a starter configuration")
    init.add_argument("kind", choices=STARTERS, help="what to start from")
    init.add_argument("-o", "--output", metavar="FILE", help="instead of standard output; never overwritten")


_EXPORT = """Write the weights of a checkpoint as Hugging Face safetensors: model.safetensors, or numbered files with an index.
Tied parameters are written under each of their names. Takes memory for a few blocks, and neither a GPU nor the ranks that
saved. Where training computed in 16 bits, what was saved are the 32-bit masters."""
_DIFF = """Compare two checkpoints, of any worlds and stages, bit by bit: parameters, buffers and optimizer states. Ends with 0 if
they are the same, else with 1."""


def add_ckpt(commands: Any) -> None:
    parser = commands.add_parser("ckpt", help="look at checkpoints, verify, export and compare them")
    actions = parser.add_subparsers(title="actions", dest="action", metavar="ACTION", required=True)
    for name, meaning in (
        ("info", "list what a folder of checkpoints holds"),
        ("verify", "read every byte and compare checksums"),
    ):
        action = actions.add_parser(name, help=meaning, description=f"{meaning[0].upper()}{meaning[1:]}.")
        action.add_argument("folder", metavar="DIR", help="what save_checkpoint was given, or one checkpoint in it")
        action.add_argument("tag", nargs="?", metavar="TAG", help="one of them, such as global_step100; without it, all")
        if name == "info":
            action.add_argument("--json", action="store_true", help="print data instead of a table")
    export = actions.add_parser("export", help="write the weights as Hugging Face safetensors", description=_EXPORT)
    export.add_argument("folder", metavar="DIR", help="what save_checkpoint was given, or one checkpoint in it")
    export.add_argument("tag", nargs="?", metavar="TAG", help="one of them; without it, the newest")
    export.add_argument("--to", required=True, metavar="OUT", help="the folder to write to; nothing in it is overwritten")
    export.add_argument("--dtype", choices=("saved", "fp32", "bf16", "fp16"), default="saved", help="default: as it was saved")
    export.add_argument("--file-size", metavar="SIZE", default="5GB", help="the most bytes of one file (default 5GB)")
    diff = actions.add_parser("diff", help="say where two checkpoints differ", description=_DIFF)
    for which in ("one", "other"):
        diff.add_argument(which, metavar=which.upper(), help="a checkpoint, or a folder of them, of which the newest is meant")
    diff.add_argument("--json", action="store_true", help="print data instead of a table")
