"""Broken configurations: each gives just the errors it deserves, with path, line, value, what is allowed and a guess."""

from __future__ import annotations

import base64
import json
import math
import os

import numpy as np
import pytest

from naught.config import check, load
from naught.errors import ConfigError

Z = "zero_optimization"


def z(**keys) -> dict:
    return {Z: keys}


CYCLE: dict = {}
CYCLE["zero_optimization"] = CYCLE
LOOP: list = []
LOOP.append(LOOP)
DEEP: dict = {}
for _ in range(200):
    DEEP = {"zero_optimization": DEEP}

# document -> {path: words that its problem must hold}; every other path must be free of problems.
BROKEN: dict[str, tuple[object, dict[str, str]]] = {
    # unknown and misspelt
    "misspelt block": ({"zero_optimisation": {"stage": 3}}, {"zero_optimisation": "unknown key; did you mean zero_optimization?"}),
    "misspelt key": (z(stage=3, overlap_com=True), {f"{Z}.overlap_com": "did you mean overlap_comm?"}),
    "misspelt alias": (z(stage=3, stage3_max_live_params=1), {f"{Z}.stage3_max_live_params": "did you mean stage3_max_live_parameters?"}),
    "unlike anything": ({"xyzzy": 1}, {"xyzzy": "unknown key"}),
    "key in the wrong block": ({"stage3_prefetch_bucket_size": 5}, {"stage3_prefetch_bucket_size": "belongs in zero_optimization"}),
    "stage at the top": ({"stage": 2}, {"stage": "belongs in zero_optimization"}),
    "clipping in the wrong block": (z(gradient_clipping=1.0), {f"{Z}.gradient_clipping": "belongs in the top level"}),
    "misspelt optimizer parameter": (
        {"optimizer": {"type": "AdamW", "params": {"learning_rate": 1e-3, "beta": [0.9, 0.9]}}},
        {"optimizer.params.learning_rate": "did you mean lr?", "optimizer.params.beta": "did you mean betas?"},
    ),
    "adam's parameter for sgd": (
        {"optimizer": {"type": "SGD", "params": {"betas": [0.9, 0.9]}}},
        {"optimizer.params.betas": "unknown key"},
    ),
    "unknown offload key": (z(stage=2, offload_optimizer={"devise": "cpu"}), {f"{Z}.offload_optimizer.devise": "did you mean device?"}),
    "upper case": ({"Train_Batch_Size": 4}, {"Train_Batch_Size": "unknown key"}),
    # duplicate
    "twice in the text": ('{"train_batch_size": 4,\n"train_batch_size": 8}', {"train_batch_size": "appears twice (lines 1 and 2)"}),
    "twice in a block": (
        '{"zero_optimization":\n {"stage": 1,\n "stage": 1}}',
        {f"{Z}.stage": "appears twice (lines 2 and 3)"},
    ),
    "twice in two spellings": (
        z(stage=3, stage3_max_live_parameters=1, max_live_parameters=2),
        {f"{Z}.max_live_parameters": "says again what stage3_max_live_parameters says"},
    ),
    "old and new offload": (
        z(stage=2, cpu_offload=True, offload_optimizer={"device": "cpu"}),
        {f"{Z}.cpu_offload": "says again what offload_optimizer says"},
    ),
    "bf16 twice": ({"bf16": {"enabled": True}, "bfloat16": {"enabled": True}}, {"bfloat16": "says again what bf16 says"}),
    # mistyped
    "text for a number": (z(stage="3"), {f"{Z}.stage": 'must be a whole number from 0 to 3, is "3" (a text)'}),
    "boolean for a number": (z(stage=True), {f"{Z}.stage": "is true (a boolean)"}),
    "fraction for a whole number": ({"train_batch_size": 1.5}, {"train_batch_size": "must be a whole number from 1 or null, is 1.5"}),
    "number for a boolean": ({"bf16": {"enabled": 1}}, {"bf16.enabled": "must be true or false, is 1"}),
    "text for a boolean": ({"fp16": {"enabled": "true"}}, {"fp16.enabled": 'is "true" (a text)'}),
    "list for a block": ({"zero_optimization": [3]}, {Z: "must be an object, is [3]"}),
    "number for a block": ({"zero_optimization": 3}, {Z: "must be an object, is 3"}),
    "text for a block": ({"optimizer": "AdamW"}, {"optimizer": 'must be an object, is "AdamW"'}),
    "auto for a block": ({"zero_optimization": "auto"}, {Z: 'must be an object, is "auto"'}),
    "block for a number": ({"train_batch_size": {"value": 4}}, {"train_batch_size": "is an object"}),
    "list for a number": ({"gradient_clipping": [1.0]}, {"gradient_clipping": "must be a finite number from 0, is [1.0]"}),
    "null for a number": (z(stage=None), {f"{Z}.stage": "is null"}),
    "three betas": (
        {"optimizer": {"type": "Adam", "params": {"betas": [0.9, 0.99, 0.999]}}},
        {"optimizer.params.betas": "must be a list of 2"},
    ),
    "a number for betas": ({"optimizer": {"type": "Adam", "params": {"betas": 0.9}}}, {"optimizer.params.betas": "a list of 2"}),
    "text for a learning rate": (
        {"optimizer": {"type": "AdamW", "params": {"lr": "1e-4"}}},
        {"optimizer.params.lr": 'must be a finite number from 0, is "1e-4"'},
    ),
    "a number as a path": (
        z(stage=3, offload_param={"device": "nvme", "nvme_path": 7}),
        {f"{Z}.offload_param.nvme_path": "must be a text or null, is 7"},
    ),
    "old flag with a text": (z(stage=2, cpu_offload="yes"), {f"{Z}.cpu_offload": "must be true or false"}),
    "list of numbers as names": ({"comms_logger": {"prof_ops": [1, 2]}}, {"comms_logger.prof_ops": "a list, each a text"}),
    "an object that is not plain": ({"train_batch_size": 4, "wandb": {"project": object()}}, {"wandb.project": "has no place in a configuration"}),
    "a key that is not text": ({"train_batch_size": 4, 7: 8}, {"": "key 7 must be a string"}),
    # NaN and out of range
    "NaN": ({"gradient_clipping": math.nan}, {"gradient_clipping": "is NaN"}),
    "NaN in the text": ('{"optimizer": {"type": "Adam",\n"params": {"lr": NaN}}}', {"optimizer.params.lr": "is NaN"}),
    "infinite clipping": ({"gradient_clipping": math.inf}, {"gradient_clipping": "is inf"}),
    "a number beyond floats": ('{"gradient_clipping": 1e400}', {"gradient_clipping": "is inf"}),
    "infinite batch": ({"train_batch_size": math.inf}, {"train_batch_size": "is inf"}),
    "stage 7": (z(stage=7), {f"{Z}.stage": "must be a whole number from 0 to 3, is 7"}),
    "stage -1": (z(stage=-1), {f"{Z}.stage": "is -1"}),
    "no batch": ({"train_batch_size": 0}, {"train_batch_size": "is 0"}),
    "negative micro-batch": ({"train_micro_batch_size_per_gpu": -4}, {"train_micro_batch_size_per_gpu": "is -4"}),
    "negative bucket": (z(stage=2, reduce_bucket_size=-1), {f"{Z}.reduce_bucket_size": "from 1"}),
    "huge number": (z(stage=2, reduce_bucket_size=10**30), {f"{Z}.reduce_bucket_size": "is 1000"}),
    "ratio above one": (z(stage=3, offload_optimizer={"device": "cpu", "ratio": 1.5}), {f"{Z}.offload_optimizer.ratio": "from 0 to 1, is 1.5"}),
    "beta of one": ({"optimizer": {"type": "Adam", "params": {"betas": [0.9, 1.0]}}}, {"optimizer.params.betas": "below 1"}),
    "negative learning rate": ({"optimizer": {"type": "Adam", "params": {"lr": -1}}}, {"optimizer.params.lr": "is -1"}),
    "no predivision": ({"gradient_predivide_factor": 0}, {"gradient_predivide_factor": "above 0, is 0"}),
    "a window of nothing": ({"fp16": {"enabled": True, "loss_scale_window": 0}}, {"fp16.loss_scale_window": "from 1"}),
    # choices
    "unknown device": (z(stage=2, offload_optimizer={"device": "gpu"}), {f"{Z}.offload_optimizer.device": '"none" or "cpu" or "nvme"'}),
    "unknown precision": ({"communication_data_type": "int8"}, {"communication_data_type": '"fp32" or "fp16" or "bf16" or null'}),
    "unknown optimizer": ({"optimizer": {"type": "AdamWW"}}, {"optimizer.type": "did you mean AdamW?"}),
    "optimizer without a type": ({"optimizer": {"params": {"lr": 1e-3}}}, {"optimizer.type": "is missing; choose Adam"}),
    "optimizer type is a number": ({"optimizer": {"type": 3}}, {"optimizer.type": "must be a text, is 3"}),
    "unknown schedule": ({"scheduler": {"type": "Cosine"}}, {"scheduler.type": "is not known by name"}),
    "unknown warm-up": ({"scheduler": {"type": "WarmupLR", "params": {"warmup_type": "cubic"}}}, {"scheduler.params.warmup_type": '"log" or "linear"'}),
    "unknown tag check": ({"checkpoint": {"tag_validation": "maybe"}}, {"checkpoint.tag_validation": '"ignore" or "warn" or "fail"'}),
    "amsgrad": ({"optimizer": {"type": "Adam", "params": {"amsgrad": True}}}, {"optimizer.params.amsgrad": "must be false, is true"}),
    # contradictions
    "two precisions": ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, {"bf16.enabled": "both true; choose one"}),
    "autocast and bf16": ({"torch_autocast": {"enabled": True}, "bf16": {"enabled": True}}, {"torch_autocast.enabled": "both enabled"}),
    "parameters offloaded at stage 2": (z(stage=2, offload_param={"device": "cpu"}), {f"{Z}.offload_param": "needs stage 3, but the stage is 2"}),
    "optimizer offloaded at stage 0": (z(offload_optimizer={"device": "cpu"}), {f"{Z}.offload_optimizer": "needs stage 1 to 3"}),
    "nvme without a path": (z(stage=3, offload_optimizer={"device": "nvme"}), {f"{Z}.offload_optimizer.nvme_path": "nvme_path is not set"}),
    "batch that nothing divides": (
        {"train_batch_size": 7, "train_micro_batch_size_per_gpu": 2},
        {"train_batch_size": "7 is not a multiple of 2"},
    ),
    "batch against both": (
        {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 4},
        {"train_batch_size": "8 is not a multiple of 4 x 4"},
    ),
    "least loss scale above the first": (
        {"fp16": {"enabled": True, "initial_scale_power": 2, "min_loss_scale": 8}},
        {"fp16.min_loss_scale": "above the first scale"},
    ),
    "warm-up downwards": (
        {"scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 1.0, "warmup_max_lr": 0.1}}},
        {"scheduler.params.warmup_min_lr": "1.0 is above warmup_max_lr, 0.1"},
    ),
    "warm-up longer than the run": (
        {"scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 100, "total_num_steps": 10}}},
        {"scheduler.params.warmup_num_steps": "100 is above total_num_steps, 10"},
    ),
    "decay to nowhere": ({"scheduler": {"type": "WarmupDecayLR"}}, {"scheduler.params.total_num_steps": "WarmupDecayLR needs it"}),
    "cycle without bounds": (
        {"scheduler": {"type": "OneCycle"}},
        {"scheduler.params.cycle_min_lr": "needs it", "scheduler.params.cycle_max_lr": "needs it"},
    ),
    "two clippings": (
        {"gradient_clipping": 1.0, "optimizer": {"type": "Adam", "params": {"max_grad_norm": 2.0}}},
        {"optimizer.params.max_grad_norm": "2.0 is not gradient_clipping, 1.0"},
    ),
    "nesterov with dampening": (
        {"optimizer": {"type": "SGD", "params": {"nesterov": True, "momentum": 0.9, "dampening": 0.1}}},
        {"optimizer.params.nesterov": "needs a dampening of 0"},
    ),
    "two parameter types": ({"fp16": {"enabled": True}, "data_types": {"param_dtype": "bf16"}}, {"data_types.param_dtype": "is bf16, but fp16 is enabled"}),
    "a pool of whole parameters": ({**z(stage=1), "naught": {"placement": "pooled"}}, {"naught.placement": "pooled needs stage 3"}),
    "a pool with an offload": (
        {**z(stage=3, offload_optimizer={"device": "cpu"}), "naught": {"placement": "pooled"}},
        {"naught.placement": "pooled places every unit by itself"},
    ),
    "tiles of whole parameters": ({**z(stage=1), "naught": {"tiles": 2}}, {"naught.tiles": "tiles need stage 3"}),
    "a default that contradicts": (
        {"scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 10}}},
        {"scheduler.params.warmup_num_steps": "is 1000 by default, which is above total_num_steps, 10; set warmup_num_steps"},
    ),
    "old and new communication type": (
        {"fp32_allreduce": True, "communication_data_type": "fp16"},
        {"fp32_allreduce": "says again what communication_data_type says"},
    ),
    "no bias correction": (
        {"optimizer": {"type": "Adam", "params": {"bias_correction": False}}},
        {"optimizer.params.bias_correction": "must be true, is false (a boolean); torch's kernel always does"},
    ),
    "one for true": ({"optimizer": {"type": "Adam", "params": {"bias_correction": 1}}}, {"optimizer.params.bias_correction": "must be true, is 1"}),
    "old pin with a number": (z(stage=2, cpu_offload=True, cpu_offload_use_pin_memory=5), {f"{Z}.cpu_offload_use_pin_memory": "must be true or false, is 5"}),
    "old offload beside a wrong new one": (
        z(stage=2, cpu_offload=True, offload_optimizer=[5]),
        {f"{Z}.cpu_offload": "remove cpu_offload", f"{Z}.offload_optimizer": "must be an object, is [5]"},
    ),
    "old parameter offload beside the new": (
        z(stage=3, cpu_offload_param=True, offload_param={"device": "cpu"}),
        {f"{Z}.cpu_offload_param": "remove cpu_offload_param"},
    ),
    "a wrong block brings no contradictions": (
        {"zero_optimization": 3, "naught": {"placement": "pooled"}},
        {Z: "must be an object, is 3"},
    ),
    "a size inside what looks off": (
        {"tensor_parallel": {"autotp_size": 1, "tensor_parallel": {"tp_size": 4}}},
        {"tensor_parallel": "cut it with torch's parallelize_module"},
    ),
    "rates of groups downwards": (
        {"scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": [0.1, 0.3], "cycle_max_lr": [0.2, 0.2]}}},
        {"scheduler.params.cycle_min_lr": "is above cycle_max_lr"},
    ),
    "a name from another tool": ({"micro_batch_size": 4}, {"micro_batch_size": "did you mean train_micro_batch_size_per_gpu?"}),
    "a name that many blocks have": ({"enabled": True}, {"enabled": "unknown key"}),
    "a rate at the wrong level": ({"optimizer": {"type": "AdamW", "lr": 1}}, {"optimizer.lr": "it belongs in optimizer.params"}),
    "nesterov without momentum": (
        {"optimizer": {"type": "SGD", "params": {"nesterov": True}}},
        {"optimizer.params.nesterov": "needs a momentum"},
    ),
    "whole gradients off the device": ({**z(stage=1), "naught": {"gradients": "host"}}, {"naught.gradients": "cannot leave the device"}),
    "gradients on no disk": ({**z(stage=3), "naught": {"gradients": "disk"}}, {"naught.gradients": "farther away than the optimizer states"}),
    "gradients in a pool on no disk": (
        {**z(stage=3), "naught": {"placement": "pooled", "gradients": "disk"}},
        {"naught.gradients": "no nvme_path is set"},
    ),
    # refused
    "quantised weights": (z(stage=3, zero_quantized_weights=True), {f"{Z}.zero_quantized_weights": "is not available: ZeRO++"}),
    "secondary partition": (z(stage=3, zero_hpz_partition_size=8), {f"{Z}.zero_hpz_partition_size": "is not available"}),
    "mics": (z(stage=3, mics_shard_size=4), {f"{Z}.mics_shard_size": "is not available: MiCS"}),
    "zenflow": (z(stage=2, zenflow={"topk_ratio": 0.1}), {f"{Z}.zenflow": "changes the mathematics"}),
    "pipeline": ({"pipeline": {"stages": 4}}, {"pipeline": "no pipeline parallelism"}),
    "moe": ({"moe": {"enabled": True}}, {"moe": "no expert parallelism"}),
    "compression": ({"compression_training": {"weight_quantization": {"shared_parameters": {"enabled": True}}}}, {"compression_training": "no compression"}),
    "tensor parallel": ({"tensor_parallel": {"autotp_size": 4}}, {"tensor_parallel": "cut it with torch's parallelize_module"}),
    "16-bit masters": ({"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}}, {"bf16.bf16_master_weights_and_grads": "masters are always 32-bit"}),
    "lamb": ({"optimizer": {"type": "Lamb", "params": {"lr": 1}}}, {"optimizer.type": "whole matrices"}),
    "1-bit adam": ({"optimizer": {"type": "OneBitAdam"}}, {"optimizer.type": "1-bit compression"}),
    "apex": ({"amp": {"enabled": True}}, {"amp": "use bf16, fp16 or torch_autocast"}),
    # no JSON at all
    "empty text": ("", {"": "is empty"}),
    "blank text": (" \n\t", {"": "is empty"}),
    "only a comment": ("// nothing here", {"": "a value is due, but the text ends"}),
    "unfinished": ('{"train_batch_size": 4', {"": '"," or "}" is due, but the text ends'}),
    "missing comma": ('{"a": 1\n"b": 2}', {"": '"," or "}" is due'}),
    "bare word": ('{"stage": yes}', {"": 'a value is due, found "yes"'}),
    "single quotes": ("{'stage': 3}", {"": "a key in double quotes"}),
    "two objects": ("{} {}", {"": "text after the end"}),
    "a list": ("[1, 2]", {"": "must be a JSON object, is list"}),
    "a number as text": ("12", {"": "is no file"}),
    "an open string": ('{"a": "b\n"}', {"": "a string does not end"}),
    "half a surrogate": ('{"wandb": {"project": "\\ud800"}}', {"": "a string cannot be read"}),
    "a control character": ('{"a\x00b": 1}', {"": "a string does not end"}),
    "an open comment": ('{"a": 1 /* ', {"": '"," or "}" is due'}),
    "too deep a text": ('{"a":' * 100 + "1" + "}" * 100, {"": "nested more than 32 deep"}),
    "too deep a mapping": (DEEP, {"": "nested more than 32 deep"}),
    "a list in itself": ({"comms_logger": {"prof_ops": LOOP}}, {"": "nested more than 32 deep"}),
    "an array": ({"train_batch_size": np.ones(3)}, {"train_batch_size": "a ndarray has no place"}),
    "a mapping in itself": (CYCLE, {"": "nested more than 32 deep"}),
    "no such file": ("does-not-exist.json", {"": "is no file"}),
    "not utf-8": (b"\xff\xfe{}", {"": "is not UTF-8"}),
    "base64 of no JSON": (base64.b64encode(b'{"a": ').decode(), {"": "not valid JSON"}),
    "not a source": (42, {"": "must be a mapping, a path, JSON text or base64, not int"}),
    "thousands of digits": ('{"train_batch_size": ' + "9" * 5000 + "}", {"": "more than 400 digits"}),
}  # fmt: skip


def test_there_are_at_least_sixty():
    assert len(BROKEN) >= 60


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_configuration_gets_the_errors_it_deserves_and_no_others(name):
    source, wanted = BROKEN[name]
    with pytest.raises(ConfigError) as raised:
        load(source)
    problems = {problem.path: str(problem) for problem in raised.value.problems}
    assert set(problems) == set(wanted)
    for path, words in wanted.items():
        assert words in problems[path]


def test_all_problems_come_at_once_in_the_order_of_the_file_with_their_lines():
    text = """{
  "train_batch_size": "8",
  "zero_optimization": {
    "stage": 9,
    "overlap_coms": true
  },
  "fp16": {"enabled": true},
  "bf16": {"enabled": true}
}"""
    with pytest.raises(ConfigError) as raised:
        load(text)
    assert [(problem.line, problem.path) for problem in raised.value.problems] == [
        (2, "train_batch_size"),
        (4, "zero_optimization.stage"),
        (5, "zero_optimization.overlap_coms"),
        (8, "bf16.enabled"),
    ]
    assert str(raised.value).startswith("the configuration text has 4 problems\n  train_batch_size (line 2): must be a whole")


def test_a_wrong_value_does_not_bring_contradictions_after_it():
    report = check({"zero_optimization": {"stage": "3", "offload_param": {"device": "cpu"}}})
    assert [problem.path for problem in report.problems] == ["zero_optimization.stage"]


def test_a_problem_of_a_missing_key_points_to_the_block_around_it():
    report = check('{\n "zero_optimization": {"stage": 3,\n  "offload_param": {"device": "nvme"}\n }\n}')
    assert [(problem.path, problem.line) for problem in report.problems] == [("zero_optimization.offload_param.nvme_path", 3)]


@pytest.mark.parametrize("kind", ["folder", "fifo", "large", "unreadable"])
def test_files_that_cannot_be_read_get_a_clear_error(kind, tmp_path):
    path = tmp_path / "ds.json"
    words = {"folder": "not a regular file", "fifo": "not a regular file", "large": "larger than 1 MiB", "unreadable": "UTF-8"}
    if kind == "folder":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path)
    else:
        path.write_bytes(b" " * (2**20 + 1) if kind == "large" else b"\x80")
    with pytest.raises(ConfigError, match=words[kind]) as raised:
        load(path)
    assert str(path) in str(raised.value)


def test_a_problem_never_prints_pages():
    huge = {"k" * 10_000: 1, "train_batch_size": "v" * 100_000, "zero_optimization": list(range(10_000))}
    with pytest.raises(ConfigError) as raised:
        load(huge)
    assert len(str(raised.value)) < 2000


def test_errors_travel_between_processes():
    import pickle  # what multiprocessing uses for exceptions; nothing of ours reads a pickle

    with pytest.raises(ConfigError) as raised:
        load({"train_batch_size": 0})
    again = pickle.loads(pickle.dumps(raised.value))
    assert str(again) == str(raised.value)
    assert again.problems == raised.value.problems


def test_json_that_only_python_writes_is_read():
    assert load(json.dumps({"steps_per_print": math.inf})).steps_per_print is None
