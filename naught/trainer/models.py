"""Models: from a name in a recipe to a module that gives its own loss. Ours by shape, Hugging Face's by configuration."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from naught.comm import get_local_rank
from naught.config.recipe import Recipe
from naught.errors import ModelError, UsageError
from naught.extras import package
from naught.model_names import parse_model
from naught.trainer.corpus import Corpus, refuse_strange
from naught.trainer.gpt import Gpt

__all__ = ["build_model", "is_hugging_face", "loss_of", "recompute_blocks", "weights_of"]


def build_model(recipe: Recipe, corpus: Corpus) -> nn.Module:
    """The model, with random weights that depend on the seed alone."""
    torch.manual_seed(recipe.train.seed)
    if is_hugging_face(recipe):
        return _hugging_face(recipe, corpus)
    model = parse_model(recipe.model.name)
    assert model.shape is not None, "only a module from Python has none"
    shape = model.shape if model.shape.vocab else replace(model.shape, vocab=corpus.vocab or 256)
    _refuse_small(recipe, corpus, vocab=shape.vocab, positions=shape.positions)
    return Gpt(shape)


def recompute_blocks(model: nn.Module) -> None:
    """From here on keep the inputs of blocks only, and compute the rest again in the backward."""
    if isinstance(model, Gpt):
        model.checkpointing = True
    else:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})  # type: ignore[operator]


def loss_of(output: Any) -> Tensor:
    """The loss in what a model returned."""
    if isinstance(output, Tensor):
        return output
    loss: Tensor = output.loss  # a Hugging Face output
    return loss


def weights_of(recipe: Recipe) -> Path | None:
    """Where the weights to start from are; None: they are random."""
    given = recipe.model.weights
    if given is None:
        return None
    if given != "auto":
        path = Path(given).expanduser()
        if not path.exists():
            raise UsageError(f'there are no weights at "{given}"', where="model.weights", fix="give a safetensors file or folder")
        return path
    folder = Path(recipe.model.name).expanduser()
    folder = folder if folder.is_dir() else folder.parent
    if is_hugging_face(recipe) and any(folder.glob("pytorch_model*.bin")) and not any(folder.glob("*.safetensors")):
        raise UsageError(
            f'the weights in "{folder}" are pickles, which are never loaded',
            where="model.weights",
            fix="convert them to safetensors, or set weights=null to start from random ones",
        )
    return folder if is_hugging_face(recipe) and any(folder.glob("*.safetensors")) else None


def is_hugging_face(recipe: Recipe) -> bool:
    """Whether a model is named by its configuration on this machine, and not by ours."""
    name = recipe.model.name
    return not name.startswith("gpt:") and Path(name).expanduser().exists()


def _refuse_small(recipe: Recipe, corpus: Corpus, *, vocab: int, positions: int) -> None:
    if positions and recipe.data.seq > positions:
        raise ModelError(
            f"{recipe.model.name} has {positions} positions, and a sample {recipe.data.seq} tokens",
            fix=f"set data.seq to {positions} or less, or give the model more positions",
        )
    if not corpus.vocab and get_local_rank() == 0:
        refuse_strange(corpus, vocab)
    if corpus.vocab > vocab:
        raise ModelError(
            f"{recipe.model.name} knows {vocab} tokens, and the tokenizer makes {corpus.vocab}",
            fix=f"give the model vocab={corpus.vocab}, or another data.tokenizer",
        )


def _hugging_face(recipe: Recipe, corpus: Corpus) -> nn.Module:
    transformers = package("transformers", where="model.name", fix="name a preset or gpt:layers=...")
    path = Path(recipe.model.name).expanduser()
    try:
        config = transformers.AutoConfig.from_pretrained(path, local_files_only=True)
        model = transformers.AutoModelForCausalLM.from_config(config)
    except (OSError, ValueError, KeyError) as error:
        said = str(error).strip().splitlines()[0]
        raise ModelError(f'"{path}" is no causal language model: {said}', where="model.name") from error
    _refuse_small(recipe, corpus, vocab=config.vocab_size, positions=getattr(config, "max_position_embeddings", 0) or 0)
    model.config.use_cache = False
    made: nn.Module = model.train()
    return made
