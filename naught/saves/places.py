"""Places: where the bytes of files belong in the tensors of a rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from naught.answers import Answers
from naught.checkpoints import Located, Source, Want, read_all, within
from naught.errors import CheckpointError
from naught.saves.inventory import DTYPES_BY_NAME
from naught.stored_part import StoredPart

__all__ = ["Places", "tensor_of", "unusable_on_error", "weights_written"]


_ANEW = "make the engine anew, and load again"


class Places:
    """Tensors that are to be filled, and from which bytes."""

    def __init__(self) -> None:
        self.targets: list[Tensor | StoredPart] = []
        self.wants: list[Want] = []

    def add(self, target: Tensor | StoredPart, first: int, located: Sequence[Located]) -> bool:
        """Have a tensor filled with the elements of a parameter from one on. False if they are not all there."""
        done, stop = first, first + target.numel()
        for at in within(located, first, stop):
            self.wants.append(Want(at.file, at.start, at.stop, at.dtype, len(self.targets)))
            self.targets.append(target[at.first - first : at.first - first + at.numel])
            done += at.numel
        return done == stop

    def check(self, files: Sequence[Source]) -> None:
        """Read everything, and keep nothing: a file that is damaged says so."""
        for _ in read_all(files, self.wants):
            pass

    def fill(self, files: Sequence[Source]) -> None:
        for want, first, data in read_all(files, self.wants):
            values = tensor_of(data, want.dtype)
            self.targets[want.key][first : first + values.numel()].copy_(values)


def tensor_of(data: memoryview, dtype: str) -> Tensor:
    """The elements that these bytes are, where they lie."""
    return torch.frombuffer(data, dtype=DTYPES_BY_NAME[dtype])


@contextmanager
def unusable_on_error(engine: Answers) -> Iterator[None]:
    """What fails while states are being overwritten leaves an engine that says so."""
    try:
        yield
    except BaseException as error:  # an interrupt, too
        engine.passes.away = CheckpointError(f"states were being loaded when this happened: {error}", fix=_ANEW)
        raise


def weights_written(engine: Answers) -> None:
    """The weights that this rank updates, or their masters, are others: modules compute with them from here on."""
    for unit in engine.schedule.units.values():
        for segment in unit.segments:
            if segment.trained or segment.weights.stored is not None:
                segment.written()
        unit.outdate(hide=False)
        if not unit.placement.param.split:
            unit.make_whole()
    engine.passes.drop_gradients()
