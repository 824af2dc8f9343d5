"""A disk that fails at any call of a save, on any rank, in the writer's thread too: an error on every rank, nothing half, and
training goes on."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest
from faults import faults
from menagerie import my_rank
from training import start, take_steps

from naught.checkpoints import RealDisk, Store, remove
from naught.engine import Engine
from naught.errors import NaughtError

pytestmark = pytest.mark.usefixtures("one_thread")


class Told(NamedTuple):
    """What ranks heard of a save that failed at one call of one of them."""

    at: int
    call: str
    said: str  # "": nothing
    names: list[str]


def save(engine: Engine, folder: Path, *, beside: bool) -> None:
    engine.save_checkpoint(folder, asynchronous=beside)
    engine.wait_for_checkpoint()


def steps_listed(folder: Path) -> list[int]:
    return [saved.manifest.step for saved in Store(RealDisk(), str(folder)).all()]


def fails_at_every_call(folder: Path, victim: int, what: str, *, beside: bool) -> tuple[list[Told], int]:
    """Also how many calls there are."""
    engine = start(2, "tied")
    take_steps(engine, 1)
    save(engine, folder, beside=False)
    take_steps(engine, 1, first=1)
    told: list[Told] = []
    with faults(str(folder)) as rehearsal:
        save(engine, folder, beside=beside)
    calls = engine.schedule.group.exchange_texts(",".join(rehearsal.calls))[victim].split(",")
    for at in range(len(calls)):
        engine.schedule.group.meet()
        if my_rank() == 0:
            remove(Store(RealDisk(), str(folder)), "global_step2")
        engine.schedule.group.meet()
        said = ""
        with faults(str(folder), at if my_rank() == victim else None, what):
            try:
                save(engine, folder, beside=beside)
            except NaughtError as error:
                said = f"{type(error).__name__}: {error}"
        engine.schedule.group.meet()
        told.append(Told(at, calls[at], said, sorted(path.name for path in folder.iterdir())))
        engine.schedule.group.meet()
        if said:
            assert steps_listed(folder) == [1]
            save(engine, folder, beside=beside)  # there is room again
        store = Store(RealDisk(), str(folder))
        for saved in store.all():
            store.verify(saved)
    take_steps(engine, 1, first=2)
    assert steps_listed(folder) == [1, 2]
    return told, len(calls)


def first_words(said: str) -> str:
    return said.split(" [rank")[0].split(". ")[0]


@pytest.mark.parametrize("beside", [False, True], ids=["at once", "beside"])
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("what", ["EIO", "ENOSPC", "short"])
def test_a_disk_that_fails_at_any_call_is_told_on_every_rank(two, tmp_path, victim, what, beside):
    (ours, calls), (theirs, _) = two.run(fails_at_every_call, tmp_path, victim, what, beside=beside)
    assert calls > 5
    failed = 0
    for one, other in zip(ours, theirs, strict=True):
        assert bool(one.said) == bool(other.said), f"{one} {other}"
        assert one.names == other.names
        if one.said:
            assert one.names == ["global_step1", "latest"], f"what is left of it was removed: {one}"
        else:
            assert {"global_step1", "global_step2", "latest"} <= set(one.names), one
        failed += bool(one.said)
        if one.said:
            assert one.said.startswith("StorageError: ")
            assert first_words(one.said) == first_words(other.said)
            assert ("EIO" if what == "EIO" else "ENOSPC") in one.said, one
    how = "beside" if beside else "at once"
    print(f"{what} on rank {victim}, {how}: {len(ours)} of {calls} calls struck, {failed} saves refused, 0 half done")
    assert failed >= (1 if what == "short" else len(ours) // 3)
