"""DeepSpeed's estimators answer with the planner's bytes, and with the papers' where nothing is padded."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from naught import needs
from naught.errors import UsageError
from naught.estimate import Category, forecast
from naught.formulas import recipe, state_bytes
from naught.job import ActivationBytes, Job
from naught.machine import Machine
from naught.modules import model_of
from naught.needs import (
    estimate_zero2_model_states_mem_needs as zero2,
)
from naught.needs import (
    estimate_zero3_model_states_mem_needs as zero3,
)
from naught.placement import PLACEMENTS, Tier
from naught.quantity import show_bytes
from naught.sizes import PlacedRun

BILLION = 2**30  # a number that no padding changes
LAYER = 2**20


def test_stage_2_is_what_the_zero_paper_says():
    device = state_bytes(BILLION, PLACEMENTS["stage2"], 16, recipe())
    assert zero2(BILLION, num_gpus_per_node=8, num_nodes=2, cpu_offload=False) == (0, device)
    offloaded = zero2(BILLION, num_gpus_per_node=8, num_nodes=2)
    assert offloaded.gpu_bytes == 2 * BILLION  # the 16-bit weights
    assert offloaded.cpu_bytes == (4 + 4 + 8) * BILLION // 2  # 32-bit gradients, masters and moments of half the ranks


def test_stage_3_is_what_the_zero_paper_says_and_a_layer():
    held = zero3(BILLION, LAYER, num_gpus_per_node=8, num_nodes=2, cpu_offload=False)
    assert held.largest_layer_bytes == (2 + 2) * LAYER  # its weights and its gradients
    assert held.gpu_bytes == state_bytes(BILLION, PLACEMENTS["stage3"], 16, recipe()) + held.largest_layer_bytes
    assert held.cpu_bytes == 0


def test_the_largest_layer_counts_and_every_parameter():
    uneven = zero3(10 * LAYER + LAYER // 2, LAYER, cpu_offload=False)
    assert uneven == (0, 16 * (10 * LAYER + LAYER // 2) + 2 * LAYER, 2 * LAYER)  # a rank alone keeps no weights twice


def test_offloading_moves_states_from_the_gpus_to_the_hosts():
    cpu, gpu, layer = zero3(BILLION, LAYER, 8, 2, cpu_offload=True, cpu_offload_params=False)
    assert (cpu, gpu - layer) == (16 * BILLION // 2, 2 * BILLION // 16)
    cpu, gpu, layer = zero3(BILLION, LAYER, 8, 2)
    assert (cpu, gpu) == (16 * BILLION // 2, layer)  # weights are made of their masters


def test_parameters_stay_with_the_optimizer():
    assert zero3(BILLION, LAYER, cpu_offload=False) == zero3(BILLION, LAYER, cpu_offload=False, cpu_offload_params=False)


def test_without_zero_init_every_process_builds_the_model():
    cpu, gpu, _ = zero3(BILLION, LAYER, 8, cpu_offload=False, zero_init=False)
    assert cpu == 8 * 4 * BILLION
    assert gpu == zero3(BILLION, LAYER, 8, cpu_offload=False).gpu_bytes
    assert zero3(BILLION, LAYER, 1, zero_init=False) == zero3(BILLION, LAYER, 1)  # the states are more


def test_only_a_factor_that_is_given_changes_the_host():
    plain = zero3(BILLION, LAYER)
    assert zero3(BILLION, LAYER, additional_buffer_factor=1.5) == plain
    assert zero3(BILLION, LAYER, additional_buffer_factor=2) == plain._replace(cpu_bytes=2 * plain.cpu_bytes)
    assert zero2(BILLION, additional_buffer_factor=1.25).cpu_bytes == zero2(BILLION).cpu_bytes * 1.25


def test_counts_may_be_floats_as_people_write_them():
    assert zero2(7e9) == zero2(7_000_000_000)
    assert zero3(7e9, 2e8) == zero3(7_000_000_000, 200_000_000)


@pytest.mark.parametrize(
    "ask",
    [
        lambda: zero2(0),
        lambda: zero3(10, 11),
        lambda: zero3(10, 0),
        lambda: zero2(10, num_gpus_per_node=0),
        lambda: needs.estimate_zero3_model_states_mem_needs_all_cold(10, 5, num_nodes=-1),
        lambda: needs.estimate_zero2_model_states_mem_needs_all_live("a path"),
    ],
)
def test_questions_that_cannot_be_meant_are_refused(ask):
    with pytest.raises(UsageError):
        ask()


def blocks(frozen: bool = False) -> nn.Module:
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Sequential(nn.Linear(512, 2048), nn.Linear(2048, 512)) for _ in range(6)))
    return model.requires_grad_(not frozen)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("name", ["stage3", "stage3-offload", "infinity-host"])
def test_a_models_table_has_the_forecasts_states(name, frozen, capsys):
    model = blocks(frozen)
    placed = [PlacedRun(run, PLACEMENTS[name]) for run in model_of(model).runs]
    machine = Machine(ranks=8, ranks_per_node=4)
    planned = forecast(name, placed, ActivationBytes(0, 0, 0, "none"), machine, Job())
    text = needs.estimate_zero3_model_states_mem_needs_all_live(model, num_gpus_per_node=4, num_nodes=2)
    assert capsys.readouterr().out == text + "\n"
    param, optim = (PLACEMENTS[name].of(kind).tier is Tier.HOST for kind in ("param", "optim"))
    row = row_of(text, f"offload_optimizer={'cpu ' if optim else 'none'} offload_param={'cpu ' if param else 'none'} zero_init=1")
    assert row[0] == show_bytes(4 * planned.total(Tier.HOST))
    states = sum(planned.memory[Tier.DEVICE][kind] for kind in (Category.PARAMETERS, Category.GRADIENTS, Category.OPTIMIZER))
    largest = max(run.numel for run in model_of(model).runs)
    weights = zero3(6 * largest, largest, 4, 2).largest_layer_bytes // 2
    assert row[1] == show_bytes(states + (weights if frozen else 2 * weights))


class Tied(nn.Module):
    """Blocks between an embedding and a head that share their weights, which are in use all along."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(4096, 512)
        self.blocks = nn.ModuleList(nn.Linear(512, 512, bias=False) for _ in range(8))
        self.head = nn.Linear(512, 4096, bias=False)
        self.head.weight = self.embedding.weight


def test_what_is_in_use_all_along_is_held_beside_the_largest_layer(capsys):
    text = needs.estimate_zero3_model_states_mem_needs_all_live(Tied())
    assert "4.19M parameters" in text  # the tied ones once
    _, device = row_of(text, "offload_optimizer=cpu  offload_param=cpu  zero_init=1")
    assert device == show_bytes(4 * (4096 * 512 + 512 * 512))
    assert capsys.readouterr().out == text + "\n"


def row_of(text: str, options: str) -> tuple[str, str]:
    """The two sizes behind these options."""
    line = next(line for line in text.splitlines() if line.startswith(options))
    words = line.removeprefix(options).split()
    return f"{words[0]} {words[1]}", f"{words[2]} {words[3]}"


def test_a_frozen_model_has_no_states_in_stage_2(capsys):
    text = needs.estimate_zero2_model_states_mem_needs_all_live(blocks(frozen=True), 2)
    weights = show_bytes(2 * 6 * 2 * (512 * 2048 + 1280))
    assert row_of(text, "offload_optimizer=none") == ("0 B", weights)
    assert row_of(text, "offload_optimizer=cpu") == ("0 B", weights)
    assert capsys.readouterr().out == text + "\n"


def test_cold_tables_show_every_choice(capsys):
    text = needs.estimate_zero2_model_states_mem_needs_all_cold(10**9, 8)
    assert "1.00B parameters in stage 2, 1 node of 8 GPUs" in text
    assert row_of(text, "offload_optimizer=cpu") == ("16.0 GB", "2.00 GB")
    assert row_of(text, "offload_optimizer=none") == ("0 B", "3.75 GB")
    text = needs.estimate_zero3_model_states_mem_needs_all_cold(10**9, 10**7, 8, 2)
    assert "in stage 3, 2 nodes of 8 GPUs" in text
    assert len(text.splitlines()) == 3 + 6
    assert row_of(text, "offload_optimizer=cpu  offload_param=cpu  zero_init=1") == ("8.00 GB", "40.0 MB")
    assert row_of(text, "offload_optimizer=none offload_param=none zero_init=0") == ("32.0 GB", "1.04 GB")
    assert capsys.readouterr().out.count("each GPU") == 2
