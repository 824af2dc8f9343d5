"""What workers have imported before they are forked: torch takes a second or two of a core, in every process anew."""

from __future__ import annotations

import hypothesis  # noqa: F401
import pytest  # noqa: F401
import torch
import torch._dynamo  # noqa: F401 - an optimizer of torch's imports it when it is first used
import training  # noqa: F401 - and with it the package
