"""Run folders as the trainer writes them, with numbers that could be true, for whoever reads such folders."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

MB = 1_000_000
PLAN = {
    "memory": {
        "parameters": 1_681_408,
        "gradients": 1_681_408,
        "optimizer": 3_362_816,
        "gathered": 1_712_128,
        "activations": 41_500_000,
        "checkpoints": 0,
        "buffers": 790_528,
    },
    "total": 50_728_288,
    "sent": {"all-gather": 3_362_816, "reduce-scatter": 1_681_408},
    "flops": 1.1e9,
}


def run_json(**changes: Any) -> dict[str, Any]:
    return {
        "name": "demo",
        "number": 7,
        "status": "done",
        "started": "2026-11-15T21:00:00+00:00",
        "ended": "2026-11-15T21:01:04+00:00",
        "error": None,
        "command": "naught train --stage 3 --name demo",
        "naught": "0.1.0",
        "torch": "2.13.0",
        "python": "3.11.2",
        "host": "box",
        "device": "cpu",
        "world": 2,
        "stage": 3,
        "placement": "stage3",
        "dtype": "fp32",
        "model": {"name": "gpt:layers=4,hidden=128,heads=4,vocab=256", "numel": 840_704, "units": 5},
        "data": {
            "name": "python stdlib 3.11.2",
            "train_tokens": 9_090_000,
            "val_tokens": 500_000,
            "bytes_per_token": 1.0,
            "yardsticks": {"order-0 entropy": 4.54, "zlib -9": 2.04, "lzma": 1.76},
        },
        "batch": {"train": 16, "micro": 8, "accumulation": 1, "seq": 128},
        "steps": 400,
        "plan": PLAN,
        "peak": {"measured": 49_871_360, "plan": 50_728_288},
    } | changes


CONFIG = {
    "settings": {
        "train_batch_size": 16,
        "zero_optimization": {"stage": 3, "overlap_comm": True, "stage3_prefetch_bucket_size": 50_000_000},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.001, "betas": [0.9, 0.95], "weight_decay": 0.1}},
        "scheduler": {"type": "WarmupCosineLR", "params": {"warmup_num_steps": 40, "total_num_steps": 400}},
        "gradient_clipping": 1.0,
        "train": {"steps": 400, "seed": 1234},
        "data": {"path": None},
    },
    "origins": {
        "zero_optimization.stage": "--stage",
        "train.steps": "command line",
        "gradient_clipping": "my.json line 3",
        "optimizer.params.lr": "my.json line 9",
    },
}


def step_record(step: int, noise: random.Random, *, stage: int = 3, time_s: float = 0.0) -> dict[str, Any]:
    """A step as the trainer writes it: the loss falls, the rate warms up and decays, the first step is slow."""
    bits = 3.25 + 4.75 * math.exp(-step / 45) + noise.gauss(0, 0.06)
    seconds = (0.156 if stage == 3 else 0.149) * (1 + abs(noise.gauss(0, 0.03))) * (3.5 if step == 1 else 1)
    shard = 2 if stage == 3 else 1
    held = {"weights": 3_362_816 // shard, "states": 3_362_816, "reduce scratch": 0}
    grads = {"owned gradients": 1_681_408} if stage == 3 else {"whole gradients": 3_362_816}
    rests = {"forward": 39_800_000, "backward": 2_200_000, "step": 2_150_000}
    after = {"forward": dict(held), "backward": held | grads | {"gathered weights": 131_072}, "step": dict(held)}
    return {
        "kind": "step",
        "step": step,
        "time_s": time_s or step * 0.16,
        "loss": bits * math.log(2),
        "bpb": bits,
        "grad_norm": 0.6 + 3 * math.exp(-step / 30) + abs(noise.gauss(0, 0.12)),
        "lr": 1e-3 * min(step / 40, 0.55 + 0.45 * math.cos(math.pi * step / 400)),
        "loss_scale": 1.0,
        "skipped": 0,
        "samples": 16 * step,
        "tokens": 2048 * step,
        "seconds": seconds,
        "tokens_s": 2048 / seconds,
        "mfu": None,
        "phases": {"data": 0.003, "forward": seconds * 0.34, "backward": seconds * 0.46, "step": seconds * 0.13},
        "waited": {"all-gather": seconds * 0.07, "reduce-scatter": seconds * 0.05},
        "sent": {"all-gather": 3_362_816, "reduce-scatter": 1_681_408, "all-reduce": 12},
        "memory": {
            "after": after,
            "allocated": {position: sum(after[position].values()) + rests[position] for position in after},
            "peak": 49_700_000 + int(abs(noise.gauss(0, 60_000))),
        },
    }


def eval_record(step: int) -> dict[str, Any]:
    bits = 3.31 + 4.7 * math.exp(-step / 45)
    return {"kind": "eval", "step": step, "time_s": step * 0.16, "loss": bits * math.log(2), "bpb": bits, "seconds": 0.8}


def save_record(step: int) -> dict[str, Any]:
    return {
        "kind": "save",
        "step": step,
        "time_s": step * 0.16,
        "tag": f"global_step{step}",
        "bytes": 10_088_448,
        "seconds": 0.11,
    }


def records(steps: int = 400, *, stage: int = 3, seed: int = 1) -> list[dict[str, Any]]:
    noise = random.Random(seed)
    made: list[dict[str, Any]] = []
    for step in range(1, steps + 1):
        made.append(step_record(step, noise, stage=stage))
        made += [eval_record(step)] if step % 50 == 0 else []
        made += [save_record(step)] if step % 100 == 0 else []
    return made


def write_run(
    folder: Path, lines: list[dict[str, Any]], *, torn: str = "", config: Mapping[str, Any] = CONFIG, **changes: Any
) -> Path:
    folder.mkdir(parents=True)
    (folder / "run.json").write_text(json.dumps(run_json(**changes)))
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "env.json").write_text(json.dumps({"CUDA_VISIBLE_DEVICES": "", "threads": 1, "cpu": "x86_64, 2 cores"}))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + torn)
    return folder


def absent(name: str, title: str) -> dict[str, Any]:
    return {"name": name, "title": title, "available": False, "reason": "out of memory: 30 GB are not there"}


def stages_json() -> dict[str, Any]:
    rng = random.Random(3)
    losses = [5.55 - 0.09 * step + rng.gauss(0, 0.02) for step in range(23)]
    whole = 30_400_000 * 4

    def trained(name: str, title: str, why: str, *, split: tuple[bool, bool, bool], seconds: float) -> dict[str, Any]:
        weights, grads, states = (size // 2 if cut else size for size, cut in zip((whole, whole, 2 * whole), split, strict=True))
        active = 310 * MB
        return {
            "name": name,
            "title": title,
            "available": True,
            "reason": None,
            "why": why,
            "memory": [
                {
                    "step": step,
                    "forward": weights + active + (states if step else 0),
                    "backward": weights + grads + states * bool(step) + 9 * MB,
                    "step_": weights + states + 9 * MB,
                }
                for step in (0, 10, 20)
            ],
            "peak": weights + grads + states + active,
            "held": {"weights": weights, "gradients": grads, "states": states},
            "seconds": seconds,
            "sent": {"all-gather": whole // 2 * (2 if split[0] else 1), "reduce-scatter": whole // 2},
            "losses": losses if name != "zero3-fp16" else [loss + rng.gauss(0, 1e-3) for loss in losses],
        }

    return {
        "naught": "0.1.0",
        "torch": "2.13.0",
        "host": "box",
        "device": "cpu",
        "world": 2,
        "model": {"name": "gpt:layers=8,hidden=512,heads=8", "numel": 30_400_000},
        "batch": {"micro": 4, "seq": 128},
        "warmup": 3,
        "iterations": 20,
        "memory_steps": [0, 10, 20],
        "counts": "bytes of tensors (host)",
        "runs": [
            trained(
                "ddp",
                "DDP",
                "Every rank holds all of the weights, gradients and states.",
                split=(False, False, False),
                seconds=21.4,
            ),
            trained("zero1", "ZeRO-1", "Each rank keeps the states of its share only.", split=(False, False, True), seconds=21.9),
            trained(
                "zero2",
                "ZeRO-2",
                "Gradients go to their owners as soon as they are summed, so a rank keeps its share of them.",
                split=(False, True, True),
                seconds=22.3,
            ),
            absent("zero2-offload", "ZeRO-2 + CPU optimizer"),
            trained(
                "zero3",
                "ZeRO-3",
                "Weights are gathered where they are used and let go, at the price of one more all-gather.",
                split=(True, True, True),
                seconds=24.0,
            ),
            absent("zero3-offload", "ZeRO-3 + CPU optimizer"),
            trained(
                "zero3-fp16",
                "ZeRO-3 in fp16",
                "Weights and gradients take half of the bytes; 32-bit masters are kept beside them.",
                split=(True, True, True),
                seconds=26.8,
            ),
        ],
    }


def write_stages_folder(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "stages.json").write_text(json.dumps(stages_json()))
    return folder


def resume(step: int) -> dict[str, Any]:
    return {"kind": "resume", "step": step, "time_s": 99.0, "from": f"global_step{step}", "world": 4, "stage": 2}
