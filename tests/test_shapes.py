"""Models are counted to the parameter, from a name, a text, a count or a config.json."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from naught.errors import ModelError, NaughtError
from naught.hugging_face import transformer_from_hf
from naught.model_names import parse_model
from naught.presets import PRESETS, gpt_of_count

# Parameter counts that the models' authors publish.
PUBLISHED = {
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-1.5b": 1_557_611_200,
    "llama-7b": 6_738_415_616,
    "llama-13b": 13_015_864_320,
    "llama-65b": 65_285_660_672,
    "llama2-70b": 68_976_648_192,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3-405b": 405_853_388_800,
    "llama3.2-1b": 1_235_814_400,
    "mistral-7b": 7_241_732_096,
    "qwen2.5-7b": 7_615_616_512,
}
SMALL = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128, "vocab_size": 101}
# Counted on modules that transformers 5.22 built from these configurations.
BUILT = [
    ({"model_type": "gpt2", "n_layer": 3, "n_embd": 96, "n_head": 4, "vocab_size": 311, "n_positions": 77}, 372_960),
    ({"model_type": "gptj", "n_layer": 2, "n_embd": 64, "n_head": 4, "vocab_size": 99, "tie_word_embeddings": False}, 112_099),
    ({"model_type": "gpt_neox", **SMALL, "tie_word_embeddings": False}, 80_000),
    ({"model_type": "opt", **SMALL, "ffn_dim": 128, "max_position_embeddings": 33}, 75_776),
    ({"model_type": "bloom", "n_layer": 2, "hidden_size": 64, "n_head": 4, "vocab_size": 101}, 106_688),
    ({"model_type": "bloom", "n_layer": 2, "n_embed": 64, "num_attention_heads": 4, "vocab_size": 101}, 106_688),
    ({"model_type": "llama", **SMALL, "num_key_value_heads": 2}, 86_976),
    ({"model_type": "llama", **SMALL, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}, 89_856),
    ({"model_type": "mistral", **SMALL, "num_key_value_heads": 2, "head_dim": 24}, 99_264),
    ({"model_type": "qwen2", **SMALL, "num_key_value_heads": 2}, 87_232),
    ({"model_type": "qwen3", **SMALL, "num_key_value_heads": 2, "head_dim": 24}, 99_360),
    ({"model_type": "gemma", **SMALL, "num_key_value_heads": 1, "head_dim": 24}, 86_656),
    ({"model_type": "gemma2", **SMALL, "num_key_value_heads": 2, "head_dim": 24}, 93_056),
    ({"model_type": "phi", **SMALL}, 79_845),
    ({"model_type": "phi3", **SMALL, "num_key_value_heads": 2}, 86_976),
    ({"model_type": "starcoder2", **SMALL, "num_key_value_heads": 2}, 65_216),
]


@pytest.mark.parametrize(("name", "numel"), PUBLISHED.items())
def test_presets_have_their_published_number_of_parameters(name, numel):
    assert parse_model(name).numel == numel


@pytest.mark.parametrize(("config", "numel"), BUILT, ids=lambda value: value["model_type"] if isinstance(value, dict) else "")
def test_hugging_face_configurations_are_counted_exactly(config, numel, tmp_path):
    assert sum(run.numel * run.repeat for run in transformer_from_hf(config).runs) == numel
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    assert parse_model(str(tmp_path)).numel == parse_model(str(tmp_path / "config.json")).numel == numel


@pytest.mark.parametrize("name", [name for name in PRESETS if name.startswith(("zero-", "offload-", "infinity-"))])
def test_the_papers_shapes_are_twelve_layers_hidden_squared_and_what_their_name_says(name):
    shape = PRESETS[name]
    numel = parse_model(name).numel
    assert numel == 12 * shape.layers * shape.hidden**2
    size = name.partition("-")[2]
    said = float(size[:-1]) * {"b": 1e9, "t": 1e12}[size[-1]]
    assert abs(numel / said - 1) < 0.05


def test_gpt_text_is_a_gpt2():
    assert parse_model("gpt:layers=48,hidden=1600,heads=25,vocab=50257,positions=1024").numel == PUBLISHED["gpt2-1.5b"]


@given(st.integers(1, 10**16))
def test_a_bare_count_becomes_a_gpt_of_that_size(numel):
    model = gpt_of_count(numel)
    assert 0 <= model.numel - numel < model.shape.layers
    assert model.shape.hidden % 64 == 0
    assert "only a count was given" in model.note


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("gpt2-1.5", "did you mean gpt2-1.5b"),
        ("nonsense", "no model"),
        ("gpt:layers=4", "does not say hidden"),
        ("gpt:layers=4,hiden=8", "did you mean hidden"),
        ("gpt:layers=4,hidden=8,layers=5", "stands twice"),
        ("gpt:layers=x,hidden=8", "must be a whole number"),
        ("gpt:layers=0,hidden=8", "must be a whole number from 1"),
        ("gpt:layers=2,hidden=10,heads=4", "heads must divide hidden"),
        ("0", "has no parameters"),
        ("-5B", "no model"),
        ("1e99B", "no model"),
        ("x" * 5000, "no model"),
        ("a\0b", "no model"),
    ],
)
def test_a_model_that_cannot_be_meant_gets_a_clear_error(text, message):
    with pytest.raises(ModelError, match=message):
        parse_model(text)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "no model_type"),
        ({"model_type": "mixtral"}, "Known types: gpt2"),
        ({"model_type": ["llama"]}, "not one that the planner can count"),
        ({"model_type": "llama"}, "does not say num_hidden_layers"),
        ({"model_type": "llama", **SMALL, "hidden_size": "64"}, "hidden_size must be a positive whole number"),
        ({"model_type": "llama", **SMALL, "hidden_size": True}, "hidden_size must be a positive whole number"),
        ({"model_type": "llama", **SMALL, "num_attention_heads": 0}, "num_attention_heads must be a positive"),
        ({"model_type": "llama", **SMALL, "num_attention_heads": 5}, "do not divide"),
        ({"model_type": "llama", **SMALL, "num_key_value_heads": 8}, "do not divide"),
        ({"model_type": "llama", **SMALL, "tie_word_embeddings": "false"}, "tie_word_embeddings must be a boolean"),
        ({"model_type": "opt", **SMALL, "ffn_dim": 128, "word_embed_proj_dim": 32}, "word_embed_proj_dim is not hidden_size"),
        ({"model_type": "llama", **SMALL, "attention_bias": 1}, "attention_bias must be a boolean"),
    ],
)
def test_a_configuration_that_is_no_model_gets_a_clear_error(config, message):
    with pytest.raises(ModelError, match=message):
        transformer_from_hf(config)


@pytest.mark.parametrize("content", [b"", b"[1]", b"{", b"\xff\xfe", b"[" * 100_000])
def test_a_file_that_is_no_configuration_gets_a_clear_error(content, tmp_path):
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(NaughtError, match=r"config\.json"):
        parse_model(str(path))
