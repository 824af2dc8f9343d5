"""Stages: the six runs: one model under each ZeRO stage and offload, side by side in memory and time."""

from naught.stages.runs import RUNS, StageRun

__all__ = ["RUNS", "StageRun"]
