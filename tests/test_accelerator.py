"""Scripts ask for the accelerator under DeepSpeed's names, and parse DeepSpeed's flags."""

from __future__ import annotations

import argparse
import copy
import os
import subprocess
import sys
import time

import pytest
import torch

from naught.accelerator import get_accelerator
from naught.arguments import add_config_arguments
from naught.errors import UsageError

HAS_ANOTHER = torch.accelerator.is_available()


@pytest.fixture
def cpu(monkeypatch):
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    return get_accelerator()


def test_it_is_one_object_and_what_torch_finds(monkeypatch):
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    accelerator = get_accelerator()
    assert accelerator is get_accelerator()
    assert accelerator.is_available()
    assert accelerator.device_name() == (str(torch.accelerator.current_accelerator()) if HAS_ANOTHER else "cpu")
    tensor = torch.ones(3, device=accelerator.current_device_name())
    assert accelerator.on_accelerator(tensor)
    assert accelerator.on_accelerator(torch.ones(3)) is not HAS_ANOTHER
    assert 0 <= accelerator.current_device() < accelerator.device_count()


def test_the_cpu_can_be_chosen(cpu):
    assert (cpu.device_name(), cpu.device_name(3), cpu.current_device_name()) == ("cpu", "cpu", "cpu")
    assert cpu.communication_backend_name() == "gloo"
    assert not cpu.on_accelerator(torch.ones(1, device="meta"))


@pytest.mark.parametrize("name", ["nonsense", "hpu", "CPU"])
def test_an_accelerator_that_is_not_here_is_refused(name, monkeypatch):
    monkeypatch.setenv("DS_ACCELERATOR", name)
    with pytest.raises(UsageError, match=f'no accelerator "{name}" here \\[DS_ACCELERATOR\\].*cpu'):
        get_accelerator()


def test_a_cpus_memory_is_that_of_the_process():
    in_a_process_of_its_own("""
before, peak_before = cpu.memory_allocated(), cpu.max_memory_allocated()
held = torch.ones(nbytes, dtype=torch.uint8)
assert cpu.memory_allocated(0) - before > 0.9 * nbytes
del held
assert cpu.max_memory_allocated() - peak_before > 0.9 * nbytes
cpu.empty_cache()
assert 0 < cpu.memory_reserved() <= cpu.available_memory() + cpu.memory_allocated()
assert nbytes < cpu.available_memory() < cpu.total_memory() == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
""")


def test_a_peak_is_counted_from_the_last_reset():
    in_a_process_of_its_own("""
torch.ones(nbytes, dtype=torch.uint8)
high = cpu.max_memory_allocated()
cpu.reset_peak_memory_stats()
assert high - cpu.max_memory_allocated() > 0.5 * nbytes
""")


def test_an_emptied_cache_gives_back_what_an_engine_has_glibc_keep():
    in_a_process_of_its_own("""
from naught.freed_pages import keep_freed_pages
keep_freed_pages(torch.device("cpu"))
held = torch.ones(nbytes, dtype=torch.uint8)
del held
kept = cpu.memory_allocated()
cpu.empty_cache()
assert kept - cpu.memory_allocated() > 0.9 * nbytes
""")


def in_a_process_of_its_own(code):
    """An engine that another test made has glibc keep what is let go of: there nothing becomes less, and then nothing more."""
    start = "import os, torch\nfrom naught.accelerator import get_accelerator\ncpu, nbytes = get_accelerator(), 256 * 2**20\n"
    subprocess.run([sys.executable, "-c", start + code], check=True, timeout=60, env=os.environ | {"DS_ACCELERATOR": "cpu"})


def test_seeds_are_torchs(cpu):
    draws = []
    for seed in (cpu.manual_seed, cpu.manual_seed_all):
        seed(11)
        draws.append(torch.rand(4))
    torch.manual_seed(11)
    assert torch.equal(draws[0], torch.rand(4))
    assert torch.equal(draws[0], draws[1])
    assert cpu.random() is torch.random
    state = cpu.get_rng_state()
    first = torch.rand(2)
    cpu.set_rng_state(state)
    assert torch.equal(first, torch.rand(2))


def test_streams_and_events_are_there_for_scripts_that_use_them(cpu):
    cpu.set_device(0)
    before, after = cpu.Event(enable_timing=True), cpu.Event(enable_timing=True)
    with cpu.stream(cpu.Stream()):
        before.record()
        time.sleep(0.01)
        after.record(cpu.current_stream())
    after.synchronize()
    assert after.query() and 10 <= before.elapsed_time(after) < 5000
    cpu.current_stream().wait_stream(cpu.Stream())
    cpu.range_push("a part")
    cpu.range_pop()
    cpu.synchronize()
    cpu.synchronize(0)


def test_types_to_train_in(cpu):
    types = cpu.supported_dtypes()
    assert types[0] is torch.float32
    assert cpu.is_bf16_supported() and torch.bfloat16 in types
    assert (torch.float16 in types) is cpu.is_fp16_supported()


def test_pinning_on_a_cpu_is_nothing(cpu):
    tensor = torch.ones(3)
    assert cpu.pin_memory(tensor) is tensor


def test_a_name_that_nobody_has_is_an_attribute_error(cpu):
    with pytest.raises(AttributeError, match="nonsense"):
        cpu.nonsense  # noqa: B018
    assert copy.deepcopy(cpu).device_name() == "cpu"


@pytest.mark.skipif(not HAS_ANOTHER, reason="needs an accelerator")
def test_another_device_answers_with_its_own_numbers(monkeypatch):
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    accelerator = get_accelerator()
    accelerator.set_device(0)
    name = accelerator.device_name(0)
    assert accelerator.current_device_name() == name
    accelerator.reset_peak_memory_stats()
    before = accelerator.memory_allocated()
    held = torch.ones(2**20, device=name)
    assert accelerator.memory_allocated(0) - before == held.nbytes
    assert accelerator.max_memory_allocated() >= before + held.nbytes
    assert 0 < accelerator.available_memory() < accelerator.total_memory(0)
    assert accelerator.pin_memory(torch.ones(3)).is_pinned()
    assert torch.float32 in accelerator.supported_dtypes()
    with accelerator.stream(accelerator.Stream()):
        accelerator.range_push("a part")
        held.add_(1)
        accelerator.range_pop()
    accelerator.synchronize()
    accelerator.manual_seed_all(3)


def test_flags_of_deepspeed_are_parsed():
    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", type=float)
    assert add_config_arguments(parser) is parser
    given = parser.parse_args(["--deepspeed", "--deepspeed_config", "ds.json", "--lr", "1"])
    assert vars(given) == {
        "lr": 1.0,
        "deepspeed": True,
        "deepspeed_config": "ds.json",
        "deepscale": False,
        "deepscale_config": None,
    }
    nothing = parser.parse_args([])
    assert (nothing.deepspeed, nothing.deepspeed_config) == (False, None)


def test_old_flags_are_taken_and_not_shown():
    parser = add_config_arguments(argparse.ArgumentParser())
    old = parser.parse_args(["--deepscale", "--deepscale_config", "old.json"])
    assert (old.deepscale, old.deepscale_config) == (True, "old.json")
    assert "--deepspeed_config" in parser.format_help()
    assert "deepscale" not in parser.format_help()
