"""The command as people use it: what it prints, what it writes, how it fails."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import pytest
from real_configs import REAL

from naught.cli import main
from naught.cli.arguments import PAPERS, SCALING, STARTERS
from naught.config import check, load, placement_of
from naught.config.starters import STARTERS as STARTER_TEXTS
from naught.papers import TABLES
from naught.placement import PLACEMENTS
from naught.scaling import CURVES

BOX = ["--ranks", "8", "--gpu", "80GB", "--host", "512GB", "--disk", "2TB"]


@pytest.fixture
def run(capsys):
    def call(*arguments: str) -> tuple[int, str, str]:
        try:
            code = main(arguments)
        except SystemExit as stop:  # argparse
            code = int(stop.code or 0)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


def test_plan_prints_every_placement_tier_and_category(run):
    code, out, _ = run("plan", "gpt2-1.5b", *BOX)
    assert code == 0
    for word in [
        *PLACEMENTS,
        "pooled",
        "parameters",
        "gathered",
        "checkpoints",
        "buffers",
        "all-gather",
        "efficiency",
        "largest",
    ]:
        assert word in out
    assert "recommended: stage2" in out
    assert "1.56B parameters in 49 units" in out
    assert "ZeRO-Infinity's formula" in out


def test_plan_says_when_nothing_fits(run):
    code, out, _ = run("plan", "175B", "--gpu", "24GB")
    assert code == 1
    assert "nothing fits: pooled lacks 2.45 TB of host memory. Use more ranks, or more memory (the largest GPT of the" in out
    assert "that fits here has 1.44B)" in out


def test_plan_as_data(run):
    code, out, _ = run("plan", "7.5B", "--ranks", "64", "--gpu", "32GB", "--json")
    data = json.loads(out)
    assert code == 0
    rows = {row["name"]: row for row in data["placements"]}
    states = [
        sum(rows[f"stage{stage}"]["bytes"]["device"][kind] for kind in ("parameters", "gradients", "optimizer"))
        for stage in range(4)
    ]
    assert [round(nbytes / 1e9, 1) for nbytes in states] == [120.0, 31.4, 16.6, 1.9]
    assert data["recommended"] in rows
    assert rows["stage3"]["fits"] is True
    assert rows["stage0"]["fits"] is False


@pytest.mark.parametrize("name", [*PLACEMENTS, "pooled"])
def test_plan_writes_a_configuration_that_asks_for_the_placement(run, tmp_path, name):
    path = tmp_path / "ds.json"
    code, _, err = run("plan", "gpt2", *BOX, "--write", str(path), "--placement", name)
    assert code == 0
    assert f"wrote {path} for {name}" in err
    config = load(path)
    if name == "pooled":
        assert config.naught.placement == "pooled"
    else:
        assert placement_of(config) == PLACEMENTS[name]
    assert not check(path).problems


def test_plan_reads_a_pool_that_it_has_written(run, tmp_path):
    path, box = tmp_path / "ds.json", ["--ranks", "1", "--gpu", "24GB", "--host", "128GB"]
    run("plan", "7B", *box, "--write", str(path), "--placement", "pooled")
    data = json.loads(run("plan", "7B", *box, "--config", str(path), "--json")[1])
    asked = data["configuration"]
    assert asked["fits"]
    assert asked["total_bytes"]["device"] <= 24e9 < asked["total_bytes"]["device"] + asked["total_bytes"]["host"]


GIVEN = {
    "train_batch_size": 64,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 0.5,
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-4, "betas": [0.9, 0.95]}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}},
    "zero_optimization": {
        "stage": 2,
        "overlap_comm": True,
        "offload_optimizer": {"device": "cpu", "pin_memory": False, "ratio": 0.5},
        "offload_param": None,
    },
    "activation_checkpointing": {"cpu_checkpointing": True, "number_checkpoints": 4},
    "naught": {"small_masters": True, "gradients": "host", "keep_last": 3, "gpu_memory": "40GB"},
}


@pytest.mark.parametrize(
    ("name", "zero"),
    [
        ("stage1", {"stage": 1, "overlap_comm": True}),
        ("stage3-offload", {"stage": 3, "overlap_comm": True, "offload_optimizer": {"device": "cpu", "pin_memory": False}}),
    ],
)
def test_plan_writes_a_given_configuration_changed_in_what_a_placement_says(run, tmp_path, name, zero):
    given, path = tmp_path / "given.json", tmp_path / "ds.json"
    given.write_text(json.dumps(GIVEN), encoding="utf-8")
    code, _, _ = run(
        "plan", "gpt2", *BOX, "--config", str(given), "--activations", "block", "--write", str(path), "--placement", name
    )
    assert code == 0
    written = json.loads(path.read_text(encoding="utf-8"))
    kept = {key: value for key, value in GIVEN.items() if key not in ("zero_optimization", "activation_checkpointing", "naught")}
    assert written == kept | {
        "zero_optimization": zero,
        "activation_checkpointing": {"number_checkpoints": 4},
        "naught": {"small_masters": True, "keep_last": 3, "gpu_memory": 40_000_000_000},
    }


def test_what_is_asked_for_beside_a_configuration_is_written_too(run, tmp_path):
    given, path = tmp_path / "given.json", tmp_path / "ds.json"
    given.write_text(json.dumps(GIVEN | {"naught": {}}), encoding="utf-8")
    more = ["--batch", "3", "--dtype", "fp16", "--optimizer", "lion", "--write", str(path), "--placement", "stage2"]
    assert run("plan", "gpt2", *BOX, "--config", str(given), *more)[0] == 0
    config = load(path)
    assert (config.train_batch_size, config.train_micro_batch_size_per_gpu, config.gradient_accumulation_steps) == (None, 3, 2)
    assert (config.fp16.enabled, config.bf16.enabled, config.optimizer.type) == (True, False, "Lion")
    assert config.gradient_clipping == 0.5


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--dtype", "fp16"], "fp16"),
        (["--accumulation", "4"], "lets gradients go in every backward, and a step has 4|gradients that"),
    ],
)
def test_what_the_engine_would_refuse_is_not_planned(run, tmp_path, more, words):
    given = tmp_path / "given.json"
    document = {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "gradient_clipping": 0.0}
    given.write_text(json.dumps(document | {"naught": {"update_in_backward": True}}), encoding="utf-8")
    assert run("plan", "gpt2", *BOX, "--config", str(given))[0] == 0
    code, out, err = run("plan", "gpt2", *BOX, "--config", str(given), *more)
    assert (code, out) == (1, "")
    assert re.search(words, err)


@pytest.mark.parametrize("most", [None, 0, 50_000_000])
def test_parameters_that_stay_in_host_memory_beside_a_disk_are_planned_there(run, tmp_path, most):
    given = tmp_path / "given.json"
    below = {"device": "nvme", "nvme_path": "/x"}
    zero = {"stage": 3, "offload_optimizer": below, "offload_param": below | ({} if most is None else {"max_in_cpu": most})}
    given.write_text(json.dumps({"bf16": {"enabled": True}, "zero_optimization": zero}), encoding="utf-8")
    data = json.loads(run("plan", "gpt2", "--ranks", "2", *BOX[2:], "--config", str(given), "--json")[1])
    bytes_of = {tier: data["configuration"]["bytes"][tier]["parameters"] for tier in ("host", "disk")}
    assert (bytes_of["host"] > 0) is (most != 0)
    assert (bytes_of["disk"] > 0) is (most is not None)
    assert most is None or bytes_of["host"] <= 2 * most


def test_a_folder_that_nobody_has_named_is_said_and_one_that_is_stays(run, tmp_path):
    path, given = tmp_path / "ds.json", tmp_path / "given.json"
    _, _, err = run("plan", "gpt2", *BOX, "--write", str(path), "--placement", "infinity-disk")
    assert "nvme_path is /local_nvme: change it" in err
    zero = {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "/mine"}}
    given.write_text(json.dumps({"bf16": {"enabled": True}, "zero_optimization": zero}), encoding="utf-8")
    _, out, err = run("plan", "gpt2", *BOX, "--config", str(given), "--write", "-", "--placement", "infinity-disk")
    written = json.loads(out)["zero_optimization"]
    assert written["offload_param"] == {"device": "nvme", "nvme_path": "/mine", "max_in_cpu": 0}
    assert "change it" not in err


def test_a_pool_that_fits_only_without_gradients_is_written_so(run, tmp_path):
    given, path = tmp_path / "given.json", tmp_path / "ds.json"
    ours = {"placement": "auto", "gpu_memory": "147GB", "host_memory": "122GB", "small_masters": True, "update_in_backward": True}
    document = {"train_micro_batch_size_per_gpu": 8, "gradient_clipping": 0.0, "bf16": {"enabled": True}, "naught": ours}
    given.write_text(json.dumps(document | {"zero_optimization": {"stage": 3}}), encoding="utf-8")
    asked = ("plan", "gpt:layers=60,hidden=5120,heads=40", "--ranks", "1", "--gpu", "147GB", "--disk", "0")
    assert run(*asked, "--config", str(given), "--write", str(path))[0] == 0
    code, out, _ = run(*asked, "--config", str(path))
    assert code == 0
    assert "the configuration fits" in out


def test_of_a_configurations_limit_and_what_there_is_the_smaller_one_holds(run, tmp_path):
    given = tmp_path / "given.json"
    ours = {"naught": {"gpu_memory": "40GB", "host_memory": "50GB"}}
    given.write_text(json.dumps(ours | {"bf16": {"enabled": True}, "train_micro_batch_size_per_gpu": 1}), encoding="utf-8")
    for gpu, host, capacity in (
        ("80GB", "100GB", (38_400_000_000, 50_000_000_000)),  # of what is limited states have all
        ("24GB", "30GB", (23_040_000_000, 27_000_000_000)),
        ("80GB", "52GB", (38_400_000_000, 46_800_000_000)),  # of what there is states have nine tenths
    ):
        data = json.loads(run("plan", "gpt2", "--ranks", "1", "--gpu", gpu, "--host", host, "--config", str(given), "--json")[1])
        assert (data["configuration"]["capacity_bytes"]["device"], data["configuration"]["capacity_bytes"]["host"]) == capacity


def test_plan_writes_what_it_recommends_with_tiles_and_host_checkpoints(run, tmp_path):
    path = tmp_path / "ds.json"
    big = ["--ranks", "512", "--per-node", "16", "--gpu", "v100", "--host", "1.5TB", "--disk", "28TB"]
    assert run("plan", "32T", *big, "--write", str(path), "--dtype", "fp16")[0] == 0
    config = load(path)
    assert config.naught.tiles > 1
    assert config.activation_checkpointing.cpu_checkpointing
    assert config.fp16.enabled


def test_nothing_is_overwritten(run, tmp_path):
    path = tmp_path / "ds.json"
    path.write_text("precious", encoding="utf-8")
    for arguments in (
        ["plan", "gpt2", *BOX, "--write", str(path)],
        ["config", "init", "stage1", "-o", str(path)],
        ["config", "schema", "-o", str(path)],
    ):
        code, _, err = run(*arguments)
        assert code == 2
        assert "exists already" in err
    assert path.read_text(encoding="utf-8") == "precious"


def test_plan_takes_batch_precision_and_placement_from_a_configuration(run, tmp_path):
    path = tmp_path / "ds.json"
    document = {
        "train_batch_size": 64,
        "gradient_accumulation_steps": 2,
        "fp16": {"enabled": True},
        "optimizer": {"type": "Lion"},
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
    }
    path.write_text(json.dumps(document), encoding="utf-8")
    code, out, _ = run("plan", "gpt2", *BOX, "--config", str(path))
    assert code == 0
    assert "micro-batch 4 x 1024 tokens, accumulation 2, fp16, lion" in out
    assert "as the configuration says" in out
    assert "the configuration fits" in out


@pytest.mark.parametrize(
    ("document", "path", "value"),
    [
        ({"fp16": {"enabled": "auto"}}, ("job", "dtype"), "fp16"),
        ({"fp16": {"enabled": "auto"}, "bf16": {"enabled": "auto"}}, ("job", "dtype"), "bf16"),
        ({}, ("job", "dtype"), "fp32"),
        ({"optimizer": {"type": "SGD", "params": {"momentum": 0.9}}}, ("job", "optimizer"), "sgd-momentum"),
        ({"activation_checkpointing": {"cpu_checkpointing": True}}, ("configuration", "checkpointing"), "host"),
        ({"zero_optimization": {"stage": 3}, "naught": {"tiles": 4}}, ("configuration", "tiles"), 4),
    ],
)
def test_plan_heeds_what_a_configuration_says(run, tmp_path, document, path, value):
    file = tmp_path / "ds.json"
    file.write_text(json.dumps(document), encoding="utf-8")
    _, out, _ = run("plan", "gpt2", *BOX, "--config", str(file), "--json")
    block, key = path
    assert json.loads(out)[block][key] == value


def test_a_ratio_leaves_part_of_the_states_on_the_device(run, tmp_path):
    file = tmp_path / "ds.json"
    zero = {"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 0.25}}
    file.write_text(json.dumps({"bf16": {"enabled": True}, "zero_optimization": zero}), encoding="utf-8")
    _, out, _ = run("plan", "100M", *BOX, "--config", str(file), "--json")
    data = json.loads(out)
    memory, layers = data["configuration"]["bytes"], data["model"]["units"][0]["repeat"]
    gone = layers - int(layers * 0.75)  # as the engine has it: what stays is at most the rest
    assert memory["device"]["optimizer"] * gone == memory["host"]["optimizer"] * (layers - gone)


def test_a_gpu_without_bf16_is_planned_in_fp16(run):
    assert "fp16, adamw" in run("plan", "1B", "--gpu", "v100")[1]
    assert "bf16, adamw" in run("plan", "1B", "--gpu", "h100")[1]


def test_odd_numbers_of_ranks_fill_their_nodes(run):
    assert "12 ranks, 6 on a node" in run("plan", "1B", "--gpu", "80GB", "--ranks", "12")[1]
    assert "11 ranks, 1 on a node" in run("plan", "1B", "--gpu", "80GB", "--ranks", "11")[1]


def test_papers_and_written_configurations_go_to_standard_output_as_data(run):
    assert json.loads(run("plan", "--paper", "zero-table1", "--json")[1])["rows"][0][1] == "120"
    for more in ([], ["--json"]):
        _, out, err = run("plan", "gpt2", *BOX, "--write", "-", "--placement", "stage1", *more)
        assert json.loads(out)["zero_optimization"]["stage"] == 1
        assert "stage3" in err


def test_a_gpu_with_room_for_nothing_holds_nothing(run):
    code, out, _ = run("plan", "7B", "--gpu", "10B")
    assert code == 1
    assert re.search(r"nothing fits: \w+ lacks .* Use more ranks, or more memory \(no model fits here\)", out)


def test_a_sample_longer_than_the_model_is_remarked(run):
    assert "the model has 1024 positions, and a sample 8192 tokens" in run("plan", "gpt2", *BOX, "--seq", "8192")[1]


def test_plan_without_a_machine_plans_for_the_present_one(run):
    code, out, _ = run("plan", "1M")
    assert code == 0
    assert "this machine" in out


def test_the_papers_tables_print(run):
    tables = {**TABLES, **CURVES}
    assert set(PAPERS) == {*tables, SCALING}
    for name in tables:
        code, out, _ = run("plan", "--paper", name)
        assert code == 0
        assert tables[name]().title in out


def test_presets_are_listed(run):
    code, out, _ = run("plan", "--models")
    assert code == 0
    assert "llama3-8b" in out
    assert "8.03B" in out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["plan"], "no model is given"),
        (["plan", "gtp2"], "did you mean gpt2"),
        (["plan", "7B", "--gpu", "80XB"], "--gpu"),
        (["plan", "7B", "--gpu", "0"], "a GPU has more than 0 bytes"),
        (["plan", "7B", "--gpu", "h900"], 'no GPU "h900"'),
        (["plan", "7B", "--gpu", "80GB", "--host", "lots"], '--host "lots" is not a quantity'),
        (["plan", "7B", "--gpu", "80GB", "--ranks", "0"], "at least one rank"),
        (["plan", "7B", "--gpu", "80GB", "--ranks", "12", "--per-node", "8"], "do not fill nodes of 8"),
        (["plan", "7B", "--gpu", "80"], '"80" is not a quantity'),
        (["plan", "7B", "--gpu", "80GB", "--tflops", "0"], "rates must be above 0"),
        (["plan", "7B", "--gpu", "80GB", "--tflops", "inf"], "rates must be above 0"),
        (["plan", "7B", "--gpu", "80GB", "--placement", "stage1"], "Give --write too"),
        (["plan", "7B", "--gpu", "80GB", "--batch", "0"], "at least 1"),
        (["plan", "7B", "--gpu", "80GB", "--tflops", "-1"], "rates must be above 0"),
        (["plan", "7B", "--gpu", "80GB", "--disk-speed", "0"], "rates must be above 0"),
        (["plan", "7B", *BOX, "--write", "x.json", "--placement", "stage9"], 'no placement "stage9"'),
        (["plan", "7B", *BOX, "--write", "no/such/folder/x.json"], "cannot be written"),
        (["config", "explain", "overlap_con"], "did you mean overlap_comm?"),
        (["config", "check", "x", "--world", "zero"], "invalid int value"),
        (["frobnicate"], "invalid choice"),
    ],
)
def test_mistakes_get_one_clear_line_and_no_traceback(run, arguments, words):
    code, _, err = run(*arguments)
    assert code == 2
    assert words in err
    assert "Traceback" not in err


def test_config_check_lists_what_becomes_of_each_key(run, tmp_path):
    path = tmp_path / "ds.json"
    path.write_text(REAL["removed features switched off"], encoding="utf-8")
    code, out, _ = run("config", "check", str(path), "--world", "4")
    assert code == 0
    assert f"{path} is fine" in out
    assert "honoured" in out
    assert "no effect" in out
    assert "switched off" in out
    assert "batch on 4 ranks: 8 = 2 x 1 x 4" in out


def test_config_check_prints_all_problems_and_fails(run, tmp_path):
    path = tmp_path / "ds.json"
    path.write_text('{\n "train_batch_size": 8,\n "zero_optimization": {"stage": "3"},\n "fp61": {}\n}', encoding="utf-8")
    code, out, err = run("config", "check", str(path))
    assert (code, out) == (1, "")
    assert err.splitlines() == [
        f"{path} has 2 problems",
        '  zero_optimization.stage (line 3): must be a whole number from 0 to 3, is "3" (a text)',
        "  fp61 (line 4): unknown key; did you mean fp16?",
    ]


def test_config_check_derives_the_batch_for_a_world(run, tmp_path):
    path = tmp_path / "ds.json"
    path.write_text('{"train_batch_size": 7}', encoding="utf-8")
    code, _, err = run("config", "check", str(path), "--world", "2")
    assert code == 1
    assert "7 is not micro-batch x accumulation x ranks" in err
    code, _, err = run("config", "check", str(path), "--world", "0")
    assert code == 2
    path.write_text('{"gradient_accumulation_steps": 4}', encoding="utf-8")
    assert "no batch size is set" in run("config", "check", str(path))[1]


def test_config_check_as_data(run, tmp_path):
    path = tmp_path / "ds.json"
    path.write_text('{"train_batch_size": "auto", "zero_optimization": {"stge": 1}}', encoding="utf-8")
    code, out, _ = run("config", "check", str(path), "--json")
    data = json.loads(out)
    assert code == 1
    assert data["problems"][0]["path"] == "zero_optimization.stge"
    assert data["auto"] == ["train_batch_size"]


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("stage", ["zero_optimization.stage", "a whole number from 0 to 3", "default: 0"]),
        ("prefetch_bucket_size", ["stage3_prefetch_bucket_size", "also written: prefetch_bucket_size"]),
        ("zero_optimization.round_robin_gradients", ["no effect here"]),
        ("zero_quantized_weights", ["refused: ZeRO++"]),
        ("aio.block_size", ["default: 4194304 (DeepSpeed: 1048576)", "why:"]),
        ("optimizer", ["the update rule", "optimizer(AdamW).params.lr"]),
        ("optimizer.params.betas", ["optimizer(Lion).params.betas", "default: [0.9, 0.99]"]),
        ("offload_optimizer.device", ["zero_optimization.offload_optimizer.device"]),
        ("cpu_offload", ["an old name: offload_optimizer"]),
        ("fp16", ["half precision", "fp16.loss_scale"]),
    ],
)
def test_config_explain_says_what_a_key_does(run, key, words):
    code, out, _ = run("config", "explain", key)
    assert code == 0
    assert all(word in out for word in words)


def test_config_explain_without_a_key_lists_all(run):
    code, out, _ = run("config", "explain")
    assert code == 0
    assert out.count("\n") > 150


def test_starters_are_sound_and_ask_for_what_they_are_named_after(run, tmp_path):
    assert set(STARTERS) == set(STARTER_TEXTS)
    wanted = {
        "stage1": "stage1",
        "stage2": "stage2",
        "stage3": "stage3",
        "offload": "stage2-offload",
        "infinity": "infinity-disk",
    }
    for kind, name in wanted.items():
        path = tmp_path / f"{kind}.json"
        assert run("config", "init", kind, "-o", str(path))[0] == 0
        assert placement_of(load(path)) == PLACEMENTS[name]
        assert run("config", "init", kind)[1] == path.read_text(encoding="utf-8")


def test_schema_goes_to_standard_output(run):
    code, out, _ = run("config", "schema")
    assert code == 0
    assert json.loads(out)["$schema"].startswith("https://json-schema.org")


def command(*arguments: str, **options) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-m", "naught", *arguments], timeout=60, **options)


def test_the_command_runs_as_a_program_and_from_a_pipe():
    shown = command("config", "check", "-", input=b'{"train_batch_size": 4}', capture_output=True)
    assert shown.returncode == 0
    assert b"train_batch_size" in shown.stdout
    assert command("--version", capture_output=True).stdout.startswith(b"naught ")


def test_a_reader_that_leaves_early_is_no_error():
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb") as pipe:
        done = command("config", "explain", stdout=pipe, stderr=subprocess.PIPE)
    assert done.returncode == 0
    assert done.stderr == b""


def test_a_terminal_gets_a_table_of_rich_and_no_colour_a_plain_one():
    code = (
        "import os, pty, sys\n"
        "pid, fd = pty.fork()\n"
        "if pid == 0:\n    os.execv(sys.executable, [sys.executable, '-m', 'naught', 'plan', '--models'])\n"
        "data = b''\n"
        "while True:\n"
        "    try:\n        part = os.read(fd, 65536)\n"
        "    except OSError:\n        break\n"
        "    if not part:\n        break\n"
        "    data += part\n"
        "assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0\n"
        "sys.stdout.buffer.write(data)"
    )
    for extra, coloured in (({}, True), ({"NO_COLOR": "1"}, False)):
        environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "120", **extra}
        if coloured:
            environment.pop("NO_COLOR", None)
        shown = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, timeout=60, check=True).stdout
        assert b"llama3-8b" in shown
        assert (b"\x1b[" in shown) == coloured
