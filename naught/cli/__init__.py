"""CLI: the `naught` command. Each subcommand's module is imported only when it runs: help must be instant."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from naught.cli.arguments import (
    add_bench,
    add_ckpt,
    add_config,
    add_doctor,
    add_launch,
    add_plan,
    add_report,
    add_simulate,
    add_train,
)
from naught.errors import ConfigError, NaughtError

__all__ = ["main"]

EXIT_PROBLEMS = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130

_EXAMPLES = """examples:
  naught train                                 a real run in about a minute, on 2 CPU processes
  naught bench stages                          the six runs: memory and time of every ZeRO stage
  naught report last                           a page of the last run; naught report 3 4 compares two
  naught plan 7.5B --ranks 64 --gpu 32GB       what each ZeRO stage needs, what fits, what is fastest
  naught plan llama3-8b --gpu h100 --host 512GB --write ds.json
  naught config check ds.json                  every problem of a DeepSpeed configuration at once
  naught config explain stage3_prefetch_bucket_size
  naught ckpt verify runs/mine                 every byte of every checkpoint
  naught ckpt export runs/mine --to hf --dtype bf16
"""


class _Parser(argparse.ArgumentParser):
    """Options in full: half of another option's name is a mistake, not that option."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**(given | {"allow_abbrev": False}))


def main(argv: Sequence[str] | None = None) -> int:
    parser = _Parser(
        prog="naught",
        description="Train models that do not fit: the ZeRO family in plain PyTorch.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=_version())
    commands = parser.add_subparsers(title="commands", dest="command", metavar="COMMAND", required=True)
    for add in (add_train, add_plan, add_simulate, add_bench, add_report, add_config, add_ckpt, add_launch, add_doctor):
        add(commands)
    options, rest = parser.parse_known_args(argv)
    if rest:
        _take_rest(parser, options, rest)
    options.arguments = list(sys.argv[1:] if argv is None else argv)  # for ranks, which are given the same
    try:
        return _run(options)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return EXIT_PROBLEMS
    except NaughtError as error:
        print(f"naught: {error}", file=sys.stderr)
        return EXIT_USAGE
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader (head, say) has seen enough. Python would complain again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


# Where each command lives; imported when it runs.
_HOMES = {
    "train": "train:run_train",
    "plan": "plan:run_plan",
    "simulate": "simulate:run_simulate",
    "bench": "bench:run_bench",
    "report": "report:run_report",
    "config": "config:run_config",
    "ckpt": "ckpt:run_ckpt",
    "launch": "launch:run_launch",
    "doctor": "doctor:run_doctor",
}


def _run(options: argparse.Namespace) -> int:
    module, _, function = _HOMES[options.command].partition(":")
    status: int = getattr(import_module(f"naught.cli.{module}"), function)(options)
    return status


def _take_rest(parser: argparse.ArgumentParser, options: argparse.Namespace, rest: Sequence[str]) -> None:
    """argparse takes positional arguments in one row only; people write key=value between and behind flags."""
    strange = [word for word in rest if options.command != "train" or word.startswith("-")]
    if strange:
        parser.error(f"unrecognized arguments: {' '.join(strange)}")
    options.words += rest


def _version() -> str:
    from naught import __version__

    return f"naught {__version__}"
