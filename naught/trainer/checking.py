"""Checking: what can be said of a recipe before any rank is started and any folder made. Reads names, and builds nothing."""

from __future__ import annotations

from pathlib import Path

from naught.config import load, refuse_auto
from naught.config.recipe import Recipe
from naught.config.resolving import engine_document
from naught.errors import UsageError
from naught.model_names import parse_model
from naught.trainer.models import is_hugging_face, weights_of
from naught.trainer.texts import find_texts

__all__ = ["check_before_start"]


def check_before_start(recipe: Recipe) -> None:
    """Raise what every rank would find as well: data and models that are not there, and what the engine cannot do."""
    refuse_auto(load(engine_document(recipe)))
    for key, path in (("data.path", recipe.data.path), ("data.validation_path", recipe.data.validation_path)):
        if path is not None and path.endswith(".npy"):
            if not Path(path).expanduser().is_file():
                raise UsageError(f'there is no file "{path}"', where=key)
        elif path is not None:
            find_texts(path)
    if not is_hugging_face(recipe):
        parse_model(recipe.model.name)
    weights_of(recipe)
