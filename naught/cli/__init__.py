"""CLI: the `naught` command. Each subcommand's module is imported only when it runs: help must be instant."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from naught.cli.arguments import add_ckpt, add_config, add_plan
from naught.errors import ConfigError, NaughtError

__all__ = ["main"]

EXIT_PROBLEMS = 1
EXIT_USAGE = 2

_EXAMPLES = """examples:
  naught plan 7.5B --ranks 64 --gpu 32GB       what each ZeRO stage needs, what fits, what is fastest
  naught plan llama3-8b --gpu h100 --host 512GB --write ds.json
  naught config check ds.json                  every problem of a DeepSpeed configuration at once
  naught config explain stage3_prefetch_bucket_size
  naught ckpt verify runs/mine                 every byte of every checkpoint
  naught ckpt export runs/mine --to hf --dtype bf16
"""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="naught",
        description="Train models that do not fit: the ZeRO family in plain PyTorch.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=_version())
    commands = parser.add_subparsers(title="commands", dest="command", metavar="COMMAND", required=True)
    add_plan(commands)
    add_config(commands)
    add_ckpt(commands)
    options = parser.parse_args(argv)
    try:
        return _run(options)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return EXIT_PROBLEMS
    except NaughtError as error:
        print(f"naught: {error}", file=sys.stderr)
        return EXIT_USAGE
    except BrokenPipeError:
        # The reader (head, say) has seen enough. Python would complain again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _run(options: argparse.Namespace) -> int:
    if options.command == "plan":
        from naught.cli.plan import run_plan

        return run_plan(options)
    if options.command == "ckpt":
        from naught.cli.ckpt import run_ckpt

        return run_ckpt(options)
    from naught.cli.config import run_config

    return run_config(options)


def _version() -> str:
    from naught import __version__

    return f"naught {__version__}"
