"""What a machine does in a second is measured, kept for this host and device alone, and leaves nothing behind."""

from __future__ import annotations

import json
import logging
import mmap
import os

import pytest
import torch

from naught.cli import main
from naught.errors import StorageError, UsageError
from naught.machine import detect, device_here
from naught.measured import FIGURES, Measured, keep, recall, show_figure
from naught.measuring import disk
from naught.measuring.adam import adam_numel_s
from naught.measuring.comm import CommRate, Comms, comm_rates
from naught.measuring.disk import DiskRate, direct_alignment, disk_rate
from naught.measuring.link import LinkRate
from naught.measuring.ranks import ask_ranks
from naught.measuring.rounds import all_cores, median_round_s
from naught.measuring.step import step_rate

CPU = torch.device("cpu")


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # tests are of CPUs, also beside a GPU
    monkeypatch.setenv("NAUGHT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "machine.json"


# --- what is kept ------------------------------------------------------------------------------------------------------


def test_what_is_kept_is_recalled_and_added_to(cache):
    assert recall("NVIDIA H200") == Measured(recall("NVIDIA H200").host, "NVIDIA H200")
    keep({"disk_bytes_s": 3e9}, "NVIDIA H200", today="2026-11-14")
    said = keep({"flops": 5e14, "update_numel_s": 4e9}, "NVIDIA H200", today="2026-11-15")
    found = recall("NVIDIA H200")
    assert (found.disk_bytes_s, found.flops, found.update_numel_s, found.link_bytes_s) == (3e9, 5e14, 4e9, None)
    assert found.dates == {"disk_bytes_s": "2026-11-14", "flops": "2026-11-15", "update_numel_s": "2026-11-15"}
    assert found.when() == "AdamW and arithmetic as measured on 2026-11-15, disk on 2026-11-14"
    assert [path.name for path in cache.parent.iterdir()] == ["machine.json"]
    assert said == '"$NAUGHT_CACHE/machine.json"'


def test_figures_of_another_host_or_device_are_not_used(cache, monkeypatch):
    keep({"disk_bytes_s": 3e9}, "NVIDIA H200")
    assert recall("NVIDIA A10").disk_bytes_s is None
    monkeypatch.setattr("socket.gethostname", lambda: "elsewhere")
    assert recall("NVIDIA H200").disk_bytes_s is None
    keep({"flops": 1e12}, "NVIDIA H200")
    assert json.loads(cache.read_text(encoding="utf-8"))["disk_bytes_s"] is None, "another host's must not become this one's"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "[" * 100_000,
        '{"host": 3}',
        '{"host": "HOST", "device": "d"}',
        '{"host": "HOST", "device": "d", "flops": 1e12, "dates": {}}',
        '{"host": "HOST", "device": "d", "flops": -1, "dates": {"flops": "2026-11-15"}}',
        '{"host": "HOST", "device": "d", "flops": NaN, "dates": {"flops": "2026-11-15"}}',
        '{"host": "HOST", "device": "d", "flops": true, "dates": {"flops": "2026-11-15"}}',
        '{"host": "HOST", "device": "d", "flops": "fast", "dates": {"flops": "2026-11-15"}}',
        '{"host": "HOST", "device": "d", "flops": 1e12, "dates": {"flops": "yesterday"}}',
        '{"host": "HOST", "device": "d", "flops": 1e12, "dates": {"flops": 7}}',
        '{"host": "HOST", "device": "d", "flops": 1' + "0" * 400 + ', "dates": {"flops": "2026-11-15"}}',
    ],
)
def test_a_damaged_file_is_ignored_and_told_once(cache, caplog, text):
    cache.parent.mkdir()
    cache.write_text(text.replace("HOST", recall("d").host), encoding="utf-8")
    with caplog.at_level(logging.WARNING, "naught"):
        assert recall("d").dates == {}
    [record] = caplog.records
    assert 'remove it with: rm "$NAUGHT_CACHE/machine.json"' in record.getMessage()
    assert len(record.getMessage().splitlines()) == 1


def test_bytes_that_are_no_text_are_damage_too(cache, caplog):
    cache.parent.mkdir()
    cache.write_bytes(b"\xff\xfe{}")
    assert recall("d").dates == {}
    assert "is not used" in caplog.text


def test_no_place_for_figures_is_an_error_only_where_some_are_to_be_kept(tmp_path, monkeypatch, caplog):
    (tmp_path / "file").touch()
    monkeypatch.setenv("NAUGHT_CACHE", str(tmp_path / "file"))
    assert recall("d").dates == {}
    assert not caplog.records
    with pytest.raises(StorageError, match="cannot keep what was measured") as caught:
        keep({"flops": 1e12}, "d")
    assert "--no-store" in caught.value.fix


def test_the_path_is_told_without_the_users_name(monkeypatch, tmp_path):
    monkeypatch.delenv("NAUGHT_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "somebody"))
    assert keep({"flops": 1e12}, "d") == "~/.cache/naught/machine.json"
    assert recall("d").flops == 1e12


def test_figures_have_units():
    assert show_figure("flops", 5e14) == "500 TFLOP/s"
    assert show_figure("flops", 1.4e11) == "140 GFLOP/s"
    assert show_figure("update_numel_s", 4e9) == "4.00B elements/s"
    assert show_figure("disk_bytes_s", 3.5e9) == "3.50 GB/s"


# --- ranks -------------------------------------------------------------------------------------------------------------


def test_ranks_say_what_they_print_whatever_launcher_started_this_process(monkeypatch):
    for name, value in {"TORCHELASTIC_USE_AGENT_STORE": "True", "RANK": "7", "WORLD_SIZE": "9", "MASTER_ADDR": "far"}.items():
        monkeypatch.setenv(name, value)
    found = comm_rates(2, budget_s=0.1)
    assert (found.device, found.ranks) == ("cpu", 2)
    assert [rate.collective for rate in found.rates] == ["all-gather", "reduce-scatter"] * 3
    for rate in found.rates:
        assert rate.sent_bytes == rate.flat_bytes // 2
        assert rate.bytes_s > 0
    assert found.bytes_s > 0


def test_a_rank_that_fails_ends_the_others_and_has_the_last_word():
    with pytest.raises(UsageError, match="ended with status 1: ValueError: could not convert string to float: 'soon'"):
        ask_ranks("naught.measuring.comm", ["soon"], nproc=2, env={"DS_ACCELERATOR": "cpu"})


def test_ranks_that_take_too_long_are_ended():
    with pytest.raises(UsageError, match="rank 0 of 2 has not ended within 0 s"):
        ask_ranks("naught.measuring.comm", nproc=2, env={"DS_ACCELERATOR": "cpu"}, patience_s=0)


def test_one_rank_has_nobody_to_send_to():
    with pytest.raises(UsageError, match="nobody to send to"):
        comm_rates(1)


def test_the_figure_of_collectives_is_for_as_much_of_either_in_the_largest_flats():
    small, gather, reduce = CommRate("all-gather", 8, 4, 9.0), CommRate("all-gather", 80, 40, 1.0), CommRate("r", 80, 40, 3.0)
    assert Comms("cpu", 2, (small, gather, reduce)).bytes_s == 20.0
    assert LinkRate(10.0, 30.0).bytes_s == DiskRate(10.0, 30.0, 1, None).bytes_s == 15.0


# --- cores and disks ---------------------------------------------------------------------------------------------------


def test_rounds_are_counted_after_the_first():
    done = []
    assert median_round_s(lambda: done.append(1), CPU, budget_s=0.0) >= 0
    assert len(done) == 4


def test_all_cores_are_used_and_given_back():
    before = torch.get_num_threads()
    with all_cores() as cores:
        assert torch.get_num_threads() == cores == len(os.sched_getaffinity(0))
    assert torch.get_num_threads() == before


def test_steps_and_updates_have_a_speed():
    assert adam_numel_s(CPU, numel=2**16, budget_s=0.01) > 0
    found = step_rate(CPU, budget_s=0.01)
    assert found.step_flops > 0
    assert found.product_flops > 0
    # Two blocks of 12 width^2, and their norms: as the planner's shapes count them.
    assert found.numel == 2 * (12 * 512**2 + 4 * 512)
    assert (found.dtype, found.tokens) == ("float32", 512)


@pytest.mark.parametrize("direct", [True, False], ids=["as it is", "without O_DIRECT"])
def test_a_disk_is_measured_within_bounds_and_left_as_it_was(tmp_path, monkeypatch, direct):
    if not direct:
        monkeypatch.setattr(disk, "direct_alignment", lambda _: None)
    found = disk_rate(tmp_path, most_bytes=2**26, budget_s=1.0)
    assert 2**24 <= found.nbytes <= 2**26
    assert found.write_bytes_s > 0
    assert found.read_bytes_s > 0
    assert found.alignment == (direct_alignment(tmp_path) if direct else None)
    assert list(tmp_path.iterdir()) == []


def test_o_direct_takes_what_is_aligned_as_it_says(tmp_path):
    alignment = direct_alignment(tmp_path)
    if alignment is None:
        pytest.skip("this file system has no O_DIRECT")
    handle = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT | os.O_DIRECT)
    try:
        with mmap.mmap(-1, 4 * alignment) as room:
            assert os.pwritev(handle, [room], 3 * alignment) == 4 * alignment
    finally:
        os.close(handle)


def test_a_folder_that_is_not_there_is_the_users_mistake(tmp_path):
    with pytest.raises(StorageError, match="cannot measure the disk") as caught:
        disk_rate(tmp_path / "missing")
    assert "--folder" in caught.value.fix


def test_a_disk_without_room_is_not_filled(tmp_path):
    with pytest.raises(StorageError, match="too little room"):
        disk_rate(tmp_path, most_bytes=2**20)
    assert list(tmp_path.iterdir()) == []


# --- the command -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "figure", "words"),
    [
        (["adam"], "update_numel_s", "fused AdamW"),
        (["disk", "--folder", "FOLDER"], "disk_bytes_s", "write and sync"),
        (["step"], "flops", "forward and backward"),
        (["comm"], "collective_bytes_s", "reduce-scatter"),
    ],
)
def test_bench_prints_a_table_and_the_planner_goes_by_it(cache, tmp_path, capsys, arguments, figure, words):
    given = [str(tmp_path) if word == "FOLDER" else word for word in arguments]
    assert main(["bench", *given]) == 0
    said = capsys.readouterr().out
    assert words in said
    assert f"for the planner: {FIGURES[figure]} {show_figure(figure, getattr(recall(device_here()), figure))}" in said
    assert f"{FIGURES[figure]} as measured on" in detect()[1]
    assert cache.exists()


def test_bench_as_data_that_is_not_kept(cache, tmp_path, capsys):
    assert main(["bench", "disk", "--folder", str(tmp_path), "--json", "--no-store"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert set(data) == {"figures", "measured", "notes", "kept"}
    assert data["figures"]["disk_bytes_s"] > 0
    assert data["measured"][0]["nbytes"] > 0
    assert data["kept"] is False
    assert not cache.exists()
