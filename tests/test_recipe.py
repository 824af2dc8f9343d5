"""What `naught train` is told: by a file, by the command line, or by nobody; and where each value came from."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest

from naught.config import keys, load
from naught.config.recipe import DEMO_MODEL, Recipe
from naught.config.resolving import engine_document, parse_override, resolve
from naught.errors import ConfigError, UsageError

YAML = find_spec("yaml") is not None


def resolved(*words: str, source=None):
    return resolve(source, [parse_override(word) for word in words])


def test_without_a_word_it_is_the_demo_at_stage_3():
    recipe = resolved().recipe
    assert recipe.zero_optimization.stage == 3
    assert recipe.model.name == DEMO_MODEL
    assert recipe.data.path is None
    assert recipe.optimizer.type == "AdamW"
    assert recipe.scheduler.params.total_num_steps == recipe.train.steps


@pytest.mark.parametrize(
    ("word", "path", "value"),
    [
        ("steps=20", "train.steps", 20),
        ("train.steps=20", "train.steps", 20),
        ("stage=1", "zero_optimization.stage", 1),
        ("model=gpt2", "model.name", "gpt2"),
        ("data=~/my texts/*.txt", "data.path", "~/my texts/*.txt"),
        ("lr=1e-4", "optimizer.params.lr", 1e-4),
        ("optimizer.params.betas=[0.8, 0.9]", "optimizer.params.betas", (0.8, 0.9)),
        ("bf16.enabled=true", "bf16.enabled", True),
        ("weights=null", "model.weights", None),
        ("seq=64", "data.seq", 64),
        ("micro_batch=3", "train_micro_batch_size_per_gpu", 3),
        ("gradient_clipping=0.5", "gradient_clipping", 0.5),
    ],
)
def test_a_word_sets_a_key_by_its_path_or_by_its_last_name(word, path, value):
    found = resolved(word)
    held = found.recipe
    for name in path.split("."):
        held = getattr(held, name)
    assert held == value
    assert found.origins[path] == f"{word.partition('=')[0]}= on the command line"


def test_a_changed_rate_leaves_the_rest_of_the_optimizer_as_it_was():
    params = resolved("lr=0.5").recipe.optimizer.params
    assert (params.lr, params.betas, params.weight_decay) == (0.5, (0.9, 0.95), 0.1)


def test_the_schedule_is_as_long_as_the_run_unless_there_is_one(tmp_path):
    assert resolved("steps=77").recipe.scheduler.params.total_num_steps == 77
    assert resolved("steps=1").recipe.train.steps == 1, "a single step needs no schedule, and has one all the same"
    file = tmp_path / "ds.json"
    file.write_text('{"scheduler": {"type": "WarmupLR"}}')
    assert resolved("steps=77", source=file).recipe.scheduler.type == "WarmupLR"


def test_a_plain_deepspeed_file_is_a_recipe(tmp_path):
    file = tmp_path / "ds.json"
    file.write_text('{\n"train_batch_size": 8,\n"zero_optimization": {"stage": 2},\n"model": "gpt2",\n"data": "x.txt"}')
    found = resolved("steps=5", source=file)
    assert found.recipe.zero_optimization.stage == 2
    assert found.recipe.model.name == "gpt2"
    assert found.recipe.data.path == "x.txt"
    assert found.recipe.train_micro_batch_size_per_gpu is None, "it has a batch of its own"
    assert found.origins["zero_optimization.stage"] == f"{file} line 3"


def test_the_engine_gets_what_is_deepspeeds_and_nothing_else():
    document = engine_document(resolved("steps=5", "bf16.enabled=true").recipe)
    assert load(document).bf16.enabled
    assert not {"model", "data", "train"} & set(document)


def test_what_was_given_makes_the_same_recipe_again_with_other_steps():
    first = resolved("steps=50", "lr=0.1", "stage=2")
    again = resolve(json.loads(json.dumps(first.given)), [parse_override("steps=90")])
    assert again.recipe.scheduler.params.total_num_steps == 90, "what was derived is derived anew"
    assert again.recipe.optimizer == first.recipe.optimizer
    assert again.recipe.zero_optimization == first.recipe.zero_optimization


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["train.stepz=5"], "train.stepz: unknown key; did you mean steps?"),
        (["train.steps=0"], "train.steps: must be a whole number from 1, is 0"),
        (["train.steps=many"], 'train.steps: must be a whole number from 1, is "many" (a text)'),
        (["stage=7", "data.seq=-1"], "the command line has 2 problems"),
        (["zero_optimization.steps=3"], "zero_optimization.steps: unknown key; it belongs in train"),
        (["train.backend=mpi"], 'train.backend: must be "auto" or "gloo" or "nccl"'),
    ],
)
def test_mistakes_in_values_are_all_told_at_once(words, said):
    with pytest.raises(ConfigError) as caught:
        resolved(*words)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("stepz=5", 'no key "stepz"; did you mean steps?'),
        ("steps", '"steps" sets no key. Write key=value, such as train.steps=200, or "steps=..."'),
        ("=5", '"=5" sets no key'),
        ("--", '"--" sets no key'),
    ],
)
def test_words_that_set_nothing_are_refused(word, said):
    with pytest.raises(UsageError) as caught:
        parse_override(word)
    assert said in str(caught.value)


def test_a_value_below_a_plain_one_is_refused():
    with pytest.raises(UsageError, match="train_batch_size is not an object"):
        resolved("train_batch_size=4", "train_batch_size.x=1")


def test_every_key_of_a_recipe_says_what_it_does():
    ours = [entry for entry in keys.entries(Recipe) if entry.path.split(".")[0] in ("model", "data", "train")]
    assert len(ours) > 15
    for entry in ours:
        assert entry.key.does, entry.path


@pytest.mark.skipif(not YAML, reason="needs pyyaml")
def test_yaml_says_the_same_as_json(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("model: gpt2\ntrain: {steps: 5}\noptimizer:\n  type: AdamW\n  params:\n    lr: 1e-4\n")
    found = resolved(source=file)
    assert found.recipe.optimizer.params.lr == 1e-4
    assert found.recipe.model.name == "gpt2"
    assert found.origins["optimizer.params.lr"] == f"{file} line 6"


@pytest.mark.skipif(not YAML, reason="needs pyyaml")
@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("train:\n  steps: 5\n  steps: 6\n", "train.steps (line 3): appears twice (lines 2 and 3)"),
        ("train:\n  stepz: 5\n", "train.stepz (line 2): unknown key; did you mean steps?"),
        ("- 1\n- 2\n", "must be a mapping of keys to values"),
        ("", "must be a mapping of keys to values"),
        ("a: [1\n", "(line 2): not valid YAML"),
        ("a: !!python/name:os.system x\n", "not valid YAML"),
        ("&a [*a]", "not valid YAML"),
        ("? [1, 2]\n: 3\n", "(line 1): a key must be a plain text"),
        ("<<: {a: 1}\n", "(line 1): a key must be a plain text"),
    ],
)
def test_mistakes_in_yaml_are_told_with_their_lines(tmp_path, text, said):
    file = tmp_path / "run.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        resolved(source=file)
    assert said in str(caught.value)


def test_a_file_that_is_not_there_is_one_line(tmp_path):
    with pytest.raises(ConfigError, match="there is no such file"):
        resolve(Path(tmp_path, "absent.json"), [])
