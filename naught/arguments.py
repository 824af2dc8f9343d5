"""Arguments: the flags that scripts written for DeepSpeed expect of their own command lines."""

from __future__ import annotations

import argparse

__all__ = ["add_config_arguments"]


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add --deepspeed and --deepspeed_config to a script's parser, and return it.

    --deepscale and --deepscale_config are their old names: accepted, and not shown in the help.
    """
    group = parser.add_argument_group("DeepSpeed", "training with a DeepSpeed configuration")
    group.add_argument("--deepspeed", action="store_true", help="a flag for the script itself; the library does not read it")
    group.add_argument("--deepspeed_config", metavar="PATH", help="the configuration, a JSON file")
    group.add_argument("--deepscale", action="store_true", help=argparse.SUPPRESS)
    group.add_argument("--deepscale_config", help=argparse.SUPPRESS)
    return parser
