"""`naught launch`: a script of a user's as several ranks, on the loopback, with threads that do not fight."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from test_train import environment

from naught.cli import main
from naught.comm.agent import Ended, RankExit
from naught.surroundings import threads_of_each
from naught.trainer.failing import Failure, cause, failure_of, status_of

pytestmark = pytest.mark.timeout(120)

SCRIPT = """
import os, sys
from pathlib import Path
import naught.comm as comm

comm.init_distributed()
rank = comm.get_rank()
if sys.argv[1:] == ["fail"] and rank == 1:
    sys.exit(7)
held = set()
for pid in (os.getpid(), os.getppid()):
    for link in Path(f"/proc/{pid}/fd").iterdir():
        held |= {os.readlink(link)} if link.is_symlink() else set()
rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
open_at = sorted({row[1].split(":")[0] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in held})
said = [f"rank {rank} of {comm.get_world_size()}", f"threads {os.environ['OMP_NUM_THREADS']}", f"open at {open_at}"]
sys.stdout.write("\\n".join([*said, *sys.argv[1:], ""]))
sys.stdout.flush()
comm.barrier()
comm.destroy_process_group()
"""


def launch(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "naught", "launch", *words]
    return subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=100, check=False)


@pytest.fixture
def script(tmp_path) -> Path:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


def test_a_script_runs_as_ranks_that_listen_on_the_loopback_only(script):
    ended = launch("--nproc", "2", str(script), "--its-own", "argument")
    assert ended.returncode == 0, ended.stderr
    said = ended.stdout.splitlines()
    assert {"rank 0 of 2", "rank 1 of 2"} <= set(said)
    assert f"threads {threads_of_each(2)}" in said
    assert {line for line in said if line.startswith("open at")} == {"open at ['0100007F']"}, "127.0.0.1"
    assert said.count("--its-own") == 2


def test_a_rank_that_fails_is_named_and_its_status_is_the_commands(script):
    ended = launch("--nproc", "2", str(script), "fail")
    assert ended.returncode == 7
    assert ended.stderr.splitlines()[-1] == "naught: rank 1 ended with status 7, and the others were stopped"


def test_a_module_can_be_launched():
    ended = launch("--nproc", "1", "-m", "this")
    assert ended.returncode == 0, ended.stderr
    assert "Namespaces are one honking great idea" in ended.stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [(["absent.py"], 'there is no script "absent.py"'), (["--nproc", "0", __file__], "--nproc is at least 1, not 0")],
)
def test_mistakes_are_told_in_a_line(capsys, words, said):
    assert main(["launch", *words]) == 2
    assert said in capsys.readouterr().err


def test_a_rank_does_not_launch_others(capsys, monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    assert main(["launch", __file__]) == 2
    assert "a launcher has started this process as a rank already" in capsys.readouterr().err


def test_threads_are_shared_out():
    cores = len(os.sched_getaffinity(0))
    assert threads_of_each(1) == cores
    assert threads_of_each(10 * cores) == 1


# --- one cause --------------------------------------------------------------------------------------------------------


def lost() -> Failure:
    return failure_of(RuntimeError("[gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:1234"), 0)


def test_a_rank_that_lost_another_is_not_the_cause():
    first = failure_of(ValueError("bad batch"), 1)
    assert cause([lost(), first], [])[0].startswith("naught: rank 1 failed with ValueError: bad batch")
    killed = RankExit(1, -9, 0.0)
    assert cause([lost()], [killed, RankExit(0, 1, 0.0)])[0].startswith("naught: rank 1 was killed by SIGKILL")
    assert "SIGSEGV: a fault in native code" in cause([], [RankExit(2, -11, 0.0)])[0]


def test_ranks_that_the_agent_stopped_are_not_the_cause():
    assert cause([], [RankExit(1, 5, 0.0), RankExit(0, -15, 0.0)]) == ("naught: rank 1 ended with status 5", 5)


def test_what_a_rank_has_heard_from_another_is_told_by_that_one():
    from naught.errors import UsageError

    own = failure_of(UsageError("no data", where="data.path"), 0)
    heard = failure_of(UsageError("no data", where="data.path, rank 0"), 1)
    assert cause([heard, own], []) == ("naught: no data [data.path]", 2)


def test_notes_of_an_error_are_told_with_it():
    error = ValueError("no good")
    error.add_note("naught: this is why")
    assert failure_of(error, 0).text.splitlines()[1] == "naught: this is why"
    assert status_of(error) == 1


def test_a_shortage_is_told_by_what_is_held_and_not_by_torchs_page():
    error = MemoryError("a long page")
    error.add_note("naught: out of memory in the forward of step 1\n  held: weights 6 GB")
    first, second, third = failure_of(error, 3).text.splitlines()
    assert first == "naught: rank 3: out of memory in the forward of step 1"
    assert second == "  held: weights 6 GB"
    assert "model.checkpointing=true" in third


@pytest.mark.parametrize(
    ("times", "words"),
    [
        ((6.0, 5.0), "rank 1 ended with status 1, and the others were stopped"),
        ((5.0, 5.0), "ranks 0 and 1 failed, and which of them did first is told by their tracebacks"),
    ],
)
def test_a_rank_is_blamed_only_if_it_was_the_first(monkeypatch, capsys, times, words):
    exits = sorted((RankExit(rank, 1, time_s) for rank, time_s in enumerate(times)), key=lambda found: found.time_s)
    monkeypatch.setattr("naught.comm.agent.run_ranks", lambda *_, **__: Ended(tuple(exits)))
    assert main(["launch", "--nproc", "2", __file__]) == 1
    assert capsys.readouterr().err == f"naught: {words}\n"
