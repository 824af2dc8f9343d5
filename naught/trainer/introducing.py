"""Introducing: what a run is, as facts for its folder and as the first lines of its console."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import naught
from naught.accelerator import get_accelerator
from naught.advice import POOLED
from naught.config import Batch, placement_of
from naught.config.recipe import Recipe
from naught.modules import model_of
from naught.placement import PLACEMENTS
from naught.quantity import show_bytes, show_count
from naught.trainer.corpus import Corpus
from naught.trainer.forecasting import Expected, dtype_of

__all__ = ["Introduction", "device_title", "environment"]


@dataclass(frozen=True)
class Introduction:
    """All that is known of a run before its first step."""

    recipe: Recipe
    corpus: Corpus
    batch: Batch
    expected: Expected
    model: nn.Module
    weights: Path | None  # None: random
    world: int

    def facts(self) -> dict[str, Any]:
        recipe, corpus, expected = self.recipe, self.corpus, self.expected
        return {
            "naught": naught.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "host": platform.node(),
            "device": device_title(),
            "world": self.world,
            "stage": recipe.zero_optimization.stage,
            "placement": self._placement(),
            "dtype": dtype_of(recipe),
            "model": {"name": recipe.model.name, "numel": self._numel(), "units": self._units()},
            "data": {
                "name": corpus.title,
                "train_tokens": int(corpus.train.size),
                "val_tokens": int(corpus.validation.size),
                "bytes_per_token": corpus.bytes_per_token,
                "yardsticks": corpus.yardsticks,
            },
            "batch": {**self.batch._asdict(), "seq": recipe.data.seq},
            "steps": recipe.train.steps,
            "plan": {**expected._asdict()},
        }

    def _placement(self) -> str:
        if self.recipe.naught.placement != "stage":
            return POOLED
        wanted = placement_of(self.recipe)
        return next((name for name, placement in PLACEMENTS.items() if placement == wanted), "as configured")

    def _numel(self) -> int:
        return sum(param.numel() for param in self.model.parameters())

    def _units(self) -> int:
        return sum(run.repeat for run in model_of(self.model).runs)

    def lines(self, folder: str) -> Iterator[tuple[str, str]]:
        recipe, corpus, batch, expected = self.recipe, self.corpus, self.batch, self.expected
        ranks = f"{self.world} rank{'s' * (self.world > 1)}"
        yield "naught", f"{naught.__version__}  {self._placement()}, {ranks} on {device_title()}, {dtype_of(recipe)}, in {folder}"
        start = "" if self.weights is None else f", weights from {self.weights}"
        yield "model", f"{recipe.model.name}  {show_count(self._numel())} parameters in {self._units()} units{start}"
        sizes = f"{show_count(corpus.train.size)} tokens to train, {show_count(corpus.validation.size)} to validate"
        yield "data", f"{corpus.title}  {sizes}"
        product = f"{batch.micro} x {batch.accumulation} x {ranks}"
        tokens = show_count(batch.train * recipe.data.seq)
        yield "batch", f"{batch.train} samples of {recipe.data.seq} tokens = {product}  {tokens} tokens a step"
        parts = ", ".join(f"{name} {show_bytes(nbytes)}" for name, nbytes in expected.memory.items() if nbytes)
        saved = f" (stage 0 would hold {show_bytes(expected.whole)})" if expected.whole != expected.total else ""
        yield "plan", f"each rank {show_bytes(expected.total)}: {parts}{saved}"


def device_title() -> str:
    accelerator = get_accelerator()
    return "cpu" if accelerator.device_name() == "cpu" else str(accelerator.get_device_name())


_TOLD = ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "DS_ACCELERATOR", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
_PREFIXES = ("NCCL_", "GLOO_", "TORCHELASTIC_", "SLURM_JOB_", "SLURM_STEP_", "NAUGHT_")


def environment() -> dict[str, Any]:
    """What a run was surrounded by; nothing that is nobody's business."""
    told = {name: value for name, value in sorted(os.environ.items()) if name in _TOLD or name.startswith(_PREFIXES)}
    return {
        "python": sys.version,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "platform": platform.platform(),
        "cores": len(os.sched_getaffinity(0)),
        "threads": torch.get_num_threads(),
        "variables": told,
    }
