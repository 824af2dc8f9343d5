"""Arguments: what each subcommand takes. Imports nothing heavy."""

from __future__ import annotations

import argparse
from typing import Any

__all__ = [
    "PAPERS",
    "SCALING",
    "STARTERS",
    "add_bench",
    "add_ckpt",
    "add_config",
    "add_doctor",
    "add_launch",
    "add_plan",
    "add_report",
    "add_simulate",
    "add_train",
]

SCALING = "scaling"  # the last three together
PAPERS = (
    *("zero-table1", "zero-table2", "zero-figure1", "zero-c1-c5", "infinity-figure2", "infinity-bandwidth"),
    *("zero-scaling", "offload-scaling", "infinity-scaling", SCALING),
)
STARTERS = ("stage1", "stage2", "stage3", "offload", "infinity")

_PLAN = """Forecast the memory, traffic and time of a model under every ZeRO stage and offload, and recommend one.

MODEL is a preset (--models lists them), gpt:layers=48,hidden=1600,heads=25 (also kv_heads, ffn, vocab, positions,
tied), a count such as 7.5B, or a Hugging Face config.json or its folder. Sizes are decimal: 80GB is 80e9 bytes,
80GiB is binary. Host and disk belong to a node and are shared by its ranks. Any other module: naught.plan_for
from Python.
"""


def _add_machine(parser: argparse.ArgumentParser) -> None:
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


def _count(text: str) -> int:
    """At least one."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, is {text[:80]}")
    return int(text)


def _add_sizes(parser: argparse._ActionsContainer) -> None:
    parser.add_argument("--batch", type=_count, metavar="N", help="samples in one forward of one rank (default 1)")
    parser.add_argument("--seq", type=_count, metavar="N", help="tokens of a sample (default 1024)")
    parser.add_argument("--accumulation", type=_count, metavar="N", help="forwards before an update (default 1)")
    parser.add_argument(
        "--dtype", choices=("bf16", "fp16", "fp32"), help="precision of weights (default bf16, or fp16 on a GPU without it)"
    )


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
    _add_machine(parser)
    job = parser.add_argument_group("job")
    job.add_argument(
        "--config", metavar="FILE", help="a DeepSpeed configuration: its batch, precision, optimizer and limits of memory"
    )
    _add_sizes(job)
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
        "--write",
        metavar="FILE",
        help="write the configuration of the recommended placement, what --config says beside it included; - for standard output",
    )
    output.add_argument("--placement", metavar="NAME", help="with --write: this placement instead of the recommended one")
    output.add_argument("--nvme-path", metavar="DIR", help="with --write: folder for the disk tier")
    output.add_argument("--json", action="store_true", help="print data instead of tables")
    output.add_argument("--html", metavar="FILE", help="with --paper scaling, or one of its three: its curves, as one page")


_SIMULATE = """Run the engine as one rank of many that are not there, on tensors without contents: what it sends, moves and
holds in a step, activations included, how long that takes on a machine, and its plan. Nothing is written to any disk.
With --real: all ranks of a small run in this process, on CPUs and with contents, for debugging. MODEL is as for naught
plan. Any other module: naught.simulation.simulate and naught.comm.rehearse from Python.
"""


def add_simulate(commands: Any) -> None:
    parser = commands.add_parser(
        "simulate",
        help="the engine as one of many ranks, without them",
        description=_SIMULATE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", metavar="MODEL", help="preset, gpt:..., count or config.json")
    _add_machine(parser)
    parser.add_argument("--rank", type=int, metavar="N", help="which of them this one is (default 0)")
    parser.add_argument("--backend", choices=("nccl", "gloo"), help="what they talk by (default nccl)")
    parser.add_argument("--real", action="store_true", help="all of them, in this process, with the numbers of a real run")
    parser.add_argument("--steps", type=int, metavar="N", help="with --real: how many (default 3)")
    parser.add_argument("--config", metavar="FILE", help="a DeepSpeed configuration, instead of the options below")
    parser.add_argument("--stage", type=int, choices=(0, 1, 2, 3), help="of ZeRO (default 3)")
    parser.add_argument(
        "--offload",
        choices=("none", "optimizer", "both", "disk", "disk-all", "auto"),
        help="what rests on the host: the optimizer, or parameters too; or both on disk, or gradients too; auto: what has no "
        "room nearer, by --gpu, --host and --disk (default none)",
    )
    parser.add_argument("--activations", choices=("host", "disk"), help="where what a backward needs rests (default: the device)")
    _add_sizes(parser)
    parser.add_argument("--keep-activations", action="store_true", help="do not compute blocks again in the backward")
    parser.add_argument("--timeline", metavar="FILE", help="write when what happens, for chrome://tracing or ui.perfetto.dev")
    parser.add_argument("--json", action="store_true", help="print data instead of tables")


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


_TRAIN = """Train a language model under ZeRO, and leave a folder that says what happened.

Without arguments: the demo, a GPT of bytes on the sources of Python's standard library, in about a minute, on 2 CPU processes
at stage 3. CONFIG is a DeepSpeed configuration (JSON, or YAML) with three blocks more: model, data and train. key=value
changes any key: train.steps=200, zero_optimization.stage=2, and for short steps=200, stage=2, model=gpt2, data=my/texts,
lr=1e-4. docs/training.md lists all.

The same command works under torchrun and srun; without them it starts the ranks itself."""
_TRAIN_ENDS = """ends with
  0   the run is over
  1   it failed: the cause is printed, tracebacks are in the run's logs/
  2   what was asked for cannot be done
  75  SIGTERM, SIGINT or SIGUSR1 has stopped it, and it was saved: --resume goes on

examples
  naught train                                    the demo
  naught train model=gpt2 data='books/*.txt' data.seq=512 --dtype bf16
  naught train ds.json steps=1000 train.save_every=100 --keep 3
  naught train --resume                           the last run, from its newest checkpoint
  naught train --resume 7 steps=2000              run 7, for longer
  torchrun --nproc-per-node 8 -m naught train ds.json
"""


def add_train(commands: Any) -> None:
    parser = commands.add_parser(
        "train",
        help="train a model, and see where memory and time go",
        description=_TRAIN,
        epilog=_TRAIN_ENDS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("words", nargs="*", metavar="CONFIG | key=value", help="a configuration first, then changes of it")
    short = parser.add_argument_group("short forms of configuration keys")
    short.add_argument("--stage", type=int, choices=range(4), help="zero_optimization.stage")
    short.add_argument("--dtype", choices=("fp32", "bf16", "fp16"), help="fp16.enabled and bf16.enabled")
    short.add_argument("--offload", action="store_true", help="offload_optimizer to the CPU, at stage 3 offload_param too")
    short.add_argument(
        "--placement",
        choices=("stage", "auto", "pooled"),
        help="naught.placement: auto, or pooled, uses GPU and host as one memory",
    )
    short.add_argument("--gpu", metavar="SIZE", help="naught.gpu_memory: device memory that a rank may have, such as 32GB")
    short.add_argument("--host", metavar="SIZE", help="naught.host_memory: host memory that the ranks of a host may have")
    short.add_argument("--keep", type=int, metavar="N", help="naught.keep_last: how many of the newest checkpoints stay")
    short.add_argument("--name", help="train.name: of the run's folder")
    ranks = parser.add_argument_group("ranks")
    ranks.add_argument(
        "--nproc",
        type=int,
        metavar="N",
        help="how many to start here (default: as many as a run had that goes on; one for each GPU, 2 without)",
    )
    ranks.add_argument("--max-restarts", type=int, default=0, metavar="N", help="how often to start them anew if one fails")
    folder = parser.add_argument_group("folder")
    folder.add_argument("--runs", default="runs", metavar="DIR", help="where runs' folders are (default: runs)")
    folder.add_argument(
        "--resume",
        nargs="?",
        const="last",
        metavar="RUN",
        help="go on with a run: its number, name or folder (default: the last)",
    )
    output = parser.add_argument_group("output")
    output.add_argument("--quiet", action="store_true", help="print nothing but errors")
    output.add_argument("--log-json", action="store_true", help="print records instead of lines")
    output.add_argument("--print-config", action="store_true", help="print every key with its value, and do not train")
    output.add_argument("--traceback", action="store_true", help="print tracebacks too, not only the cause of a failure")


_LAUNCH = """Start a script as several ranks of this machine, by torchrun's agent with safe defaults: ranks and agent listen on
the loopback only, and each rank has as many threads as it has cores to itself. What follows SCRIPT are its own arguments. For
several machines use torchrun or srun (docs/multi-node.md)."""


def add_launch(commands: Any) -> None:
    parser = commands.add_parser("launch", help="start a script of yours as several ranks", description=_LAUNCH)
    parser.add_argument("--nproc", type=int, metavar="N", help="how many ranks (default: one for each GPU, 2 without)")
    parser.add_argument("--max-restarts", type=int, default=0, metavar="N", help="how often to start them anew if one fails")
    parser.add_argument("-m", "--module", action="store_true", help="SCRIPT is the name of a module, as with python -m")
    parser.add_argument("script", metavar="SCRIPT", help="a Python file")
    parser.add_argument("script_arguments", nargs=argparse.REMAINDER, metavar="ARGUMENTS", help="what the script is given")


_REPORT = """Write one HTML file that shows a run, or two runs side by side: loss, throughput, memory against the plan, times
of phases, communication, the configuration. It needs no network and can be mailed. A run is its folder, its number, its name,
or last."""


def add_report(commands: Any) -> None:
    parser = commands.add_parser("report", help="a page to look at, of a run or of two", description=_REPORT)
    parser.add_argument("run", metavar="RUN", help="a run's folder, number or name, or last")
    parser.add_argument("other", nargs="?", metavar="RUN2", help="a run to compare it with")
    parser.add_argument("--runs", default="runs", metavar="DIR", help="where runs' folders are (default: runs)")
    parser.add_argument("-o", "--output", metavar="FILE", help="default: report.html in the folder of RUN")


_DOCTOR = """Look at this machine: versions, GPUs, memory and its limits, disks, network, launchers, measured rates, and whether
the stages agree bit for bit here. Each line is ok, note or bad; ends with 1 if any is bad. Paste it into a bug report."""


def add_doctor(commands: Any) -> None:
    parser = commands.add_parser("doctor", help="what is well and what is not on this machine", description=_DOCTOR)
    parser.add_argument("--quick", action="store_true", help="measure nothing and train nothing")
    parser.add_argument("--json", action="store_true", help="print data instead of lines")


_STAGES = """Train one model under DDP and under each of the six: zero1, zero2, zero2-offload, zero3, zero3-offload, zero3-fp16.
Prints what each holds after forward, backward and step, how long it takes, and why it differs; leaves a page and stages.json."""
_MEASURES = {
    "comm": "bytes a second that a rank sends in a collective",
    "adam": "elements a second of the optimizer",
    "disk": "bytes a second of the disk of a folder",
    "step": "operations a second of a training step",
}


def add_bench(commands: Any) -> None:
    parser = commands.add_parser("bench", help="the six runs of ZeRO side by side; and what this machine can do")
    actions = parser.add_subparsers(title="actions", dest="action", metavar="ACTION", required=True)
    stages = actions.add_parser("stages", help="the six runs: memory and time of every stage", description=_STAGES)
    stages.add_argument("--model", help="a preset or gpt:... (default: gpt2-medium on a GPU, 6 layers of 128 without)")
    stages.add_argument("--batch", type=int, default=4, metavar="N", help="samples of each rank (default 4)")
    stages.add_argument("--seq", type=int, default=128, metavar="N", help="tokens of a sample (default 128)")
    stages.add_argument("--nproc", type=int, default=2, metavar="N", help="ranks; on one GPU they share it (default 2)")
    stages.add_argument("--iterations", type=int, default=20, metavar="N", help="steps that are timed (default 20)")
    stages.add_argument("--warmup", type=int, default=3, metavar="N", help="steps before them (default 3)")
    stages.add_argument(
        "--memory-steps", type=int, nargs="+", default=[0, 10, 20], metavar="N", help="when to look at memory (default 0 10 20)"
    )
    stages.add_argument("--deterministic", action="store_true", help="only kernels that round alike every time; slower on a GPU")
    stages.add_argument("--only", nargs="+", metavar="RUN", help="only these of the runs")
    stages.add_argument("--config", metavar="FILE", help="with --only and one run: its DeepSpeed configuration")
    stages.add_argument("--runs", default="runs", metavar="DIR", help="where runs' folders are (default: runs)")
    stages.add_argument("--json", action="store_true", help="print data instead of tables")
    for name, meaning in _MEASURES.items():
        told = f"Measure {meaning}. The planner goes by what was measured last on this machine."
        action = actions.add_parser(name, help=f"measure {meaning}", description=told)
        if name == "comm":
            action.add_argument("--nproc", type=int, default=2, metavar="N", help="ranks (default 2)")
        if name == "disk":
            action.add_argument("--folder", default=".", metavar="DIR", help="a folder of the disk (default: this one)")
        action.add_argument("--no-store", action="store_true", help="only print it")
        action.add_argument("--json", action="store_true", help="print data instead of a table")
