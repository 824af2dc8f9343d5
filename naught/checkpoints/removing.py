"""Removing: checkpoints that are not to stay, and what saves and removals that were stopped have left."""

from __future__ import annotations

import secrets
from typing import NamedTuple

from naught.checkpoints.names import GOING, POINTER, UNDER_WAY, refuse_tag, tag_of
from naught.checkpoints.store import Store

__all__ = ["Keep", "clear", "remove", "retire", "sweep"]


class Keep(NamedTuple):
    """Which checkpoints stay when a newer one is there: the last few, and every so many steps. None, None: all."""

    last: int | None = None
    every: int | None = None

    @property
    def all(self) -> bool:
        return self.last is None and self.every is None

    def holds(self, age: int, step: int) -> bool:
        """Whether the checkpoint of a step stays that has so many newer ones."""
        return self.all or age < (self.last or 1) or (self.every is not None and step % self.every == 0)


def remove(store: Store, tag: str) -> None:
    """Take a checkpoint away: from the first moment on it is none, and nobody finds half of it."""
    refuse_tag(tag)
    going = f"{GOING}{tag}-{secrets.token_hex(8)}"  # another that is still going may have had the tag
    store.disk.rename(store.path(tag), store.path(going))
    store.disk.sync_folder(store.root)
    clear(store, going)


def retire(store: Store, newest: int, keep: Keep) -> list[str]:
    """Remove what is not to be kept of the checkpoints up to a step, which is kept, the oldest first. Those of another name
    than we give, and of later steps, are somebody's own. Returns the tags of what is gone."""
    ours = [saved for saved in store.all() if saved.tag == tag_of(saved.manifest.step) and saved.manifest.step <= newest]
    ages = range(len(ours) - 1, -1, -1)
    gone = [saved.tag for age, saved in zip(ages, ours, strict=True) if not keep.holds(age, saved.manifest.step)]
    for tag in gone:
        remove(store, tag)
    return gone


def sweep(store: Store) -> list[str]:
    """Remove what saves and removals that were stopped have left. What a living process holds is not touched."""
    left = [name for name in store.disk.names(store.root) if name.startswith((UNDER_WAY, GOING))]
    return [name for name in left if _swept(store, name)]


def _swept(store: Store, name: str) -> bool:
    if name.startswith(POINTER):
        store.disk.remove(store.path(name))
        return True
    if not store.disk.is_folder(store.path(name)):
        return False  # somebody else's
    hold = store.disk.hold(store.path(name))
    if hold is None:
        return False
    try:
        clear(store, name)
    finally:
        hold.let_go()
    return True


def clear(store: Store, folder: str) -> None:
    """Remove a folder that is no checkpoint, or no longer one."""
    for name in store.disk.names(store.path(folder)):
        store.disk.remove(store.path(folder, name))
    store.disk.remove_folder(store.path(folder))
