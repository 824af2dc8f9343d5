"""Numerics: whether training here comes out bit for bit alike at every stage, in plain PyTorch and after a load.

Starts `naught.doctor.training` as ranks, and compares what they say.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from naught.doctor.finding import Fact, Finding, Verdict
from naught.measuring.ranks import ask_ranks

__all__ = ["PLAIN", "RESUMED", "STAGES", "Run", "judge", "on_cpu", "on_gpu"]

PLAIN, RESUMED = "plain PyTorch", "a loaded checkpoint"
STAGES: Mapping[str, int] = {f"stage {stage}": stage for stage in range(4)}
_RANKS = 2


class Run(NamedTuple):
    """What came out on one rank: its own losses, and a digest of all weights and moments."""

    losses: list[str]
    digest: str


def on_cpu() -> Sequence[Finding]:
    return _trained("CPU", {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"})


def on_gpu() -> Sequence[Finding]:
    """Two ranks over gloo, on one GPU or on two; nothing where there is none."""
    from naught.accelerator import get_accelerator

    if get_accelerator().device_name() != "cuda":
        return []
    # Without a workspace of its own the sums of a product depend on what else runs.
    return _trained("GPU", {"DS_ACCELERATOR": "cuda", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"})


def _trained(where: str, env: Mapping[str, str]) -> Sequence[Finding]:
    with tempfile.TemporaryDirectory(prefix="naught-doctor-") as folder:
        said = ask_ranks("naught.doctor.training", [folder], nproc=_RANKS, env=env)
    answers = [json.loads(text.splitlines()[-1]) for text in said]
    return judge(where, [{name: Run(*run) for name, run in answer.items()} for answer in answers])


def judge(where: str, ranks: Sequence[Mapping[str, Run]]) -> Sequence[Finding]:
    """Every run of a rank must be as in plain PyTorch, and all ranks must have the same weights and moments."""
    first = ranks[0]
    odd = [name for name in first if any(runs[name] != runs[PLAIN] or runs[name].digest != first[name].digest for runs in ranks)]
    steps = len(first[PLAIN].losses)
    stages = [name for name in odd if name != RESUMED]
    facts: dict[str, Fact] = {"ranks": len(ranks), "steps": steps, "differing": odd}
    said = f"stages 0 to 3 train {steps} steps on {len(ranks)} ranks bit for bit like plain PyTorch in one process"
    fix = "do not trust what is trained here; report it together with these lines"
    found = [
        Finding(f"training, {where}", f"{', '.join(stages)}: other bits than plain PyTorch", Verdict.BAD, fix, facts)
        if stages
        else Finding(f"training, {where}", said, facts=facts)
    ]
    if RESUMED in odd and not stages:
        said = "what was saved at stage 3 trains on at stage 1 with other bits"
        return [*found, Finding(f"checkpoint, {where}", said, Verdict.BAD, fix, {"same": False})]
    if stages:
        return found  # a load is compared with what is not right itself
    said = "saved at stage 3, loaded at stage 1, trained on: the same bits"
    return [*found, Finding(f"checkpoint, {where}", said, facts={"same": True})]
