"""What a run leaves behind: numbered once, added to, never replaced; and what it says on the way."""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import pty
from concurrent.futures import ThreadPoolExecutor

import pytest

from naught.errors import UsageError
from naught.quantity import show_clock, show_seconds
from naught.trainer.console import Console, step_line
from naught.trainer.run_folder import RunFolder, make_folder
from naught.trainer.seating import _of_launch, launch_names

STEP = {
    **{"loss": 2.9131, "bpb": 4.2, "grad_norm": 0.8412, "lr": 1.8e-3, "loss_scale": 1.0, "skipped": 0, "samples": 32},
    **{"tokens": 4096, "seconds": 0.5, "tokens_s": 8192.0, "mfu": None, "phases": {}, "waited": {"all-gather": 0.05}},
    **{"sent": {}, "memory": {"after": {}, "allocated": None, "peak": 58_000_000}},
}


def lines(path):
    return [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]


def read_all(terminal: int) -> str:
    """What was written to a terminal whose other end is closed: it ends with an error."""
    said = b""
    with contextlib.suppress(OSError):
        while piece := os.read(terminal, 4096):
            said += piece
    os.close(terminal)
    return said.decode()


def test_folders_are_numbered_and_named(tmp_path):
    assert make_folder(tmp_path / "runs", "demo").name == "0001-demo"
    assert make_folder(tmp_path / "runs", "my model/../../x").name == "0002-my-model-..-..-x"
    assert make_folder(tmp_path / "runs", "///").name == "0003-run"


def test_runs_that_begin_at_once_get_folders_of_their_own(tmp_path):
    with ThreadPoolExecutor(8) as threads:
        made = list(threads.map(lambda at: make_folder(tmp_path, f"n{at % 2}"), range(40)))
    assert len({path.name for path in made}) == 40
    assert len({path.name.partition("-")[0] for path in made}) == 40, "no two have one number"


def test_a_place_where_no_folder_can_be_made_is_told(tmp_path):
    (tmp_path / "runs").write_text("a file")
    with pytest.raises(UsageError, match="no run folder can be made"):
        make_folder(tmp_path / "runs", "demo")


def test_records_are_appended_with_a_clock_that_goes_on_after_a_restart(tmp_path):
    run = RunFolder(tmp_path)
    run.record("step", 1, **STEP)
    run.since -= 100
    run.record("step", 2, **STEP)
    again = RunFolder(tmp_path)
    again.record("resume", 2)
    times = [found["time_s"] for found in lines(tmp_path)]
    assert times == sorted(times)
    assert times[-1] >= 100
    assert (tmp_path / "metrics.csv").read_text().count("\n") == 3


def test_a_line_that_a_kill_has_torn_is_cut_off_and_the_rest_stays(tmp_path):
    run = RunFolder(tmp_path)
    for step in (1, 2):
        run.record("step", step, **STEP)
    for torn in ('{"kind": "step", "st', '{"kind": "step", "step": 9, "time_s": 1}'):
        with (tmp_path / "metrics.jsonl").open("a") as file:
            file.write(torn)
        RunFolder(tmp_path).record("step", 3, **STEP)
    assert [found["step"] for found in lines(tmp_path)] == [1, 2, 3, 3]


def test_what_is_not_a_number_is_still_json(tmp_path):
    RunFolder(tmp_path).record("step", 1, **STEP | {"loss": math.nan, "grad_norm": math.inf})
    text = (tmp_path / "metrics.jsonl").read_text()
    assert "NaN" not in text
    assert json.loads(text)["loss"] is None


def test_facts_are_replaced_as_a_whole(tmp_path):
    run = RunFolder(tmp_path)
    run.tell(status="running", name="demo")
    run.tell(status="done")
    again = RunFolder(tmp_path)
    again.reread()
    assert again.facts == {"status": "done", "name": "demo"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["logs", "run.json"]


def test_a_step_is_one_dense_line():
    line = step_line({"step": 200, **STEP}, steps=400, planned_bytes=61_000_000, held_bytes=58_000_000, eta_s=32)
    assert line == (
        "step   200/400  50%  loss 2.9131  bpb 4.200  |g| 0.841  lr 1.80e-03  8.19k tok/s  mem 58.0 MB (plan 61.0 MB)  "
        "comm 10%  eta 0:32"
    )
    bare = STEP | {"bpb": None, "grad_norm": None, "mfu": 0.412, "waited": {}, "skipped": 3}
    line = step_line({"step": 1, **bare}, steps=1, planned_bytes=None, held_bytes=None, eta_s=3725)
    assert line == "step   1/1 100%  loss 2.9131  lr 1.80e-03  8.19k tok/s  mfu 41.2%  skipped 3  eta 1:02:05"


def test_in_a_pipe_there_are_plain_lines_and_no_bar():
    stream = io.StringIO()
    console = Console(stream)
    console.say("model", "small")
    console.progress(1, 2, "half")
    console.record({"step": 1}, "a line")
    console.record({"step": 2}, None)
    assert stream.getvalue() == "model  small\na line\n"


def test_quiet_says_nothing_and_programs_get_records():
    quiet, program = io.StringIO(), io.StringIO()
    for stream, options in ((quiet, {"quiet": True}), (program, {"as_json": True})):
        console = Console(stream, **options)
        console.say("model", "small")
        console.record({"kind": "step", "step": 1, "memory": {"after": {}}}, "a line")
    assert quiet.getvalue() == ""
    assert json.loads(program.getvalue()) == {"kind": "step", "step": 1}


def test_a_reader_that_has_seen_enough_does_not_end_a_run():
    theirs, ours = os.pipe()
    os.close(theirs)
    with os.fdopen(ours, "w") as stream:
        console = Console(stream)
        for _ in range(2):
            console.record({}, "a line")
        assert console.quiet


def test_on_a_terminal_a_bar_is_drawn_and_gives_way_to_lines():
    ours, theirs = pty.openpty()
    with os.fdopen(theirs, "w") as stream:
        console = Console(stream)
        console.progress(1, 2, "half")
        console.record({}, "a line")
        console.progress(2, 2, "whole")
        console.close()
    said = read_all(ours)
    assert said.count("\r\x1b[K[") == 2
    assert f"[{'#' * 12}{'.' * 12}] half\r\x1b[Ka line\r\n" in said


@pytest.mark.parametrize(("seconds", "shown"), [(0, "0:00"), (59.6, "1:00"), (3599, "59:59"), (3600, "1:00:00")])
def test_a_clock_shows_hours_where_there_are_any(seconds, shown):
    assert show_clock(seconds) == shown


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (0, "0.0 ms"),
        (0.3e-6, "0.3 us"),
        (135e-6, "135 us"),
        (0.9996e-3, "1.0 ms"),
        (0.0012, "1.2 ms"),
        (1.5, "1.50 s"),
        (150, "2.5 min"),
        (9000, "2.5 h"),
    ],
)
def test_a_time_has_digits_whatever_its_size(seconds, shown):
    assert show_seconds(seconds) == shown


def test_a_launch_has_the_name_of_its_job_and_of_its_agent():
    assert launch_names({"SLURM_JOB_ID": "77"})["job"] == "slurm-77"
    assert launch_names({"SLURM_JOB_ID": "77", "TORCHELASTIC_RUN_ID": "abc"})["agent"] == "torchrun-abc"
    assert launch_names({"TORCHELASTIC_RUN_ID": "none"}) == launch_names({}), "torchrun's default names nothing"
    assert str(os.getppid()) in launch_names({})["agent"]


@pytest.mark.parametrize(
    ("env", "found"),
    [
        ({"TORCHELASTIC_RUN_ID": "a"}, None),
        ({"TORCHELASTIC_RUN_ID": "a", "TORCHELASTIC_RESTART_COUNT": "0"}, None),
        ({"TORCHELASTIC_RUN_ID": "a", "TORCHELASTIC_RESTART_COUNT": "1"}, "0001-mine"),
        ({"TORCHELASTIC_RUN_ID": "b", "TORCHELASTIC_RESTART_COUNT": "1", "SLURM_JOB_ID": "7"}, "0002-mine"),
        ({"TORCHELASTIC_RUN_ID": "c", "TORCHELASTIC_RESTART_COUNT": "1"}, None),
        ({"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "2"}, "0002-mine"),
    ],
)
def test_a_restart_finds_its_own_run_and_no_other(tmp_path, env, found):
    """Of two launches in one job of Slurm's, one that is over, one of another name and one that is damaged."""
    launches = [("mine", "a", "failed"), ("mine", "b", "running"), ("mine", "b", "done"), ("other", "b", "running")]
    for number, (name, agent, status) in enumerate(launches, start=1):
        run = RunFolder(make_folder(tmp_path, name))
        run.tell(number=number, launch=launch_names({"TORCHELASTIC_RUN_ID": agent, "SLURM_JOB_ID": "7"}), status=status)
    (make_folder(tmp_path, "mine") / "run.json").write_text("{torn")
    folder = _of_launch(tmp_path, "mine", env)
    assert (folder and folder.name) == found


def test_one_process_at_a_time_writes_into_a_run(tmp_path):
    first = RunFolder(tmp_path)
    first.claim()
    with pytest.raises(UsageError, match="is under way"):
        RunFolder(tmp_path).claim()
    os.close(first.handle)
    RunFolder(tmp_path).claim()
