"""Preparing: from a recipe to an engine and its data, on every rank alike."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from naught.comm import Group, get_local_rank
from naught.config import derive_batch
from naught.config.recipe import Recipe
from naught.config.resolving import engine_document
from naught.data import Loader, loader_of
from naught.engine import Engine
from naught.errors import PlacementError, UsageError
from naught.extras import need
from naught.quantity import show_bytes
from naught.start import initialize
from naught.trainer.corpus import Corpus, open_corpus, prepare_corpus
from naught.trainer.forecasting import expect
from naught.trainer.introducing import Introduction
from naught.trainer.models import build_model, recompute_blocks, weights_of
from naught.trainer.windows import Windows

__all__ = ["Prepared", "Samples", "prepare"]


class Samples(NamedTuple):
    """A rank's share of the data to train on, and all data to validate with."""

    train: Loader
    validation: Windows


class Prepared(NamedTuple):
    """What a run is, and an engine that can train it."""

    introduction: Introduction
    engine: Engine
    validation: Windows


def prepare(recipe: Recipe, group: Group, folder: Path, introduce: Callable[[Introduction], None]) -> Prepared:
    """Read the data, build the model, say what will be done, and only then split it."""
    with group.together():
        if get_local_rank() == 0:
            prepare_corpus(recipe)
    with group.together():
        if recipe.train.trackio:
            need("trackio", where="train.trackio", fix="set train.trackio to false")
        corpus = open_corpus(recipe, prepare_corpus(recipe))
        model = build_model(recipe, corpus)
        weights = weights_of(recipe)
        batch = derive_batch(recipe, group.size)
        samples = _samples(recipe, corpus, group, batch.micro)
        expected = expect(model, recipe, batch, group.size)
        _refuse_too_little(recipe, expected.activations)
        introduction = Introduction(recipe, corpus, batch, expected, model, weights, group.size)
    introduce(introduction)
    if recipe.model.checkpointing:
        recompute_blocks(model)
    document = engine_document(recipe)
    limited = recipe.naught.placement != "stage" or recipe.naught.gpu_memory is not None
    if limited and recipe.naught.activation_memory is None and expected.activations:
        document["naught"]["activation_memory"] = expected.activations
    engine = initialize(model=model, config=_in_folder(document, folder))[0]
    engine.training_dataloader = samples.train
    if weights is not None:
        engine.load_weights(weights)
    if recipe.model.compile:
        engine.compile()
    if recipe.train.trackio and group.rank == 0:
        engine.monitor.also_to_trackio("naught", folder.name)
    return Prepared(introduction, engine, samples.validation)


def _refuse_too_little(recipe: Recipe, activation_bytes: int) -> None:
    most = recipe.naught.gpu_memory
    if most is not None and recipe.naught.activation_memory is None and activation_bytes >= most:
        raise PlacementError(
            f"activations alone would take {show_bytes(activation_bytes)} of the {show_bytes(most)} that a rank may have",
            where="naught.gpu_memory",
            fix="raise it, or train with smaller micro-batches, shorter sequences or model.checkpointing=true",
        )


def _in_folder(document: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Monitors write into the run's folder unless they are told another."""
    for name in ("tensorboard", "csv_monitor"):
        block = document.get(name)
        if block is not None and "output_path" not in block:
            document[name] = block | {"output_path": str(folder), "job_name": name}
    return document


def _samples(recipe: Recipe, corpus: Corpus, group: Group, micro: int) -> Samples:
    rows = Windows(corpus.train, recipe.data.seq, what="training data")
    if len(rows) < micro * group.size:
        raise UsageError(
            f"the training data has {len(rows)} samples of {recipe.data.seq} tokens; the ranks need {micro * group.size} at once",
            where="data",
            fix="give more text, or make data.seq, the micro-batch or the number of ranks smaller",
        )
    loader = loader_of(rows, batch_size=micro, rank=group.rank, world=group.size, drop_last=True, seed=recipe.train.seed)
    return Samples(loader, Windows(corpus.validation, recipe.data.seq, what="validation data"))
