"""Data is never code, and nobody listens but where it was told: what no file, configuration or peer can make us do."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from workers import run_script

import naught

PACKAGE = Path(naught.__file__).parent

# Names that turn data into code, wherever they come from.
FORBIDDEN_CALLS = {"eval", "exec", "compile", "__import__"}
FORBIDDEN_ATTRIBUTES = {
    *{("torch", "load"), ("torch", "save"), ("np", "load"), ("numpy", "load"), ("os", "system"), ("os", "popen")},
    *{("importlib", "import_module"), ("yaml", "load")},
}
# They import by names that stand in their own lines: what the package exports, and sinks for scalars.
IMPORT_BY_CONSTANTS = {"__init__.py", "extras.py"}
OBJECTS = {
    f"{verb}_object{s}" for verb in ("gather", "all_gather", "broadcast", "scatter", "send", "recv") for s in ("", "_list", "s")
}
READS_ONLY = {"importlib.metadata", "importlib.resources"}  # they run nothing
FORBIDDEN_IMPORTS = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "importlib"}


def findings(path: Path) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        told = ""
        if isinstance(node, ast.Import):
            told = ", ".join(alias.name for alias in node.names if alias.name.split(".")[0] in FORBIDDEN_IMPORTS)
        elif isinstance(node, ast.ImportFrom) and str(node.module).split(".")[0] in FORBIDDEN_IMPORTS:
            told = "" if node.module in READS_ONLY else str(node.module)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in FORBIDDEN_CALLS:
            told = node.func.id
        elif isinstance(node, ast.Attribute):
            owner = node.value.id if isinstance(node.value, ast.Name) else ""
            told = f"{owner}.{node.attr}" if (owner, node.attr) in FORBIDDEN_ATTRIBUTES or node.attr in OBJECTS else ""
        elif isinstance(node, ast.keyword) and node.arg == "shell":
            told = "shell="
        if told:
            found.append(f"{path.name}:{getattr(node, 'lineno', '?')}: {told}")
    return found


def test_nothing_of_ours_turns_data_into_code():
    found = [finding for path in sorted(PACKAGE.rglob("*.py")) for finding in findings(path)]
    found = [finding for finding in found if not ("importlib" in finding and finding.partition(":")[0] in IMPORT_BY_CONSTANTS)]
    assert found == []


@pytest.mark.parametrize(
    "code",
    ["import pickle", "torch.load(x)", "dist.all_gather_object(a, b)", "eval(x)", "from importlib import x", "f(shell=True)"],
)
def test_the_scan_sees_what_it_is_for(tmp_path, code):
    (tmp_path / "x.py").write_text(code)
    assert findings(tmp_path / "x.py")


# Everything that a job does, while an audit hook counts what could run code, start a process or open a port.
JOB = """
import json, sys
import torch, naught
from naught.cli import main
events = []
WATCHED = ("pickle.find_class", "subprocess.Popen", "os.system", "os.exec", "marshal.loads", "socket.bind")
def listeners():
    mine = set()
    import os
    for name in os.listdir("/proc/self/fd"):
        try:
            mine.add(os.readlink("/proc/self/fd/" + name))
        except FileNotFoundError:
            pass
    found = []
    for table in ("tcp", "tcp6"):
        for line in open(f"/proc/self/net/{table}").read().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in mine:
                found.append(fields[1].split(":")[0])
    return found
def job(folder):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.1), torch.nn.Linear(8, 8))
    engine, *_ = naught.initialize(model=model, config={"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW"},
        "zero_optimization": {"stage": 3}, "bf16": {"enabled": True}})
    for _ in range(2):
        engine.backward(engine(torch.ones(1, 8, dtype=torch.bfloat16)).float().mean())
        engine.step()
    engine.save_checkpoint(folder, tag="a")
    engine.save_checkpoint(folder, tag="b", asynchronous=True)
    engine.load_checkpoint(folder, tag="b")
    if engine.global_rank == 0:
        main(["ckpt", "verify", folder])
        main(["ckpt", "export", folder, "b", "--to", folder + "/hf"])
    torch.distributed.barrier()
    engine.load_weights(folder + "/hf")
    engine.destroy()
naught.comm.init_distributed("gloo", verbose=False)
job(sys.argv[1] + "/first")  # imports what is imported late
sys.addaudithook(lambda event, args: events.append(f"{event} {args}") if event in WATCHED else None)
job(sys.argv[1] + "/second")
print("told " + json.dumps({"events": events, "listeners": listeners()}))
"""


@pytest.mark.parametrize("address", ["127.0.0.1", "localhost"])
def test_a_job_on_one_machine_runs_no_data_and_listens_on_the_loopback_only(tmp_path, address):
    for code, said, errors in run_script(JOB, str(tmp_path), MASTER_ADDR=address):
        assert code == 0, errors
        told = json.loads(next(line for line in said.splitlines() if line.startswith("told "))[5:])
        assert told["events"] == []
        loopback = {"0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F"}
        assert told["listeners"], "there is at least one for the other rank"
        assert set(told["listeners"]) <= loopback


UNDER_TORCHRUN = """
import os, torch, naught
naught.comm.init_distributed("gloo", verbose=False)
torch.distributed.barrier()
handles = {os.readlink(f"/proc/{pid}/fd/{name}") for pid in (os.getpid(), os.getppid())
           for name in os.listdir(f"/proc/{pid}/fd") if os.path.lexists(f"/proc/{pid}/fd/{name}")}
for table in ("tcp", "tcp6"):
    for line in open(f"/proc/self/net/{table}").read().splitlines()[1:]:
        fields = line.split()
        if fields[3] == "0A" and f"socket:[{fields[9]}]" in handles:
            print("listens", fields[1].split(":")[0], flush=True)
torch.distributed.barrier()
"""


def test_torchrun_itself_can_be_kept_to_the_loopback(tmp_path):
    """As docs/deepspeed.md has it: ranks and their agent together."""
    (tmp_path / "job.py").write_text(UNDER_TORCHRUN)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend", "c10d"]
    command += ["--rdzv-conf", "store_type=file", "--rdzv-endpoint", str(tmp_path / "meet"), str(tmp_path / "job.py")]
    env = os.environ | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    env |= {"PYTHONPATH": f"{PACKAGE.parent}:{os.environ.get('PYTHONPATH', '')}"}
    ended = subprocess.run(command, env=env, capture_output=True, text=True, timeout=100)
    assert ended.returncode == 0, ended.stderr
    found = {line.split()[1] for line in ended.stdout.splitlines() if line.startswith("listens")}
    assert found == {"0100007F"}
