"""`naught train` as people use it: it trains, says how, stops when told, goes on, and fails with one cause."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import chdir
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from naught.cli import main
from naught.trainer.run_folder import RunFolder
from naught.trainer.windows import Windows

pytestmark = pytest.mark.timeout(180)

SMALL = ["model=gpt:layers=2,hidden=32,heads=2,vocab=256,positions=32", "seq=32", "micro_batch=2", "eval_every=0"]
ROOT = Path(__file__).parent.parent


@pytest.fixture
def place(tmp_path, monkeypatch):
    """An empty folder with a text to train on."""
    write_text(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write_text(folder: Path) -> None:
    (folder / "text.txt").write_text("".join(f"{at} squared is {at * at}.\n" for at in range(600)))


def trained(folder: Path, *words: str) -> Path:
    """A run that nobody has disturbed, for several tests to look at."""
    write_text(folder)
    with chdir(folder):
        ended = train(*words)
    assert ended.returncode == 0, ended.stderr
    (run,) = (folder / "runs").iterdir()
    return run


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    """A run of four steps, with a checkpoint of the last."""
    return trained(tmp_path_factory.mktemp("four"), "steps=4", "--name", "first")


@pytest.fixture(scope="module")
def sixty(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("sixty"), "steps=60", "save_every=10")


@pytest.fixture
def copy_of_four(place, four):
    """The same run in the folder of a test that goes on with it."""
    shutil.copytree(four, place / "runs" / four.name)
    return place / "runs" / four.name


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "naught", "train", *SMALL, "data=text.txt", *words]


def environment(**more: str) -> dict[str, str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith("OMP_")}
    return env | {"PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}", "DS_ACCELERATOR": "cpu", **more}


def train(*words: str, **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(*words), env=environment(**more), capture_output=True, text=True, timeout=150, check=False)


def records(run: Path, kind: str) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [record for record in found if record["kind"] == kind]


def losses(run: Path) -> dict[int, float]:
    """Of each step; where a run was resumed, as it was the last time."""
    return {record["step"]: record["loss"] for record in records(run, "step")}


def facts(run: Path) -> dict[str, Any]:
    return json.loads((run / "run.json").read_text())


def ranks_of(agent: int) -> dict[int, int]:
    """The processes of the ranks that an agent has started, by rank."""
    children = Path(f"/proc/{agent}/task/{agent}/children").read_text().split()
    environs = {int(child): Path(f"/proc/{child}/environ").read_bytes().split(b"\0") for child in children}
    found = {}
    for child, variables in environs.items():
        rank = next((value[5:] for value in variables if value.startswith(b"RANK=")), None)
        if rank is not None:
            found[int(rank)] = child
    return found


def interrupted(at: int, do: Callable[[int], None], *words: str) -> tuple[int, str]:
    """Train, and do something to the processes when a step is over. The run's status and what it said."""
    process = subprocess.Popen(
        command("log_every=1", "--log-json", *words),
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    done = False
    for line in process.stdout:
        record = json.loads(line)
        if not done and record["kind"] == "step" and record["step"] >= at:
            do(process.pid)
            done = True
    _, errors = process.communicate(timeout=100)
    return process.returncode, errors


def to_rank(rank: int, number: int) -> Callable[[int], None]:
    return lambda agent: os.kill(ranks_of(agent)[rank], number)


# --- a run and what it leaves -----------------------------------------------------------------------------------------


def test_a_run_trains_and_leaves_a_folder_that_says_all(place):
    ended = train("steps=12", "save_every=5", "eval_every=6", "--keep", "1", "--dtype", "bf16", "--name", "mine")
    assert ended.returncode == 0, ended.stderr
    assert ": too little to tell from what libraries take" in ended.stdout
    run = place / "runs" / "0001-mine"
    assert sorted(path.name for path in run.iterdir()) == [
        *("ckpt", "command.txt", "config.json", "env.json", "logs", "metrics.csv", "metrics.jsonl", "report.html", "run.json")
    ]
    steps = records(run, "step")
    assert [record["step"] for record in steps] == list(range(1, 13))
    assert steps[-1]["loss"] < steps[0]["loss"]
    assert steps[-1]["tokens"] == 12 * 2 * 2 * 32
    assert set(steps[-1]["phases"]) >= {"data", "forward", "backward", "step"}
    planned = facts(run)["plan"]["sent"]
    assert steps[-1]["sent"] == pytest.approx(planned, rel=0.02), "but for the padding of vectors"
    assert {"all-gather", "reduce-scatter"} <= set(steps[-1]["waited"])
    assert [record["step"] for record in records(run, "eval")] == [6, 12]
    assert [record["tag"] for record in records(run, "save")] == ["global_step5", "global_step10", "global_step12"]
    assert sorted(path.name for path in (run / "ckpt").glob("global*")) == ["global_step12"], "--keep 1"
    told = facts(run)
    assert (told["status"], told["stage"], told["world"], told["dtype"]) == ("done", 3, 2, "bf16")
    config = json.loads((run / "config.json").read_text())
    assert config["origins"]["bf16.enabled"] == "--dtype"
    assert config["settings"]["train"]["steps"] == 12
    assert (run / "metrics.csv").read_text().count("\n") == 13
    assert (run / "logs" / "rank1.log").exists()
    for word in ("plan   each rank", "step   12/12 100%", "(plan ", "comm ", "eta 0:00", "bits per byte", "report.html"):
        assert word in ended.stdout
    assert ended.stderr == ""


@pytest.mark.usefixtures("copy_of_four")
def test_the_losses_of_all_stages_are_the_same_to_the_last_bit(place):
    """The first of them is of stage 3."""
    for stage in range(3):
        ended = train("steps=4", "--stage", str(stage), "save_last=false", "--quiet")
        assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")
    runs = sorted((place / "runs").iterdir())
    assert [facts(run)["stage"] for run in runs] == [3, 0, 1, 2]
    curves = [losses(run) for run in runs]
    assert curves[0] == curves[1] == curves[2] == curves[3]
    assert main(["report", "1", "4"]) == 0
    assert "bit" in (place / "runs" / "0001-first" / "report-vs-0004-gpt.html").read_text()


def test_the_demo_holds_what_its_plan_said(place):
    ended = subprocess.run(
        [sys.executable, "-m", "naught", "train", "steps=3", "validation=0.002", "save_last=false"],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    told = facts(place / "runs" / "0001-demo")
    assert told["peak"]["measured"] == pytest.approx(told["peak"]["plan"], rel=0.1)
    assert told["data"]["yardsticks"]["order-0 entropy"] > 4
    assert "order-0 entropy 4." in ended.stdout


def test_compiled_and_recomputed_blocks_and_accumulation_train_too(place):
    same = ("steps=4", "accumulation=2", "--stage", "2", "--nproc", "1", "save_last=false")
    ended = train("model.checkpointing=true", *same)
    assert ended.returncode == 0, ended.stderr
    ended = train("model.compile=true", *same)
    assert ended.returncode == 0, ended.stderr
    recomputed, compiled = (losses(run) for run in sorted((place / "runs").iterdir()))
    assert compiled == pytest.approx(recomputed, rel=1e-3), "a compiler rounds in its own way"


def test_under_torchrun_it_is_the_same_run(place, four):
    by_torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "naught", "train"]
    ended = subprocess.run(
        [*by_torchrun, *command("steps=4", "save_last=false")[4:]],
        env=environment(OMP_NUM_THREADS="1"),
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    (run,) = (place / "runs").iterdir()
    assert losses(run) == losses(four)
    assert ended.stdout.count("step   4/4") == 1, "one rank speaks"


# --- stopping and going on --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rank", "number"), [(1, signal.SIGTERM), (0, signal.SIGUSR1)])
def test_a_signal_to_any_rank_saves_and_ends_with_75_and_the_run_goes_on_bit_for_bit(place, sixty, rank, number):
    status, errors = interrupted(4, to_rank(rank, number), "steps=60")
    assert (status, errors) == (75, "")
    run = place / "runs" / "0001-gpt"
    assert facts(run)["status"] == "stopped"
    stopped_at = records(run, "save")[-1]["step"]
    assert 4 <= stopped_at < 60
    ended = train_on("--resume")
    assert ended.returncode == 0, ended.stderr
    assert f"from global_step{stopped_at}" in ended.stdout
    assert losses(run) == losses(sixty)
    assert facts(run)["status"] == "done"
    assert records(run, "resume")[0]["step"] == stopped_at


def train_on(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "naught", "train", *words],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )


@pytest.mark.parametrize(
    "tell",
    [
        lambda agent: os.kill(agent, signal.SIGTERM),
        lambda agent: os.kill(agent, signal.SIGUSR1),
        lambda agent: os.killpg(agent, signal.SIGINT),
    ],
    ids=["SIGTERM", "SIGUSR1", "a key on the terminal, which reaches all"],
)
def test_a_signal_to_the_agent_stops_all_ranks_the_same_way(place, tell):
    status, errors = interrupted(3, tell, "steps=400")
    assert (status, errors) == (75, "")
    assert facts(place / "runs" / "0001-gpt")["status"] == "stopped"


def test_a_run_can_be_resumed_for_longer_at_another_stage_and_world(place, copy_of_four):
    ended = train_on("--resume", "first", "steps=6", "--stage", "1", "--nproc", "1", "train_batch_size=4")
    assert ended.returncode == 0, ended.stderr
    run = copy_of_four
    assert sorted(losses(run)) == [1, 2, 3, 4, 5, 6]
    assert records(run, "resume")[0]["world"] == 1
    assert ended.stderr == "naught: the run had 2 ranks, and goes on with 1\n"
    assert len(list((place / "runs").iterdir())) == 1
    ended = train_on("--resume", "steps=7")
    assert (ended.returncode, ended.stderr) == (0, "")
    assert records(run, "resume")[1]["world"] == 1, "as it was the last time"


def test_a_run_that_is_under_way_is_not_resumed_and_not_disturbed(copy_of_four):
    run = copy_of_four
    other = RunFolder(run)
    other.claim()
    ended = train_on("--resume", "steps=9")
    assert ended.returncode == 2
    assert ended.stderr == "naught: the run runs/0001-first is under way. Wait until it is over, or stop it\n"
    assert facts(run)["status"] == "done", "as it was"
    os.close(other.handle)


@pytest.mark.usefixtures("copy_of_four")
def test_a_run_that_is_over_is_not_resumed_without_more_steps():
    ended = train_on("--resume", "--nproc", "1")
    assert ended.returncode == 2
    assert "naught: the run is at step 4 of 4 already [train.steps]. Give more: steps=N" in ended.stderr


def test_a_rank_that_is_killed_is_restarted_with_all_others_and_training_goes_on(place, sixty):
    status, errors = interrupted(12, to_rank(1, signal.SIGKILL), "steps=60", "save_every=10", "--max-restarts", "1")
    assert (status, errors) == (0, "")
    (run,) = (place / "runs").iterdir()  # a restart is no new run
    assert facts(run)["status"] == "done"
    assert records(run, "resume")[0]["from"] in [f"global_step{step}" for step in range(10, 60, 10)]
    assert losses(run) == losses(sixty)


def test_a_rank_that_is_killed_is_named_and_the_run_is_marked(place):
    status, errors = interrupted(2, to_rank(1, signal.SIGKILL), "steps=400")
    assert status == 1
    assert errors.startswith("naught: rank 1 was killed by SIGKILL: often the kernel, where memory runs out")
    assert errors.count("\n") == 1, "one cause, and no traceback"
    told = facts(place / "runs" / "0001-gpt")
    assert told["status"] == "failed"
    assert told["error"] == errors.strip(), "not what rank 0 has met"


def test_a_restart_before_the_first_checkpoint_begins_again_in_the_same_folder(place):
    status, errors = interrupted(2, to_rank(1, signal.SIGKILL), "steps=40", "save_last=false", "--max-restarts", "1")
    assert (status, errors) == (0, "")
    (run,) = (place / "runs").iterdir()
    assert sorted(losses(run)) == list(range(1, 41))
    assert records(run, "resume")[0]["step"] == 0


def test_a_signal_before_anything_is_saved_is_no_75(place):
    process = subprocess.Popen(
        command("steps=40"), env=environment(), stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
    )
    os.kill(process.pid, signal.SIGTERM)  # before it listens to any
    process.communicate(timeout=60)
    assert process.returncode not in (0, 75)
    assert not (place / "runs").exists()


def test_a_run_that_only_skips_its_steps_fails(place):
    ended = train("steps=3", "--dtype", "fp16", "fp16.loss_scale=1e30", "--nproc", "1")
    assert ended.returncode == 2
    assert "3 steps in a row were skipped, for their gradients are not finite [step 3]. Lower the learning rate" in ended.stderr
    assert facts(place / "runs" / "0001-gpt")["status"] == "failed"


@pytest.mark.usefixtures("place")
def test_a_disk_that_is_full_does_not_hide_the_cause():
    limited = ["bash", "-c", 'ulimit -f 8; exec "$@"', "_", *command("steps=40", "--nproc", "1")]
    ended = subprocess.run(limited, env=environment(), capture_output=True, text=True, timeout=100, check=False)
    assert ended.returncode == 1
    assert "File too large" in ended.stderr
    assert "report.html" not in ended.stderr


# --- mistakes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["stepz=5"], 'naught: no key "stepz"; did you mean steps?'),
        (["train.steps=none"], "the command line has 1 problem\n  train.steps: must be a whole number from 1"),
        (["absent.json"], "absent.json has 1 problem\n  the configuration: there is no such file"),
        (["steps=5", "absent.json"], 'naught: "absent.json" sets no key'),
        (["--resume"], 'naught: there is no run "last"'),
        (["--resume", "7"], 'naught: there is no run "7"'),
        (["--nproc", "0"], "naught: --nproc is at least 1, not 0"),
        (["data=absent.txt"], 'naught: there is no file "absent.txt" [data.path]. Give a text file, a folder'),
        (["data=absent.npy"], 'naught: there is no file "absent.npy" [data.path]'),
        (["model=gtp2"], 'naught: no model "gtp2"; did you mean gpt2?'),
        (
            ["--stage", "2", "naught.gradients=disk", "naught.nvme_path=x"],
            "naught.gradients: gradients would rest farther away than the optimizer states",
        ),
        (["weights=absent.safetensors"], 'naught: there are no weights at "absent.safetensors"'),
        (["--resume", "runs/none"], 'naught: "runs/none" is no run'),
        (["--stage", "7"], "argument --stage: invalid choice: 7"),
        (["fp16.enabled=true", "bf16.enabled=true"], "fp16.enabled and bf16.enabled are both true"),
    ],
)
def test_mistakes_on_the_command_line_are_told_before_anything_starts(place, capsys, words, said):
    try:
        status = main(["train", *words])
    except SystemExit as stop:  # argparse
        status = int(stop.code or 0)
    assert status in (1, 2)
    assert said in capsys.readouterr().err
    assert not (place / "runs").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["seq=64"], "has 32 positions, and a sample 64 tokens. Set data.seq to 32 or less"),
        (["micro_batch=4000"], "the ranks need 8000 at once [data]. Give more text"),
    ],
)
def test_mistakes_that_ranks_find_are_told_once(place, words, said):
    ended = train(*words)
    assert ended.returncode == 2
    assert said in ended.stderr
    assert ended.stderr.count("\n") == 1
    assert facts(next((place / "runs").iterdir()))["status"] == "failed"


def test_the_whole_configuration_can_be_printed(capsys, place):
    assert main(["train", "steps=7", "--dtype", "fp16", "--print-config"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["train"]["steps"] == 7
    assert printed["fp16"]["enabled"] is True
    assert not (place / "runs").exists()


def fails_on_rank_1() -> Iterator[str]:
    yield "import naught.trainer.training as training"
    yield "step = training.Training._step"
    yield "def broken(self, batches):"
    yield "    if self.engine.global_rank == 1 and self.engine.global_steps == 2:"
    yield "        raise ValueError('a bad batch')"
    yield "    return step(self, batches)"
    yield "training.Training._step = broken"


def test_an_error_of_one_rank_is_told_with_its_rank_and_place_and_nobody_hangs(place):
    (place / "sitecustomize.py").write_text("\n".join(fails_on_rank_1()))
    ended = train("steps=9", PYTHONPATH=f"{place}:{ROOT}")
    assert ended.returncode == 1
    assert ended.stderr == "naught: rank 1 failed with ValueError: a bad batch [sitecustomize.py:5]\n"
    log = (place / "runs" / "0001-gpt" / "logs" / "rank1.log").read_text()
    assert "Traceback" in log


# --- Hugging Face -----------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore")  # of packages that are not ours
@pytest.mark.skipif(find_spec("transformers") is None, reason="needs the extra hf")
def test_a_hugging_face_folder_is_trained_from_its_own_weights(place):
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, vocab_size=256
    )
    torch.manual_seed(3)
    made = LlamaForCausalLM(config).eval()
    made.save_pretrained(place / "llama")
    ended = train("model=llama", "steps=1", "lr=0", "validation=0.02", "model.checkpointing=true")
    assert ended.returncode == 0, ended.stderr
    assert "weights from llama" in ended.stdout
    text = (place / "text.txt").read_bytes()
    windows = Windows(np.frombuffer(text[-int(len(text) * 0.02) :], dtype=np.uint8), 32)
    rows = torch.stack([windows[at] for at in range(len(windows))])
    with torch.no_grad():
        wanted = made(input_ids=rows, labels=rows).loss.item()
    assert records(place / "runs" / "0001-llama", "eval")[-1]["loss"] == pytest.approx(wanted, rel=1e-5)


@pytest.mark.usefixtures("place")
def test_a_device_that_activations_alone_would_fill_is_told_by_what_was_asked_for():
    ended = train("--gpu", "50kB", "--nproc", "1", "steps=1")
    assert ended.returncode == 2
    assert "activations alone would take" in ended.stderr
    assert "[naught.gpu_memory]" in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.skipif(find_spec("transformers") is not None, reason="it is installed")
def test_a_missing_package_is_told_with_its_remedy(place):
    (place / "config.json").write_text('{"model_type": "gpt2"}')
    ended = train("model=config.json", "--nproc", "1")
    assert ended.returncode == 2
    assert "the package transformers is not installed" in ended.stderr
    assert "pip install 'naught[hf]'" in ended.stderr
