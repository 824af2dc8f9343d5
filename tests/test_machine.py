"""Machines: what a driver calls a GPU is recognised, and what a node shares is shared."""

from __future__ import annotations

from dataclasses import replace

import pytest

from naught.errors import UsageError
from naught.machine import GPUS, Machine, detect, device_here, parse_gpu, recognise
from naught.measured import keep
from naught.placement import Tier


@pytest.mark.parametrize(
    ("name", "gpu"),
    [
        ("NVIDIA A100-SXM4-80GB", "a100-40gb"),
        ("NVIDIA A10", "a10"),
        ("NVIDIA A10G", "a100-80gb"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("Tesla V100-SXM2-32GB", "v100"),
        ("Tesla T4", "t4"),
        ("NVIDIA T400 4GB", "a100-80gb"),
        ("NVIDIA L4", "l4"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("NVIDIA RTX A1000", "a100-80gb"),
    ],
)
def test_gpus_are_recognised_by_whole_words(name, gpu):
    assert recognise(name) == GPUS[gpu]


@pytest.fixture
def driver(tmp_path, monkeypatch):
    """A driver's tool that reports eight GPUs: a real program on the path, as the real one is."""
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\nfor i in 1 2 3 4 5 6 7 8; do echo 'NVIDIA A100-SXM4-80GB, 81920'; done\n", encoding="utf-8")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.mark.usefixtures("driver")
def test_the_present_machine_is_what_the_driver_says():
    machine, found = detect()
    assert (machine.ranks, machine.gpu.memory_bytes, machine.gpu.flops) == (8, 81920 * 2**20, 200e12)
    assert found == "this machine: 8 x NVIDIA A100-SXM4-80GB"


@pytest.mark.usefixtures("driver")
def test_hidden_gpus_are_not_planned_with(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,5")
    assert detect()[0].ranks == 2
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert detect()[0].unified


def test_a_driver_that_does_not_answer_is_none(tmp_path, monkeypatch):
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\nexit 9\n", encoding="utf-8")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert detect()[0].unified


@pytest.mark.usefixtures("driver")
def test_what_was_measured_goes_before_what_a_name_suggests(tmp_path, monkeypatch):
    monkeypatch.setenv("NAUGHT_CACHE", str(tmp_path))
    guessed = detect()[0]
    keep({"collective_bytes_s": 9e9, "update_numel_s": 3e9, "disk_bytes_s": 2e9}, device_here(), today="2026-11-15")
    machine, found = detect()
    assert found == "this machine: 8 x NVIDIA A100-SXM4-80GB; collectives, AdamW and disk as measured on 2026-11-15"
    assert (machine.collective_bytes_s, machine.update_numel_s, machine.disk_bytes_s) == (9e9, 3e9, 2e9)
    assert (machine.gpu.flops, machine.link_bytes_s) == (guessed.gpu.flops, guessed.link_bytes_s)
    keep({"link_bytes_s": 5e9, "flops": 1e14}, device_here(), today="2026-11-16")
    machine, found = detect()
    assert found.endswith("; collectives, AdamW and disk as measured on 2026-11-15, host link and arithmetic on 2026-11-16")
    assert (machine.gpu.flops, machine.link_bytes_s) == (1e14, 5e9)


@pytest.mark.usefixtures("driver")
def test_what_was_measured_within_a_node_does_not_speed_up_its_network(tmp_path, monkeypatch):
    monkeypatch.setenv("NAUGHT_CACHE", str(tmp_path))
    keep({"collective_bytes_s": 300e9}, device_here())
    machine = detect()[0]
    assert machine.collective_bytes_s == 300e9
    assert replace(machine, ranks=16).collective_bytes_s == 25e9


@pytest.mark.usefixtures("driver")
def test_figures_of_a_gpu_are_not_those_of_the_cores_beside_it(tmp_path, monkeypatch):
    monkeypatch.setenv("NAUGHT_CACHE", str(tmp_path))
    keep({"flops": 1e14}, device_here())
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    machine, found = detect()
    assert machine.gpu.flops != 1e14
    assert "measured" not in found


def test_ranks_share_their_node():
    machine = Machine(ranks=32, ranks_per_node=16, gpu=GPUS["v100"], host_bytes=16 * 10**11, disk_bytes=16 * 10**12)
    assert machine.capacity(Tier.HOST) == int(10**11 * 0.9)
    assert machine.capacity(Tier.DISK) == int(10**12 * 0.95)
    assert machine.capacity(Tier.DEVICE) == int(32e9 * 0.96)
    assert machine.link_bytes_s == 100e9 / 16
    assert machine.collective_bytes_s == 25e9, "between nodes"
    assert Machine(ranks=16, ranks_per_node=16, gpu=GPUS["v100"]).collective_bytes_s == GPUS["v100"].peer_bytes_s


def test_a_gpu_is_named_or_sized():
    assert parse_gpu("H100") == GPUS["h100"]
    assert parse_gpu("24GiB").memory_bytes == 24 * 2**30
    with pytest.raises(UsageError, match="no GPU"):
        parse_gpu("voodoo")
