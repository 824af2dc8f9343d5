"""The doctor looks at everything, says one line of each, and reaches its end whatever is broken."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from test_starting import OPENMPI, SLURM, TORCHRUN

import naught
from naught.cli import main
from naught.devices import GpuFacts
from naught.doctor import Finding, Verdict, software
from naught.doctor.finding import discreet, findings_of
from naught.doctor.hardware import gpus_finding, links_of
from naught.doctor.network import seat_of, unknown_names
from naught.doctor.numerics import PLAIN, RESUMED, STAGES, Run, judge
from naught.doctor.place import file_system_of
from naught.errors import UsageError
from naught.machine import device_here
from naught.measured import keep

ROOT = Path(naught.__file__).parent.parent
TOPICS = (
    *("naught", "torch", "packages", "extras", "gpus", "cores", "memory", "limits", "/dev/shm", "disk", "file locks"),
    *("network", "launcher"),
)


@pytest.fixture(autouse=True)
def plain_place(tmp_path, monkeypatch):
    """No GPU, no launcher, nothing measured, and a folder of its own."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("NAUGHT_CACHE", str(tmp_path / "cache"))
    for name in [name for name in os.environ if name.endswith("_SOCKET_IFNAME") or name in SLURM | OPENMPI | TORCHRUN]:
        monkeypatch.delenv(name)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")


# --- the whole of it ---------------------------------------------------------------------------------------------------


def test_a_whole_examination_finds_that_training_here_is_right(capsys, tmp_path):
    assert main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    said = {line[6:25].strip(): (line[:4].strip(), line[27:]) for line in lines[:-1]}
    assert set(TOPICS) < set(said)
    assert said["training, CPU"] == (
        "ok",
        "stages 0 to 3 train 3 steps on 2 ranks bit for bit like plain PyTorch in one process",
    )
    assert said["checkpoint, CPU"] == ("ok", "saved at stage 3, loaded at stage 1, trained on: the same bits")
    for name in ("collectives", "AdamW", "disk", "arithmetic"):
        assert "/s" in said[f"speed, {name}"][1]
    assert "training, GPU" not in said
    assert lines[-1].startswith(f"{len(said)} checks: none bad")
    assert list(Path.cwd().iterdir()) == []
    assert not (tmp_path / "cache").exists(), "a doctor keeps nothing"


def test_a_quick_examination_measures_and_trains_nothing(capsys):
    assert main(["doctor", "--quick"]) == 0
    said = capsys.readouterr().out
    assert [line[6:25].strip() for line in said.splitlines()[:-1]] == [*TOPICS, "speeds"]
    assert "nothing was measured yet" in said


def test_data_are_the_same_lines(capsys):
    keep({"disk_bytes_s": 3.5e9}, device_here(), today="2026-11-15")
    main(["doctor", "--quick", "--json"])
    data = json.loads(capsys.readouterr().out)
    found = {check["topic"]: check for check in data["checks"]}
    assert list(found) == [*TOPICS, "speed, disk"]
    assert found["speed, disk"]["said"] == "3.50 GB/s, measured on 2026-11-15"
    assert found["speed, disk"]["facts"] == {"disk_bytes_s": 3.5e9, "date": "2026-11-15"}
    assert found["naught"]["facts"]["naught"] == naught.__version__
    assert data["bad"] == 0
    assert found["disk"]["facts"]["free_bytes"] > 0
    assert found["file locks"]["facts"] == {"locks": True}


def test_what_is_bad_is_told_with_what_to_do_and_by_the_status(capsys, monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nonsense0")
    monkeypatch.setenv("RANK", "3")
    assert main(["doctor", "--quick"]) == 1
    bad = [line for line in capsys.readouterr().out.splitlines() if line.startswith("bad")]
    assert len(bad) == 2
    assert "GLOO_SOCKET_IFNAME names no interface of lo" in bad[0]
    assert "Unset GLOO_SOCKET_IFNAME" in bad[0]
    assert "RANK is set, but not WORLD_SIZE and MASTER_ADDR" in bad[1]
    assert "Start with torchrun" in bad[1]


def test_nothing_of_a_user_is_told(tmp_path):
    home = tmp_path / "jane.doe"
    (home / "project").mkdir(parents=True)
    env = os.environ | {"HOME": str(home), "USER": "jane.doe", "HF_TOKEN": "hf_secret", "WANDB_API_KEY": "wandb_secret"}
    env |= {"PYTHONPATH": str(ROOT), "MASTER_ADDR": "secret-host", "RANK": "0", "WORLD_SIZE": "1"}
    env |= {"NAUGHT_CACHE": str(home / "cache")}
    (home / "cache").mkdir()
    (home / "cache" / "machine.json").write_text("damaged", encoding="utf-8")
    for form in ([], ["--json"]):
        run = _doctor(form, env, home / "project")
        assert run.returncode == 0, run.stdout
        for word in ("jane", "secret"):
            assert word not in run.stdout + run.stderr
        assert "rank 0 of 1" in run.stdout
    assert "is not used" in run.stderr


def test_a_broken_torch_is_a_line_of_the_report(tmp_path):
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "torch.py").write_text("raise OSError('libtorch.so: no such file')", encoding="utf-8")
    run = _doctor([], os.environ | {"PYTHONPATH": f"{tmp_path / 'broken'}:{ROOT}"}, tmp_path)
    assert run.returncode == 1
    assert run.stderr == ""
    lines = run.stdout.splitlines()
    assert [line[6:25].strip() for line in lines[:-1]] == [*TOPICS, "speeds"]
    assert lines[1].startswith("bad   torch")
    assert "it cannot be imported: OSError: libtorch.so: no such file. Install it: pip install 'torch>=2.10,<2.14'" in lines[1]


def _doctor(form, env, folder):
    command = [sys.executable, "-P", "-m", "naught", "doctor", "--quick", *form]
    return subprocess.run(command, env=env, cwd=folder, capture_output=True, text=True, timeout=60, check=False)


# --- its parts ---------------------------------------------------------------------------------------------------------


def test_a_probe_that_fails_is_its_own_finding(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))

    def broken():
        raise PermissionError(f"no access\nto {tmp_path}/x")

    def refused():
        raise UsageError("this cannot be", where="RANK", fix="unset it")

    [found] = findings_of("disk", broken)
    assert (found.topic, found.verdict) == ("disk", Verdict.BAD)
    assert str(found) == ("this check has failed: PermissionError: no access to ~/x. Report it together with these lines")
    [found] = findings_of("launcher", refused)
    assert (found.verdict, str(found)) == (Verdict.BAD, "this cannot be [RANK]. Unset it")


def test_paths_lose_the_name_of_their_user():
    assert discreet("in /home/jane/x and /Users/joe/y\n") == "in ~/x and ~/y"
    assert len(discreet("x" * 10_000)) < 700


def runs_of(digest: str = "bits", **other: str) -> dict[str, Run]:
    names = [PLAIN, *STAGES, RESUMED]
    return {name: Run(["0x1p+0"] * 3, other.get(name.replace(" ", "_"), digest)) for name in names}


def test_runs_that_agree_are_fine():
    training, checkpoint = judge("CPU", [runs_of(), runs_of()])
    assert {training.verdict, checkpoint.verdict} == {Verdict.OK}


@pytest.mark.parametrize(
    ("ranks", "topic", "said"),
    [
        ([runs_of(stage_2="other"), runs_of(stage_2="other")], "training, CPU", "stage 2: other bits"),
        ([runs_of(), runs_of(stage_0="other", stage_3="other")], "training, CPU", "stage 0, stage 3: other bits"),
        ([runs_of(), runs_of(digest="other")], "training, CPU", "plain PyTorch, stage 0, stage 1, stage 2, stage 3: other bits"),
        ([runs_of(a_loaded_checkpoint="other"), runs_of()], "checkpoint, CPU", "trains on at stage 1 with other bits"),
    ],
)
def test_runs_that_differ_are_bad_and_named(ranks, topic, said):
    bad = [finding for finding in judge("CPU", ranks) if finding.verdict is Verdict.BAD]
    assert [finding.topic for finding in bad] == [topic]
    assert said in bad[0].said
    assert bad[0].fix


def test_a_loss_that_differs_is_bad_too():
    odd = runs_of()
    odd["stage 1"] = Run(["0x1p+0", "0x1p+0", "0x1.8p+0"], "bits")
    assert judge("CPU", [runs_of(), odd])[0].verdict is Verdict.BAD


def test_the_seat_of_a_launcher_is_told_without_its_address():
    assert seat_of({}).said == "no launcher's variables: a script here is a single process"
    for env, said in ((TORCHRUN, "torchrun: rank 1 of 4"), (SLURM, "Slurm: rank 5 of 8"), (OPENMPI, "OpenMPI: rank 3 of 4")):
        found = seat_of(env)
        assert said in found.said
        assert "head" not in str(found)


def test_interfaces_are_named_as_nccl_reads_them():
    names = ["lo", "eth0", "eth1"]
    assert unknown_names({"GLOO_SOCKET_IFNAME": "eth0"}, names) == []
    assert unknown_names({"NCCL_SOCKET_IFNAME": "ib,eth"}, names) == []
    assert unknown_names({"NCCL_SOCKET_IFNAME": "=eth1"}, names) == []
    assert unknown_names({"NCCL_SOCKET_IFNAME": "^docker"}, names) == []
    assert unknown_names({"NCCL_SOCKET_IFNAME": "ib0", "GLOO_SOCKET_IFNAME": "lo"}, names) == ["NCCL_SOCKET_IFNAME"]


MATRIX = """\t\x1b[4mGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\x1b[0m
GPU0\t X \tNV18\tSYS\tPIX\t0-15
GPU1\tNV18\t X \tSYS\tSYS\t0-15
GPU2\tSYS\tSYS\t X \tSYS\t16-31
NIC0\tPIX\tSYS\tSYS\t X

Legend:
  X    = Self
  GPU  = one of them
"""


def test_links_between_gpus_are_counted_by_kind():
    assert links_of(MATRIX, 3) == {"NV18": 1, "SYS": 2}
    assert links_of("", 3) == {}
    assert links_of("GPU0\n", 2) == {}


def gpu(free: int = 70, peers: tuple[int, ...] = (1,)) -> GpuFacts:
    return GpuFacts("NVIDIA H100", 80 * 10**9, free * 10**9, peers)


@pytest.mark.parametrize(
    ("found", "known", "verdict", "said"),
    [
        ([], [], Verdict.OK, "none: ranks are processes on the CPU"),
        ([], [("NVIDIA H100", 1)], Verdict.BAD, "the driver has 1 x NVIDIA H100, and torch can use none of them"),
        ([gpu(), gpu(peers=(0,))], [], Verdict.OK, "2 x NVIDIA H100, 80.0 GB each, at least 70.0 GB of it free; links: 1 x NV18"),
        ([gpu(), gpu(free=3)], [], Verdict.NOTE, "at least 3.00 GB of it free"),
        ([gpu(), gpu(peers=())], [], Verdict.NOTE, "1 of them cannot reach every other one"),
    ],
)
def test_gpus_are_what_torch_can_use(found, known, verdict, said):
    finding = gpus_finding(found, known, {"NV18": 1})
    assert finding.verdict is verdict
    assert said in finding.said
    assert bool(finding.fix) == (verdict is not Verdict.OK)


def test_the_file_system_of_a_folder_is_that_of_the_nearest_mount():
    mounts = (
        "22 1 8:1 / / rw - ext4 /dev/sda1 rw\n"
        "30 22 0:40 / /data rw shared:7 - nfs4 server:/data rw\n"
        "31 22 0:41 / /data/fast\\040disk rw - xfs /dev/nvme0n1 rw\n"
        "32 22 0:42 / /dat rw - vfat /dev/sdb rw\n"
    )
    for folder, kind in {"/home": "ext4", "/data": "nfs4", "/data/fast disk/x": "xfs", "/data/fastdisk": "nfs4"}.items():
        assert file_system_of(Path(folder), mounts) == kind
    assert file_system_of(Path("/"), "") == "unknown"


def test_versions_are_those_that_the_package_asks_for():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    low, high = (".".join(str(part) for part in release) for release in software.TESTED_TORCH)
    assert f"torch>={low},<{high}" in project["dependencies"]
    assert {one.split(">")[0] for one in project["dependencies"]} == {"torch", *software.NEEDED}
    extras = {extra: tuple(one.split(">")[0] for one in names) for extra, names in project["optional-dependencies"].items()}
    extras.pop("dev")
    assert extras == software.EXTRAS


def test_a_version_that_was_not_tested_is_noted(monkeypatch):
    monkeypatch.setattr("torch.__version__", "3.0.0+cu999")
    [found] = software.torch_itself()
    assert found.verdict is Verdict.NOTE
    assert found.fix == "tested are 2.10 to 2.13"


def test_a_finding_reads_as_a_sentence():
    assert str(Finding("disk", "nearly full", Verdict.NOTE, "make room")) == "nearly full. Make room"
    assert str(Finding("disk", "fine")) == "fine"
