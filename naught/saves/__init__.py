"""Saves: an engine's training becomes a checkpoint, and a checkpoint training, whatever world, stage and precision."""

__all__: list[str] = []
