"""Trainer: the main job: from a recipe to a trained model, and a folder that says what happened."""

__all__: list[str] = []
