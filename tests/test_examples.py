"""The scripts in examples/deepspeed_scripts: DeepSpeed's but for one line, at every stage, as users start them."""

from __future__ import annotations

import contextlib
import io
import json
import re
import runpy
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

SCRIPTS = Path(__file__).parent.parent / "examples" / "deepspeed_scripts"


def run_main(script: str, arguments: list[str]) -> str:
    """What a script prints in this process, which is one of several ranks."""
    said, before = io.StringIO(), sys.argv
    sys.argv = [script, *arguments]
    try:
        with contextlib.redirect_stdout(said):
            runpy.run_path(str(SCRIPTS / script), run_name="__main__")
    finally:
        sys.argv = before
    return said.getvalue()


def by_torchrun(script: str, arguments: list[str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", str(SCRIPTS / script), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)


def classifier(folder: Path, stage: int, **keys: Any) -> list[str]:
    """The arguments of the image classifier with its own configuration at another stage."""
    config = json.loads((SCRIPTS / "image_classifier.json").read_text(encoding="utf-8"))
    config["zero_optimization"]["stage"] = stage
    path = folder / f"stage{stage}.json"
    path.write_text(json.dumps(config | keys))
    return ["--deepspeed", "--deepspeed_config", str(path), "--epochs", "2", "--samples", "256"]


def test_the_image_classifier_learns_alike_at_every_stage(two, tmp_path):
    said = [two.run(run_main, "image_classifier.py", classifier(tmp_path, stage))[0] for stage in range(4)]
    assert len(set(said)) == 1
    accuracies = [float(found) for found in re.findall(r"accuracy ([\d.]+)", said[0])]
    assert len(accuracies) == 2
    assert accuracies[-1] > 0.5, "four kinds, so a guess is right once in four"


def test_the_gpt_learns_in_fp16_with_accumulation_at_every_stage(two):
    said = [two.run(run_main, "gpt_fp16.py", ["--stage", str(stage), "--steps", "10"])[0] for stage in range(4)]
    assert said[0] == said[1], "micro-batches are summed before ranks"
    assert said[2] == said[3], "ranks before micro-batches"
    for run in said:
        losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", run)]
        assert losses[-1] < losses[0]
        assert "samples 160" in run


def test_lora_trains_thin_matrices_beside_frozen_weights_at_every_stage(two):
    said = [two.run(run_main, "lora.py", ["--stage", str(stage)])[0] for stage in range(4)]
    assert len({run.splitlines()[0] for run in said}) == 1
    weights = [int(re.search(r"weights (\d+) bytes", run).group(1)) for run in said]
    states = [int(re.search(r"states (\d+) bytes", run).group(1)) for run in said]
    assert weights[0] == weights[1] == weights[2] == 2 * weights[3], "frozen weights are split at stage 3"
    assert states[0] == 2 * states[1] == 2 * states[3]
    for run in said:
        assert "frozen weights unchanged: True" in run
        trained = int(re.search(r"trained parameters: (\d+)", run).group(1))
        assert states[0] == pytest.approx(8 * trained, rel=0.01), "moments of the thin matrices, and of nothing else"
        assert float(re.search(r"with LoRA: loss ([\d.]+)", run).group(1)) < 0.1


@pytest.mark.skipif(find_spec("peft") is None or find_spec("transformers") is None, reason="needs the extras hf and peft")
def test_pefts_lora_trains_and_generates_alike_at_every_stage():
    ended = [by_torchrun("peft_lora.py", ["--stage", str(stage), "--steps", "5"]) for stage in range(4)]
    assert [run.returncode for run in ended] == [0] * 4, ended[0].stderr
    assert len({run.stdout.splitlines()[0] for run in ended}) == 1
    assert "trained parameters: 3200; optimizer states 25600 bytes" in ended[0].stdout
    assert "optimizer states 12800 bytes" in ended[3].stdout


def test_under_torchrun_a_script_needs_no_more_than_its_arguments(tmp_path):
    keys = {"steps_per_print": 8, "wall_clock_breakdown": True}
    ended = by_torchrun("image_classifier.py", classifier(tmp_path, 3, **keys))
    assert ended.returncode == 0, ended.stderr
    assert len(re.findall(r"^epoch \d: ", ended.stdout, re.MULTILINE)) == 2
    assert len(re.findall(r"^naught: step \d+: ", ended.stderr, re.MULTILINE)) == 2, "rank 0 alone logs"
    assert "naught: time of step 8: forward" in ended.stderr


def test_a_bad_configuration_ends_a_script_with_one_clear_error(tmp_path):
    ended = by_torchrun("image_classifier.py", classifier(tmp_path, 3, train_batch_sise=3))
    assert ended.returncode != 0
    for rank in range(2):
        said = rf"^\[rank{rank}\]: +train_batch_sise \(line 1\): unknown key; did you mean train_batch_size\?$"
        assert len(re.findall(said, ended.stderr, re.MULTILINE)) == 1
