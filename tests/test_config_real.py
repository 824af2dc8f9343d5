"""Real configurations load, in every form in which callers pass them, and say what becomes of each key."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import numpy as np
import pytest
from real_configs import REAL

from naught.config import Config, Effect, check, fill, load, placement_of, to_document
from naught.errors import ConfigError
from naught.placement import PLACEMENTS, Tier


def test_there_are_at_least_forty():
    assert len(REAL) >= 40


@pytest.mark.parametrize("name", REAL)
def test_a_real_configuration_loads_in_all_its_forms(name, tmp_path):
    text = REAL[name]
    config = load(text)
    assert isinstance(config, Config)
    path = tmp_path / "ds.json"
    path.write_text(text, encoding="utf-8")
    encoded = base64.urlsafe_b64encode(text.encode()).decode()
    forms = [path, str(path), text.encode(), to_document(config)]
    if text.startswith("{"):  # base64 is made by programs, and they write plain objects
        forms.append(encoded)
    for form in forms:
        assert load(form) == config
        assert load(form).auto == config.auto


@pytest.mark.parametrize("name", REAL)
def test_every_key_of_a_real_configuration_is_accounted_for(name):
    report = check(REAL[name])
    assert not report.problems
    assert all(note.effect is not Effect.REFUSED and note.detail for note in report.notes)


def test_the_object_is_frozen_all_the_way_down():
    config = load(REAL["hugging face stage 3"])
    with pytest.raises(Exception, match="frozen"):
        config.train_batch_size = 3
    with pytest.raises(Exception, match="frozen"):
        config.zero_optimization.stage = 1
    assert isinstance(config.optimizer.params.betas, tuple)
    hash(config)


def test_values_arrive_typed():
    config = load(REAL["hugging face stage 2"])
    zero = config.zero_optimization
    assert (zero.stage, zero.reduce_bucket_size, type(zero.reduce_bucket_size)) == (2, 200_000_000, int)
    assert zero.offload_optimizer.device == "cpu"
    assert config.optimizer.type == "AdamW"
    assert load(REAL["warm-up and cosine"]).optimizer.type == "AdamW", "the type may be written in any case"
    assert load(REAL["accelerate as it hands over"]).steps_per_print is None
    assert load(REAL["gradient arithmetic"]).communication_data_type == "bf16"


def test_old_names_mean_the_new_ones():
    zero = load(REAL["old spelling of saving"]).zero_optimization
    assert zero.stage3_gather_16bit_weights_on_model_save
    assert (zero.offload_optimizer.device, zero.offload_param.device) == ("cpu", "cpu")
    assert load(REAL["very old zero"]).zero_optimization.stage == 1
    assert load(REAL["bfloat16 under its old name"]).bf16.enabled
    bare = load(REAL["fine-tuning stage 3 with bare names"]).zero_optimization
    assert (bare.stage3_max_live_parameters, bare.sub_group_size) == (0, 0)


def test_mappings_may_hold_what_scripts_put_into_them():
    config = load({"train_batch_size": np.int64(8), "zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": Path("/d")}},
                   "optimizer": {"type": "Adam", "params": {"betas": (0.9, 0.95), "lr": np.float32(0.5)}}})  # fmt: skip
    assert config.train_batch_size == 8
    assert config.zero_optimization.offload_param.nvme_path == "/d"
    assert config.optimizer.params.betas == (0.9, 0.95)


def test_auto_parses_and_is_filled_by_whoever_starts_the_run():
    config = load(REAL["hugging face stage 3"])
    assert "train_batch_size" in config.auto
    assert "optimizer.params.lr" in config.auto
    assert "zero_optimization.reduce_bucket_size" in config.auto
    filled = fill(config, {"train_batch_size": 64, "optimizer.params.lr": 1e-4, "steps_per_print": 7})
    assert (filled.train_batch_size, filled.optimizer.params.lr) == (64, 1e-4)
    assert filled.auto == config.auto - {"train_batch_size", "optimizer.params.lr"}
    assert filled.steps_per_print == 2000, "only what is auto may be filled"
    with pytest.raises(ConfigError, match=r"optimizer\.params\.lr: must be a finite number from 0, is -1"):
        fill(config, {"optimizer.params.lr": -1})


def test_auto_contradicts_nothing():
    for low, high in ((1.0, "auto"), ("auto", 1e-9)):
        assert load({"scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": low, "warmup_max_lr": high}}}).auto
    assert load({"zero_optimization": {"stage": "auto", "offload_param": {"device": "cpu"}}}).auto


def test_auto_is_a_value_of_its_own_where_the_schema_says_so():
    config = load({"data_types": {"keep_in_fp32_modules": "auto"}})
    assert config.data_types.keep_in_fp32_modules == "auto"
    assert not config.auto


@pytest.mark.parametrize(
    ("document", "name"),
    [
        ({"zero_optimization": {"stage": stage}}, f"stage{stage}") for stage in range(4)
    ] + [
        ({"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}}}, "stage1-offload"),
        ({"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}, "stage2-offload"),
        ({"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}}, "stage3-offload"),
        ({"zero_optimization": {"stage": 3, "cpu_offload": True, "cpu_offload_param": True}}, "infinity-host"),
        ({"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "/d"}, "offload_param": {"device": "nvme", "nvme_path": "/d"}}}, "infinity-disk"),
        ({"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "/d"}, "offload_param": {"device": "nvme", "nvme_path": "/d"}}, "naught": {"gradients": "disk"}}, "infinity-disk-all"),
        ({"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "none"}}}, "stage2"),
    ],
)  # fmt: skip
def test_a_configuration_names_a_placement(document, name):
    assert placement_of(load(document)) == PLACEMENTS[name]


def test_gradients_can_be_held_back_from_the_host():
    document = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}, "naught": {"gradients": "device"}}
    assert placement_of(load(document)).grad.tier is Tier.DEVICE


def test_stage_3_keys_at_lower_stages_are_said_to_have_no_effect():
    report = check({"zero_optimization": {"stage": 2, "stage3_max_live_parameters": 5}})
    assert report.notes[-1].effect is Effect.NONE
    assert "stage 3 only" in report.notes[-1].detail


def test_keys_of_what_is_switched_off_are_said_to_have_no_effect():
    notes = {note.path: note for note in check({"fp16": {"enabled": False, "loss_scale": 4}, "wandb": {"project": "x"}}).notes}
    assert notes["fp16.loss_scale"].detail == "fp16 is not enabled"
    assert notes["wandb.project"].detail == "wandb is not enabled"
    notes = {note.path: note for note in check({"fp16": {"enabled": True, "loss_scale": 4, "hysteresis": 3}}).notes}
    assert notes["fp16.hysteresis"].detail == "the loss scale is fixed"
    assert notes["fp16.loss_scale"].effect is Effect.HONOURED


def test_habits_of_older_tools_load():
    z3 = {"zero_optimization": {"stage": 3}}
    assert load({"fp32_allreduce": True}).communication_data_type == "fp32"
    assert load({"fp32_allreduce": False}).communication_data_type is None
    assert load({"fp16": {"fp16": True, "enabled": True}}).fp16.enabled
    assert load({"optimizer": {"type": "Adam", "params": {"max_grad_norm": 5}}}).gradient_clipping == 5
    assert load({**z3, "naught": {"placement": "pooled", "gradients": "disk", "nvme_path": "auto"}}).auto == {"naught.nvme_path"}
    assert load('{"//": "one remark", "//": "another", "_x": 1, "_x": 2}') == load({})
    assert load({"pipeline": {"stages": "auto", "activation_checkpoint_interval": 0}})


def test_documents_survive_a_round_trip():
    for text in REAL.values():
        config = load(text)
        assert load(json.dumps(to_document(config))) == config
