"""Measuring: what this machine does in a second. For `naught bench` and `naught doctor`; nothing here runs while training."""

__all__: list[str] = []
