"""A nest: what processes of tests have imported before they are forked, for torch takes a second or two of a core in each anew.

As a module it is what workers begin with. As a process it is asked by lines of JSON, one for each group of scripts: it forks a
process for each of them, which ends as an interpreter ends, and answers with their statuses.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import pytest  # noqa: F401
import torch._dynamo  # noqa: F401 - an optimizer of torch's imports it when it is first used

if __name__ != "__main__":
    import training  # noqa: F401 - and with it the package, whose duties at the end are those of the process that imports it


def serve() -> dict[str, Any] | None:
    """In a process that was forked: what it shall run."""
    for line in sys.stdin:
        children = []
        for asked in json.loads(line):
            child = os.fork()
            if child == 0:
                return asked
            children.append(child)
        print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]), flush=True)
    return None


def become(asked: dict[str, Any]) -> None:
    """Take over what a process of its own would have been started with."""
    os.environ.clear()
    os.environ.update(asked["env"])
    sys.argv = ["-c", *asked["arguments"]]
    for number, path in enumerate((os.devnull, asked["said"], asked["errors"])):
        handle = os.open(path, os.O_RDWR)
        os.dup2(handle, number)
        os.close(handle)


if __name__ == "__main__":
    asked = serve()
    if asked is not None:
        become(asked)
        exec(compile(asked["script"], "<string>", "exec"), globals())  # what it makes is there until the interpreter ends
