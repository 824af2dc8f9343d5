"""Contents: the tensors of a checkpoint, whole, read a block at a time. Needs neither the ranks nor the model that wrote it."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from naught.checkpoints import Located, Param, Saved, Store, locate, within
from naught.errors import CheckpointDamaged
from naught.saves.inventory import WEIGHTS
from naught.saves.own_states import BUFFER, OWN, RANDOM
from naught.saves.places import tensor_of

__all__ = ["Contents"]

_BLOCK_BYTES = 8 << 20  # a multiple of every element's


class Contents:
    """A checkpoint, opened. Of what every rank had for itself it is the first one's."""

    def __init__(self, store: Store, saved: Saved) -> None:
        self.saved = saved
        self.tables = [store.table(saved, rank) for rank in range(saved.manifest.world)]
        self.files = [store.shard(saved, table) for table in self.tables]
        self.located = locate(self.tables)
        # Parameters and buffers, by name.
        self.params: dict[str, Param] = {
            name.removeprefix(BUFFER): param for name, param in saved.manifest.params.items() if not name.startswith(RANDOM)
        }

    def buffers(self) -> set[str]:
        return {name.removeprefix(BUFFER) for name in self.saved.manifest.params if name.startswith(BUFFER)}

    def kinds(self) -> dict[tuple[str, str], str]:
        """What there is of each of them, and in which type: weights, and what an optimizer remembers."""
        found: dict[tuple[str, str], str] = {}
        for (kind, name), located in self.located.items():
            if not name.startswith(RANDOM):
                found[name.removeprefix(BUFFER), WEIGHTS if kind == OWN else kind] = located[0].dtype
        return found

    def read(self, name: str, kind: str = WEIGHTS, first: int = 0, stop: int | None = None) -> Iterator[Tensor]:
        """Elements in their order, checked, in blocks that are good until the next."""
        stop = self.params[name].numel if stop is None else stop
        for at in within(self._located(name, kind), first, stop):
            for start in range(at.start, at.stop, _BLOCK_BYTES):
                yield tensor_of(self.files[at.file].read(start, min(start + _BLOCK_BYTES, at.stop)), at.dtype)
            first = at.first + at.numel
        if first < stop:
            raise CheckpointDamaged(f'{self.saved.tag} does not have all of "{name}" ({kind})', fix="load another checkpoint")

    def _located(self, name: str, kind: str) -> list[Located]:
        return self.located.get((kind, name)) or self.located.get((OWN, f"{BUFFER}{name}")) or []
