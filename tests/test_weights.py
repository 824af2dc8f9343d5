"""Weights go out to Hugging Face's format and come in from it, whole, without the world that wrote them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from menagerie import MODELS
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from test_resume import make, reached, saves
from training import config_of, digest, digest_of_weights, engine_of, take_steps

from naught import utils
from naught.cli import main
from naught.errors import CheckpointDamaged, CheckpointError, NaughtError, StorageError

pytestmark = pytest.mark.usefixtures("one_thread")


def whole_masters(folder: Path, name: str, recipe: str) -> dict[str, torch.Tensor]:
    engine = make(0, name, recipe, seed=8)
    engine.load_checkpoint(folder)
    params = dict(engine.module.named_parameters())
    found = {name: utils.safe_get_full_fp32_param(param) for name, param in params.items()}
    return {name: params[name] if value is None else value for name, value in found.items()}


def read_all(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for path in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(path).items()}


@pytest.mark.parametrize("name", ["tied", "lora", "buffers", "uneven_sizes_and_users_hooks"])
@pytest.mark.parametrize(("world", "stage", "recipe"), [(1, 0, "fp32"), (3, 3, "bf16"), (2, 1, "fp16")])
def test_exported_weights_are_the_masters_and_load_strictly_into_a_plain_model(
    worlds, tmp_path, capsys, name, world, stage, recipe
):
    worlds[world].run(saves, tmp_path / "run", stage, name, recipe)
    assert main(["ckpt", "export", str(tmp_path / "run"), "--to", str(tmp_path / "hf"), "--dtype", "fp32"]) == 0
    assert "model.safetensors" in capsys.readouterr().out
    exported = read_all(tmp_path / "hf")
    model = MODELS[name]()
    assert list(sorted(exported)) == sorted(model.state_dict())
    model.load_state_dict(exported, strict=True)
    masters = whole_masters(tmp_path / "run", name, recipe)
    assert all(torch.equal(param, masters[name].float().cpu()) for name, param in model.named_parameters())
    with safe_open(tmp_path / "hf" / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
    assert main(["ckpt", "export", str(tmp_path / "run"), "--to", str(tmp_path / "half"), "--dtype", "bf16"]) == 0
    for tensor, wide in zip(read_all(tmp_path / "half").values(), exported.values(), strict=True):
        assert torch.equal(tensor, wide.bfloat16() if tensor.dtype == torch.bfloat16 else wide)


def test_large_weights_are_cut_into_files_with_an_index(tmp_path, capsys):
    saves(tmp_path / "run", 1, "tied", "bf16")
    assert main(["ckpt", "export", str(tmp_path / "run"), "--to", str(tmp_path / "hf"), "--file-size", "0.05MB"]) == 0
    index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in (tmp_path / "hf").glob("*.safetensors"))
    assert files == [f"model-{at + 1:05d}-of-{len(files):05d}.safetensors" for at in range(len(files))]
    assert len(files) > 1
    for name, file in index["weight_map"].items():
        with safe_open(tmp_path / "hf" / file, "pt") as opened:
            assert name in opened.keys()  # noqa: SIM118 - it is no dict
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in read_all(tmp_path / "hf").values())
    assert main(["ckpt", "export", str(tmp_path / "run"), "--to", str(tmp_path / "hf")]) == 2
    assert "nothing is overwritten" in capsys.readouterr().err


def test_hugging_faces_own_models_load_what_is_exported(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=64, n_positions=16)
    model = transformers.GPT2LMHeadModel(config)
    engine = engine_of(model, config_of(2))
    engine.save_checkpoint(tmp_path / "run")
    config.save_pretrained(tmp_path / "hf")
    assert main(["ckpt", "export", str(tmp_path / "run"), "--to", str(tmp_path / "hf")]) == 0
    loaded = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "hf")
    assert digest(list(loaded.parameters())) == digest_of_weights(engine)


def test_an_export_takes_a_few_blocks_of_memory_and_no_engine(tmp_path):
    """300 MB of weights under a limit of memory that torch alone nearly fills."""
    engine = engine_of(torch.nn.Linear(8192, 8192, bias=False), config_of(0, optimizer="SGD", params={"lr": 0.1}))
    engine.save_checkpoint(tmp_path / "run")
    script = (
        "from naught.cli import main; from naught.cpu import Cpu; import naught.saves.exporting\n"
        "before = Cpu().max_memory_allocated()\n"
        f"assert main(['ckpt', 'export', {str(tmp_path / 'run')!r}, '--to', {str(tmp_path / 'hf')!r}, '--dtype', 'bf16']) == 0\n"
        "print((Cpu().max_memory_allocated() - before) // 10**6)"
    )
    said = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True, timeout=100).stdout
    assert int(said.splitlines()[-1]) < 100, "MB, of 256 that were read and 128 that were written"
    assert (tmp_path / "hf" / "model.safetensors").stat().st_size > 2 * 8192 * 8192


def test_a_damaged_checkpoint_is_not_exported(tmp_path, capsys):
    saves(tmp_path / "run", 1, "tied", "bf16")
    path = tmp_path / "run" / "global_step3" / "rank-00000.safetensors"
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 3] ^= 1
    path.write_bytes(raw)
    assert main(["ckpt", "export", str(tmp_path / "run"), "--to", str(tmp_path / "hf")]) == 2
    assert "is damaged in chunk" in capsys.readouterr().err
    assert list((tmp_path / "hf").iterdir()) == []


# --- coming in ----------------------------------------------------------------------------------------------------------


def comes_in(path: Path, stage: int, name: str, recipe: str) -> tuple[str, str, list[float]]:
    engine = make(stage, name, recipe, seed=5)
    engine.load_weights(path)
    masters = [utils.safe_get_full_fp32_param(param) for param in engine.module.parameters() if param.requires_grad]
    with engine.gathered():
        state = {name: tensor.float().cpu().clone() for name, tensor in engine.module.state_dict().items()}
    return digest(masters), digest(list(state.values())), take_steps(engine, 2)


@pytest.mark.parametrize("name", ["tied", "lora", "buffers"])
@pytest.mark.parametrize(("world", "recipe"), [(1, "fp32"), (3, "bf16")])
def test_weights_of_others_go_straight_into_shards(worlds, tmp_path, name, world, recipe):
    torch.manual_seed(3)
    model = MODELS[name]()
    engine = engine_of(MODELS[name](), config_of(0))
    engine.load_module_state_dict(model.state_dict())
    state = dict(model.state_dict())
    if name == "tied":
        del state["head.weight"]  # as Hugging Face leaves it out
    first, second = dict(list(state.items())[::2]), dict(list(state.items())[1::2])
    save_file({name: tensor.clone() for name, tensor in first.items()}, tmp_path / "model-00001-of-00002.safetensors")
    save_file({name: tensor.clone() for name, tensor in second.items()}, tmp_path / "model-00002-of-00002.safetensors")
    names = {name: f"model-0000{1 if name in first else 2}-of-00002.safetensors" for name in state}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    runs = [worlds[world].run(comes_in, tmp_path, stage, name, recipe)[0] for stage in range(4)]
    assert all(run == runs[0] for run in runs)
    trained = [param for param in model.parameters() if param.requires_grad]
    assert runs[0][0] == digest(trained)
    if recipe == "fp32":
        assert runs[0][1] == digest([tensor.float() for tensor in model.state_dict().values()])


def test_what_was_exported_comes_in_again(tmp_path):
    saves(tmp_path / "run", 1, "tied", "fp32")
    main(["ckpt", "export", str(tmp_path / "run"), "--to", str(tmp_path / "hf")])
    engine, other = make(2, "tied", "fp32", seed=5), make(2, "tied", "fp32", seed=6)
    engine.load_checkpoint(tmp_path / "run", load_module_only=True)
    other.load_weights(tmp_path / "hf" / "model.safetensors")
    assert digest_of_weights(engine) == digest_of_weights(other)


def other_on_one_rank(folder: Path) -> tuple[str, bool]:
    engine = make(3, "plain", "fp32")
    before = reached(engine)
    try:
        engine.load_weights(folder / str(engine.global_rank))
    except NaughtError as error:
        return f"{type(error).__name__}: {error}", before == reached(engine)
    return "nothing", True


@pytest.mark.parametrize("bad", ["gone", "cut", "other"])
def test_weights_that_are_bad_on_one_rank_change_nothing_on_any(two, tmp_path, bad):
    state = {name: tensor.clone() for name, tensor in MODELS["plain"]().state_dict().items()}
    for rank in range(2):
        (tmp_path / str(rank)).mkdir()
        save_file(state, tmp_path / str(rank) / "model.safetensors")
    path = tmp_path / "1" / "model.safetensors"
    if bad == "gone":
        path.unlink()
    elif bad == "cut":
        path.write_bytes(path.read_bytes()[:-4])
    else:
        save_file({**state, "more": torch.zeros(2)}, path)
    words = {
        "gone": "has neither model.safetensors nor",
        "cut": "it is cut off, or too long",
        "other": 'not in the model ("more")',
    }[bad]
    (one, same), (other, also_same) = two.run(other_on_one_rank, tmp_path)
    assert words in one
    assert words in other
    assert same
    assert also_same


@pytest.mark.parametrize(
    ("header", "words"),
    [
        (b"\xff" * 8, "says that its header has"),
        ((50).to_bytes(8, "little") + b"{" * 50, "cannot be read"),
        ((2).to_bytes(8, "little") + b"[]", "no JSON object"),
        ((9).to_bytes(8, "little") + b'{"a": {}}', "not what it is"),
        (None, "numbers that cannot be"),
    ],
)
def test_hostile_files_are_refused(tmp_path, header, words):
    if header is None:
        said = json.dumps({"a": {"dtype": "F32", "shape": [2**70], "data_offsets": [0, 4]}}).encode()
        header = len(said).to_bytes(8, "little") + said + bytes(4)
    (tmp_path / "x.safetensors").write_bytes(header)
    engine = make(0, "plain", "fp32")
    with pytest.raises(CheckpointDamaged, match=words):
        engine.load_weights(tmp_path / "x.safetensors")


@pytest.mark.parametrize("name", ["../x.safetensors", "/etc/x.safetensors", ".x.safetensors", "a/b.safetensors", "x.bin", 3])
def test_an_index_cannot_lead_elsewhere(tmp_path, name):
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(CheckpointError, match="does not name plain safetensors files"):
        make(0, "plain", "fp32").load_weights(tmp_path)


def test_pickles_are_not_weights(tmp_path):
    torch.save(MODELS["plain"]().state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin"):
        make(0, "plain", "fp32").load_weights(tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"has neither model\.safetensors nor"):
        make(0, "plain", "fp32").load_weights(tmp_path)
    with pytest.raises(StorageError, match=r"other\.safetensors: No such file"):
        make(0, "plain", "fp32").load_weights(tmp_path / "other.safetensors")


# --- differences --------------------------------------------------------------------------------------------------------


def test_the_difference_of_two_checkpoints(worlds, tmp_path, capsys):
    worlds[3].run(saves, tmp_path / "one", 3, "buffers", "bf16")
    engine = make(1, "buffers", "bf16", seed=1)
    engine.load_checkpoint(tmp_path / "one")
    engine.save_checkpoint(tmp_path / "two", tag="copy")
    assert main(["ckpt", "diff", str(tmp_path / "one"), str(tmp_path / "two" / "copy")]) == 0
    assert "the same bits" in capsys.readouterr().out
    param = next(iter(engine.module.parameters()))
    value = utils.safe_get_full_fp32_param(param)
    value.view(-1)[3] += 0.25
    utils.safe_set_full_fp32_param(param, value)
    engine.save_checkpoint(tmp_path / "two", tag="changed")
    assert main(["ckpt", "diff", str(tmp_path / "one"), str(tmp_path / "two" / "changed"), "--json"]) == 1
    (found,) = json.loads(capsys.readouterr().out)["differences"]
    assert (found["kind"], found["differing"], found["largest"]) == ("weights", 1, 0.25)
    value.view(-1)[3] = 0.0
    utils.safe_set_full_fp32_param(param, value)
    engine.save_checkpoint(tmp_path / "two", tag="zero")
    utils.safe_set_full_fp32_param(param, value * torch.where(value == 0, -1.0, 1.0))
    engine.save_checkpoint(tmp_path / "two", tag="other-zero")
    assert main(["ckpt", "diff", str(tmp_path / "two" / "zero"), str(tmp_path / "two" / "other-zero"), "--json"]) == 1
    (found,) = json.loads(capsys.readouterr().out)["differences"]
    assert (found["differing"], found["largest"]) == (1, 0.0), "zeros of two signs are not the same bits"
    take_steps(engine, 1, first=3)
    engine.save_checkpoint(tmp_path / "two")
    assert main(["ckpt", "diff", str(tmp_path / "one"), str(tmp_path / "two" / "global_step4")]) == 1
    shown = capsys.readouterr().out
    assert "exp_avg_sq" in shown
    assert "step 3" in shown
