"""The six runs: what each holds and how long it takes, side by side, and one by one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from test_train import environment

from naught.cli import main
from naught.config import load
from naught.stages import RUNS
from naught.stages.runs import DDP, why

pytestmark = pytest.mark.timeout(240)

ROOT = Path(__file__).parent.parent
SMALL = ["--model", "gpt:layers=3,hidden=64,heads=2,vocab=256,positions=32", "--seq", "32", "--batch", "2"]
SHORT = ["--warmup", "1", "--iterations", "2", "--memory-steps", "0", "2"]


def test_there_are_six_and_ddp_and_each_is_compared_with_one_before_it():
    names = [run.name for run in RUNS]
    assert names == [DDP, "zero1", "zero2", "zero2-offload", "zero3", "zero3-offload", "zero3-fp16"]
    for at, run in enumerate(RUNS[1:], start=1):
        assert run.against in names[:at]
        load({"train_micro_batch_size_per_gpu": 1, **run.config})


@pytest.mark.parametrize("run", RUNS[1:], ids=lambda run: run.name)
def test_the_examples_have_the_same_configurations(run):
    text = (ROOT / "examples" / "six_runs" / f"{run.name}.json").read_text(encoding="utf-8")
    assert json.loads(text) == run.config


def test_why_a_run_differs_is_told_with_what_was_measured():
    before = {"memory": [{"step": 0, "forward": 9, "backward": 8 * 10**6, "step_": 5}], "seconds": 2.0}
    after = {"memory": [{"step": 0, "forward": 9, "backward": 6 * 10**6, "step_": 5}], "seconds": 3.0}
    zero2 = next(run for run in RUNS if run.name == "zero2")
    assert why(zero2, after, before).endswith("Against zero1: 2.00 MB less after backward, and 1.50 of its time.")
    assert why(zero2, after, None) == zero2.because


def test_the_runs_are_taken_and_put_side_by_side(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    asked = ["ddp", "zero1", "zero2", "zero2-offload", "zero3"]
    assert main(["bench", "stages", *SMALL, *SHORT, "--only", *asked]) == 0
    printed = capsys.readouterr()
    found = json.loads((tmp_path / "runs" / "0001-stages" / "stages.json").read_text())
    runs = {run["name"]: run for run in found["runs"]}
    assert list(runs) == asked
    assert all(run["available"] for run in runs.values())
    assert all(run["losses"] == runs["ddp"]["losses"] for run in runs.values()), "to the last bit"
    assert [row["step"] for row in runs["zero3"]["memory"]] == [0, 2]
    held = {name: run["held"] for name, run in runs.items()}
    # Slots are padded, so halves are a little more.
    whole = held["ddp"]["weights"]
    assert held["ddp"]["states"] == 2 * whole
    assert held["zero1"] == pytest.approx({"weights": whole, "gradients": whole, "states": whole}, rel=0.03)
    assert held["zero2"] == pytest.approx({"weights": whole, "gradients": whole / 2, "states": whole}, rel=0.03)
    assert held["zero3"] == pytest.approx({"weights": whole / 2, "gradients": whole / 2, "states": whole}, rel=0.03)
    after = {name: run["memory"][-1] for name, run in runs.items()}
    assert after["zero2"]["backward"] < after["zero1"]["backward"] < after["ddp"]["backward"]
    assert after["zero3"]["step_"] < after["zero2"]["step_"] < after["ddp"]["step_"]
    assert sum(runs["zero1"]["sent"].values()) == pytest.approx(runs["ddp"]["sent"]["all-reduce"], rel=0.03)
    assert (tmp_path / "runs" / "0001-stages" / "report.html").exists()
    for word in ("after forward", "after backward", "after step", "seconds", "Against zero1"):
        assert word in printed.out


def test_run_sh_takes_one_by_its_number(tmp_path):
    ended = subprocess.run(
        [ROOT / "examples" / "six_runs" / "run.sh", "4", *SMALL, *SHORT, "--json"],
        cwd=tmp_path,
        env=environment(PATH=f"{Path(sys.executable).parent}:/usr/bin:/bin"),
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert [run["name"] for run in json.loads(ended.stdout)["runs"]] == ["zero3"]


@pytest.mark.parametrize("words", [[], ["7"], ["zero1"]])
def test_run_sh_says_how_it_is_used(words):
    command = [ROOT / "examples" / "six_runs" / "run.sh", *words]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert ended.returncode == 2
    assert ended.stderr.startswith("usage: run.sh 1..6")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--only", "zero9"], 'there is no run "zero9" [--only]. The runs are ddp, zero1'),
        (["--config", "x.json"], "--config is of one run"),
        (["--model", "gtp2"], 'no model "gtp2"; did you mean gpt2?'),
    ],
)
def test_mistakes_are_told_in_a_line(words, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["bench", "stages", *words]) == 2
    assert said in capsys.readouterr().err
