"""A script starts under any launcher, or under none, and is told plainly when its environment makes no sense."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch

from naught import comm
from naught.comm.listening import meeting_store, stay_on_this_machine
from naught.errors import UsageError
from naught.seats import Seat, expand_hosts, find_seat

ROOT = Path(__file__).parent.parent
LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "SLURM_", "OMPI_", "TORCHELASTIC_", "DS_", "DEEPSPEED_")
SLURM = {
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_NODELIST": "gpu[07-08],big",
    "SLURM_STEP_ID": "0",
    "SLURM_JOB_ID": "4711",
}
OPENMPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "MASTER_ADDR": "head",
}
TORCHRUN = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "MASTER_ADDR": "head", "MASTER_PORT": "1234"}


@pytest.fixture
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A shell without any launcher's variables; a group that the test starts is gone after it."""
    for name in [name for name in os.environ if name.startswith(LAUNCHERS)]:
        monkeypatch.delenv(name)
    yield
    if comm.is_initialized():
        comm.destroy_process_group()


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("one", ["one"]),
        ("host[03-05,9]", ["host03", "host04", "host05", "host9"]),
        ("a[1-2],b,c[007]-ib", ["a1", "a2", "b", "c007-ib"]),
        ("rack[1-2]n[08-10]", ["rack1n08", "rack1n09", "rack1n10", "rack2n08", "rack2n09", "rack2n10"]),
        ("n[099-101].site.org", ["n099.site.org", "n100.site.org", "n101.site.org"]),
    ],
)
def test_lists_of_nodes_are_read_as_slurm_writes_them(text, hosts):
    assert expand_hosts(text) == hosts


@pytest.mark.parametrize("text", ["", "a[1-", "a[]", "a[x-y]", "a,,b", "a]1[", "a b"])
def test_what_is_no_list_of_nodes_is_refused(text):
    with pytest.raises(UsageError, match="no list of nodes"):
        expand_hosts(text)


@pytest.mark.parametrize(
    ("env", "seat"),
    [
        ({}, None),
        ({"MASTER_ADDR": "head", "LOCAL_RANK": "3"}, None),
        (TORCHRUN, Seat(1, 4, 0, "head", 1234)),
        ({"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "head"}, Seat(1, 4, 1, "head", 29500)),
        (SLURM, Seat(5, 8, 1, "gpu07", 29500 + 711)),
        (SLURM | {"MASTER_ADDR": "mine", "MASTER_PORT": "77", "WORLD_SIZE": "8"}, Seat(5, 8, 1, "mine", 77)),
        (SLURM | {"SLURM_STEP_NUM_TASKS": "6", "SLURM_STEP_NODELIST": "big"}, Seat(5, 6, 1, "big", 29500 + 711)),
        (SLURM | {"SLURM_NODELIST": "", "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.1"}, Seat(5, 8, 1, "10.0.0.1", 29500 + 711)),
        (SLURM | {"SLURM_STEP_NUM_TASKS": "1"}, None),
        (SLURM | TORCHRUN, Seat(1, 4, 0, "head", 1234)),
        (OPENMPI, Seat(3, 4, 1, "head", 29500)),
        (SLURM | OPENMPI, Seat(3, 4, 1, "head", 29500)),
        ({name: "2" if "SIZE" in name else "0" for name in OPENMPI if "OMPI" in name}, Seat(0, 2, 0, "127.0.0.1", 29500)),
        (OPENMPI | {"OMPI_COMM_WORLD_SIZE": "1"}, None),
    ],
)
def test_every_launcher_says_who_and_where_this_process_is(env, seat):
    assert find_seat(env) == seat


def test_mpi_is_not_asked_if_nobody_wants_it():
    assert find_seat(OPENMPI, mpi=False) is None
    assert find_seat(SLURM | OPENMPI, mpi=False) == Seat(5, 8, 1, "head", 29500 + 711)


def test_a_port_that_is_given_is_taken():
    assert find_seat(SLURM, port=1000) == Seat(5, 8, 1, "gpu07", 1000)


@pytest.mark.usefixtures("no_launcher")
@pytest.mark.parametrize(
    ("env", "said"),
    [
        ({"RANK": "0"}, "RANK is set, but not WORLD_SIZE and MASTER_ADDR"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "RANK is set, but not MASTER_ADDR"),
        ({"WORLD_SIZE": "2", "MASTER_ADDR": "head"}, "WORLD_SIZE is set, but not RANK"),
        (TORCHRUN | {"RANK": "4"}, "rank 4 is not one of 4 ranks"),
        (TORCHRUN | {"RANK": "-1"}, "rank -1 is not one of 4 ranks"),
        (TORCHRUN | {"WORLD_SIZE": "four"}, 'WORLD_SIZE is "four", which is no integer'),
        ({name: SLURM[name] for name in SLURM if name != "SLURM_STEP_ID"}, "srun has not started this process"),
        ({name: SLURM[name] for name in SLURM if name != "SLURM_NODELIST"}, "does not name its nodes"),
        ({name: OPENMPI[name] for name in OPENMPI if name != "MASTER_ADDR"}, "on which node rank 0 is"),
        ({"OMPI_COMM_WORLD_RANK": "0"}, "OMPI_COMM_WORLD_SIZE is not set"),
    ],
)
def test_half_an_environment_is_one_clear_error(env, said, monkeypatch):
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match=said) as caught:
        comm.init_distributed()
    assert caught.value.fix
    assert not comm.is_initialized()


@pytest.mark.usefixtures("no_launcher")
def test_a_plain_script_is_a_group_of_one_that_opens_no_port():
    before = dict(os.environ)
    comm.init_distributed()
    assert (comm.get_rank(), comm.get_world_size(), comm.get_local_rank()) == (0, 1, 0)
    total = torch.tensor([3.0])
    comm.all_reduce(total, op=comm.ReduceOp.SUM)
    comm.barrier()
    assert total.item() == 3.0
    assert dict(os.environ) == before


@pytest.mark.usefixtures("no_launcher")
@pytest.mark.parametrize("minutes", [None, "7"])
def test_ranks_wait_half_an_hour_unless_told(minutes, monkeypatch):
    if minutes:
        monkeypatch.setenv("DEEPSPEED_TIMEOUT", minutes)
    comm.init_distributed(dist_backend="gloo")
    assert timeout_of_group() == timedelta(minutes=int(minutes or 30))


@pytest.mark.usefixtures("no_launcher")
def test_a_timeout_that_is_given_counts():
    comm.init_distributed(timeout=timedelta(seconds=41))
    assert timeout_of_group() == timedelta(seconds=41)


def timeout_of_group() -> timedelta:
    group = comm.distributed_c10d._get_default_group()
    return group._get_backend(torch.device("cpu")).options._timeout


@pytest.mark.usefixtures("no_launcher")
@pytest.mark.parametrize("name", ["nonsense", "cpu:nonsense,cuda:nccl", "", "mpi"])
def test_an_unknown_backend_is_refused_before_anybody_waits(name):
    with pytest.raises(UsageError, match="has no backend"):
        comm.init_distributed(dist_backend=name)
    assert not comm.is_initialized()


@pytest.mark.usefixtures("no_launcher")
def test_a_script_that_asks_for_nccl_on_cpus_is_told_so(monkeypatch):
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    with pytest.raises(UsageError, match='no backend "nccl"'):
        comm.init_distributed("nccl")


@pytest.mark.usefixtures("no_launcher")
def test_a_group_that_should_be_there_and_is_not_is_an_error():
    with pytest.raises(UsageError, match="there is none"):
        comm.init_distributed(dist_init_required=False)


@pytest.mark.usefixtures("no_launcher")
def test_a_meeting_place_needs_a_rank(tmp_path):
    with pytest.raises(UsageError, match="nobody says which"):
        comm.init_distributed(init_method=f"file://{tmp_path}/store")
    with pytest.raises(UsageError, match="rank 1 is not one of 1"):
        comm.init_distributed(init_method=f"file://{tmp_path}/store", rank=1, world_size=1)


def start_again():
    before = comm.distributed_c10d._get_default_group()
    comm.init_distributed(dist_backend="nonsense", dist_init_required=True)
    comm.init_distributed(dist_init_required=False)
    return comm.distributed_c10d._get_default_group() is before, comm.get_world_size()


def test_a_group_that_is_there_already_stays(two):
    assert two.run(start_again) == [(True, 2), (True, 2)]


def test_comm_is_torch_distributed_with_our_own_names_first():
    assert comm.ReduceOp is torch.distributed.ReduceOp
    assert comm.all_gather_into_tensor is torch.distributed.all_gather_into_tensor
    assert comm.Group.__module__ == "naught.comm.group"
    assert isinstance(comm.log_summary(), str)
    for name in ("nonsense", "_broadcast_coalesced"):
        with pytest.raises(AttributeError, match=f"'naught.comm' has no attribute '{name}'"):
            getattr(comm, name)


SCRIPT = """
import json, os, torch
import naught.comm as dist
dist.init_distributed({arguments})
total = torch.tensor([float(dist.get_rank() + 1)])
dist.all_reduce(total, op=dist.ReduceOp.SUM)
assert {then}
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
said = [os.environ.get(name) for name in names]
print(json.dumps([dist.get_rank(), dist.get_world_size(), dist.get_local_rank(), total.item(), said]))
dist.barrier()
dist.destroy_process_group()
"""


def run_ranks(environments: list[dict[str, str]], arguments: list[str], then: str = "True") -> list[list[object]]:
    """What each process says of itself; all run at once."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHERS)}
    clean |= {"GLOO_SOCKET_IFNAME": "lo", "DS_ACCELERATOR": "cpu", "PYTHONPATH": str(ROOT)}
    running = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT.format(arguments=given, then=then)],
            env=clean | env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for env, given in zip(environments, arguments, strict=True)
    ]
    try:
        answers = [process.communicate(timeout=90) for process in running]
    finally:
        for process in running:
            process.kill()
    for process, (_, complaint) in zip(running, answers, strict=True):
        assert process.returncode == 0, complaint
    return [json.loads(said) for said, _ in answers]


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


@pytest.mark.parametrize("launcher", ["torchrun", "slurm", "openmpi"])
def test_two_processes_meet_under_every_launcher(launcher):
    port = free_port()
    shared = {
        "torchrun": {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"},
        "slurm": {"SLURM_NTASKS": "2", "SLURM_STEP_ID": "0", "SLURM_NODELIST": "localhost,elsewhere[1-2]"},
        "openmpi": {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"},
    }[launcher]
    own = {
        "torchrun": ("RANK", "LOCAL_RANK"),
        "slurm": ("SLURM_PROCID", "SLURM_LOCALID"),
        "openmpi": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"),
    }[launcher]
    address = "localhost" if launcher == "slurm" else "127.0.0.1"
    environments = [shared | dict.fromkeys(own, str(rank)) | {"MASTER_PORT": port} for rank in range(2)]
    answers = run_ranks(environments, ["", "dist_init_required=True"])
    assert answers == [[rank, 2, rank, 3.0, [str(rank), "2", str(rank), address, port]] for rank in range(2)]


def test_ranks_that_are_given_by_hand_meet_where_they_are_told(tmp_path):
    given = [f'"gloo", init_method="file://{tmp_path}/store", rank={rank}, world_size=2' for rank in range(2)]
    answers = run_ranks([{}, {}], given)
    assert answers == [[rank, 2, rank, 3.0, [str(rank), "2", str(rank), None, None]] for rank in range(2)]


@pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs an accelerator")
@pytest.mark.parametrize("local_rank", ["0", "5"])  # a launcher may show a process only its own device, and number it 5
def test_a_process_takes_the_device_of_its_local_rank(local_rank):
    device = torch.accelerator.current_accelerator().type
    env = TORCHRUN | {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    env |= {"LOCAL_RANK": local_rank, "DS_ACCELERATOR": device, "CUDA_VISIBLE_DEVICES": "0"}
    then = f'dist.get_backend_config() == "cpu:gloo,{device}:nccl" and torch.accelerator.current_device_index() == 0'
    assert run_ranks([env], [""], then)[0][:3] == [0, 1, int(local_rank)]


# --- where rank 0 listens -------------------------------------------------------------------------------------------------


def test_an_address_that_is_not_this_machines_is_told():
    with pytest.raises(UsageError, match=r"rank 0 cannot listen at 192\.0\.2\.7:29511: .* an address of the machine"):
        meeting_store(Seat(0, 2, 0, "192.0.2.7", 29511), timedelta(seconds=1))


def test_a_port_that_is_taken_is_told():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UsageError, match="a port that nobody uses"):
            meeting_store(Seat(0, 2, 0, "127.0.0.1", port), timedelta(seconds=1))


def test_a_name_that_leads_back_to_its_own_machine_cannot_be_where_several_meet(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [(socket.AF_INET, 1, 6, "", ("127.0.1.1", 29512))])
    with pytest.raises(UsageError, match=r"node1 is 127\.0\.1\.1 on its own machine"):
        meeting_store(Seat(0, 4, 0, "node1", 29512), timedelta(seconds=1))


def test_torchruns_own_store_is_used(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    assert meeting_store(Seat(0, 2, 0, "127.0.0.1", 1), timedelta(seconds=1)) is None


def test_interfaces_that_a_user_has_named_stay(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "mine")
    monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)
    stay_on_this_machine(Seat(0, 2, 0, "10.0.0.1", 1))
    assert "NCCL_SOCKET_IFNAME" not in os.environ
    stay_on_this_machine(Seat(0, 2, 0, "127.0.0.1", 1))
    assert (os.environ["GLOO_SOCKET_IFNAME"], os.environ["NCCL_SOCKET_IFNAME"]) == ("mine", "lo")
    monkeypatch.delenv("NCCL_SOCKET_IFNAME")
