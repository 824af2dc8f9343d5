"""Checkpoints on a disk that fails, lies and loses power: whole or absent, and never silently wrong."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import random
import stat
import struct
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from crashing import Crash, Folder, Inode, MemoryDisk
from faults import faults

from naught.checkpoints import (
    CHUNK_BYTES,
    Disk,
    Draft,
    Keep,
    Manifest,
    Param,
    Piece,
    RealDisk,
    Run,
    Sealed,
    Store,
    Table,
    Want,
    header_of,
    read_all,
    remove,
    retire,
    sweep,
    write_shard,
)
from naught.checkpoints.manifest import parse, text_of
from naught.errors import CheckpointDamaged, CheckpointError, NaughtError, StorageError

SOAK = os.environ.get("NAUGHT_SOAK") == "1"
WORLD, NUMEL = 3, 10
NAMES = ("tok.weight", "blocks.0.up.weight", "blocks.0.up.bias", "head.weight")


def number(step: int, name: str, element: int) -> float:
    return step * 1000.0 + NAMES.index(name) * 100 + element


def save(disk: Disk, step: int, root: str = "r") -> None:
    """Three ranks save four parameters of ten elements, each rank a stretch of them as they lie in one flat."""
    store = Store(disk, root)
    tag, identity = f"global_step{step}", f"{step:032x}"
    draft = Draft(store, tag, identity)
    draft.begin(0)
    sealed = [draft.write_rank(*contents(step, identity, rank)) for rank in range(WORLD)]
    draft.commit(manifest_of(step, identity, sealed))


def contents(step: int, identity: str, rank: int) -> tuple[Table, bytes, list[bytes]]:
    flat = [(name, element) for name in NAMES for element in range(NUMEL)]
    mine = flat[rank * len(flat) // WORLD : (rank + 1) * len(flat) // WORLD]
    pieces: list[Piece] = []
    for at, (name, element) in enumerate(mine):
        if pieces and pieces[-1].param == name:
            pieces[-1] = pieces[-1].model_copy(update={"count": pieces[-1].count + 1})
        else:
            pieces.append(Piece(param=name, first=element, count=1, at=at))
    header, (entry,) = header_of([("weights", "F32", (len(mine),))], {"save": identity, "rank": str(rank)})
    run = Run(kind="weights", dtype="F32", start=entry.start, count=len(mine), pieces=tuple(pieces))
    data = struct.pack(f"<{len(mine)}f", *(number(step, *element) for element in mine))
    table = Table.model_construct(format=1, save=identity, rank=rank, nbytes=entry.stop, checksums=(), runs=(run,))
    return table, header, [data[:12], data[12:]]


def manifest_of(step: int, identity: str, sealed: list[Sealed]) -> Manifest:
    params = {name: Param(shape=(2, 5), trained=True, updates=step) for name in NAMES}
    return Manifest(format=1, save=identity, step=step, tables=tuple(sealed), params=params, engine={"samples": 7 * step})


def read(store: Store, tag: str) -> dict[str, list[float]]:
    """Everything in a checkpoint, element by element."""
    saved = store.find(tag)
    found = {name: [float("nan")] * param.numel for name, param in saved.manifest.params.items()}
    for rank in range(saved.manifest.world):
        table = store.table(saved, rank)
        file = store.shard(saved, table)
        for run in table.runs:
            for piece in run.pieces:
                raw = file.read(run.start + 4 * piece.at, run.start + 4 * (piece.at + piece.count))
                found[piece.param][piece.first : piece.first + piece.count] = struct.unpack(f"<{piece.count}f", raw)
    return found


def wanted(step: int) -> dict[str, list[float]]:
    return {name: [number(step, name, element) for element in range(NUMEL)] for name in NAMES}


def fresh() -> MemoryDisk:
    disk = MemoryDisk()
    disk.make_folder("/r")
    disk.sync_folder("")
    return disk


ROOT = "/r"


def steps_of(disk: Disk) -> list[int]:
    return [saved.manifest.step for saved in Store(disk, ROOT).all()]


# --- a good disk ------------------------------------------------------------------------------------------------------


def test_what_is_saved_is_found_listed_verified_and_read(tmp_path):
    disk = RealDisk()
    for step in (2, 10, 1):
        save(disk, step, str(tmp_path))
    store = Store(disk, str(tmp_path))
    assert [saved.tag for saved in store.all()] == ["global_step1", "global_step2", "global_step10"]
    for saved in store.all():
        store.verify(saved)
        assert read(store, saved.tag) == wanted(saved.manifest.step)
        assert saved.manifest.engine == {"samples": 7 * saved.manifest.step}
    remove(store, "global_step2")
    assert [saved.tag for saved in store.all()] == ["global_step1", "global_step10"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["global_step1", "global_step10"]


def test_a_shard_is_a_safetensors_file(tmp_path):
    from safetensors import safe_open

    save(RealDisk(), 3, str(tmp_path))
    with safe_open(tmp_path / "global_step3" / "rank-00001.safetensors", "np") as file:
        assert file.metadata() == {"save": f"{3:032x}", "rank": "1"}
        assert file.get_tensor("weights")[0] == number(3, NAMES[1], 3)


def test_files_are_private_and_a_tag_is_never_overwritten(tmp_path):
    before = os.umask(0)
    try:
        save(RealDisk(), 3, str(tmp_path))
    finally:
        os.umask(before)
    folder = tmp_path / "global_step3"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}
    with pytest.raises(CheckpointError, match="there already, and a checkpoint is never overwritten"):
        save(RealDisk(), 3, str(tmp_path))


@pytest.mark.parametrize("tag", ["", ".hidden", "../up", "a/b", "a" * 121, "a\0b", "ä"])
def test_a_tag_cannot_lead_elsewhere(tag, tmp_path):
    with pytest.raises(CheckpointError, match="cannot be a tag"):
        Draft(Store(RealDisk(), str(tmp_path)), tag, "0" * 32).begin(0)


def test_what_is_not_there_is_said_with_what_is(tmp_path):
    store = Store(RealDisk(), str(tmp_path))
    with pytest.raises(CheckpointError, match=r"no checkpoint .*global_step9. There is no whole one"):
        store.find("global_step9")
    save(RealDisk(), 3, str(tmp_path))
    (tmp_path / "mine").mkdir()
    with pytest.raises(CheckpointError, match=r"mine has no manifest: .* Whole ones here: global_step3"):
        store.find("mine")
    with pytest.raises(StorageError, match=r"nowhere: No such file or directory \(ENOENT\). Look whether"):
        Store(RealDisk(), str(tmp_path / "nowhere")).all()


def test_large_shards_have_a_checksum_for_every_chunk(tmp_path):
    store, identity = Store(RealDisk(), str(tmp_path)), "a" * 32
    draft = Draft(store, "big", identity)
    draft.begin(0)
    count = 3 * CHUNK_BYTES // 4
    header, (entry,) = header_of([("weights", "F32", (count,))], {})
    run = Run(kind="weights", dtype="F32", start=entry.start, count=count, pieces=(Piece(param="p", first=0, count=count, at=0),))
    table = Table.model_construct(format=1, save=identity, rank=0, nbytes=entry.stop, checksums=(), runs=(run,))
    data = random.Random(0).randbytes(4 * count)
    sealed = draft.write_rank(table, header, [data[: CHUNK_BYTES + 5], data[CHUNK_BYTES + 5 :]])
    params = {"p": Param(shape=(count,), trained=True)}
    draft.commit(Manifest(format=1, save=identity, step=1, tables=(sealed,), params=params, engine={}))
    saved = store.find("big")
    file = store.shard(saved, store.table(saved, 0))
    assert len(file.shard.checksums) == 4
    for start, stop in ((0, 10), (CHUNK_BYTES - 3, CHUNK_BYTES + 3), (5, 4 * count), (7, 7)):
        assert file.read(entry.start + start, entry.start + stop) == data[start:stop]
    path = tmp_path / "big" / "rank-00000.safetensors"
    raw = bytearray(path.read_bytes())
    raw[2 * CHUNK_BYTES + 9] ^= 1
    path.write_bytes(raw)
    assert file.read(entry.start, entry.start + CHUNK_BYTES)  # what is not damaged can be read
    with pytest.raises(CheckpointDamaged, match=r"rank-00000.safetensors is damaged in chunk 2 \(from byte 2097152\)"):
        store.verify(saved)


# --- what stays -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keep", "left"),
    [
        (Keep(), [1, 2, 3, 4, 5, 6]),
        (Keep(last=2), [5, 6]),
        (Keep(last=1, every=2), [2, 4, 6]),
        (Keep(every=3), [3, 6]),
        (Keep(last=9), [1, 2, 3, 4, 5, 6]),
    ],
)
def test_the_last_ones_and_every_nth_stay(keep, left):
    disk = fresh()
    for step in range(1, 7):
        save(disk, step, ROOT)
        retire(Store(disk, ROOT), step, keep)
    assert steps_of(disk) == left


def test_what_somebody_has_named_and_what_is_newer_stays(tmp_path):
    for step in (1, 2, 3, 9):
        save(RealDisk(), step, str(tmp_path))
    (tmp_path / "global_step1").rename(tmp_path / "best")
    store = Store(RealDisk(), str(tmp_path))
    assert retire(store, 3, Keep(last=1)) == ["global_step2"]
    assert sorted(saved.tag for saved in store.all()) == ["best", "global_step3", "global_step9"]


def test_what_a_living_process_writes_is_not_swept_away(tmp_path):
    ours, other = Store(RealDisk(), str(tmp_path)), Store(RealDisk(), str(tmp_path))
    draft = Draft(ours, "t", "0" * 32)
    draft.begin(0)
    assert sweep(other) == []
    draft.let_go()  # as the system does when the process dies
    assert sweep(other) == [draft.folder]
    assert list(tmp_path.iterdir()) == []


# --- reading ----------------------------------------------------------------------------------------------------------


class Counted:
    """A file of numbers that counts what is read of it."""

    def __init__(self, data: bytes) -> None:
        self.data, self.reads = data, []

    def read(self, start: int, stop: int, into: memoryview | None = None) -> memoryview:
        del into
        self.reads.append((start, stop))
        return memoryview(self.data)[start:stop]


@pytest.mark.parametrize("seed", range(30))
def test_wanted_elements_are_read_in_few_reads_and_none_twice(seed):
    dice = random.Random(seed)
    sizes = {"F32": 4, "BF16": 2, "U8": 1}
    files = [Counted(dice.randbytes(dice.randrange(1, 40) * (1 << 20) + dice.randrange(9))) for _ in range(2)]
    wants = []
    for number, file in enumerate(files):
        at = dice.randrange(5000)
        while at < len(file.data):
            dtype = dice.choice(sorted(sizes))
            numel = min((len(file.data) - at) // sizes[dtype], dice.choice([0, 1, 3, 1000, 300_000, 9_000_000]))
            wants.append(Want(number, at, at + numel * sizes[dtype], dtype, len(wants)))
            at = wants[-1].stop + dice.choice([0, 0, 1, 40_000, 3 << 20])
    dice.shuffle(wants)
    found = {want.key: bytearray(want.stop - want.start) for want in wants}
    for want, first, data in read_all(files, wants):
        at = first * sizes[want.dtype]
        found[want.key][at : at + len(data)] = data
    for want in wants:
        assert found[want.key] == files[want.file].data[want.start : want.stop]
    for at, file in enumerate(files):
        chunks = {
            chunk
            for want in wants
            if want.file == at and want.stop > want.start
            for chunk in range(want.start // CHUNK_BYTES, (want.stop - 1) // CHUNK_BYTES + 1)
        }
        read = [chunk for start, stop in file.reads for chunk in range(start // CHUNK_BYTES, (stop - 1) // CHUNK_BYTES + 1)]
        assert set(read) == chunks
        assert len(read) <= len(chunks) + len(chunks) // 8 + 1, "but for elements that lie across the end of a block"


# --- a disk that fails ------------------------------------------------------------------------------------------------


def calls_of_a_save() -> int:
    disk = fresh()
    disk.calls = 0
    save(disk, 1, ROOT)
    return disk.calls


def test_an_error_at_any_call_is_told_and_the_last_checkpoint_stays():
    for at in range(calls_of_a_save()):
        disk = fresh()
        save(disk, 1, ROOT)
        disk.calls, disk.stop_at, disk.fault = 0, at, StorageError("cannot write: No space left on device (ENOSPC)")
        with pytest.raises(StorageError, match="ENOSPC"):
            save(disk, 2, ROOT)
        disk.stop_at = None
        assert steps_of(disk) == [1]
        assert read(Store(disk, ROOT), "global_step1") == wanted(1)
        sweep(Store(disk, ROOT))
        assert not [name for name in disk.names(ROOT) if name.startswith(".")]
        save(disk, 3, ROOT)
        assert steps_of(disk)[-1] == 3


def crashes(action: Any, count: int) -> Iterator[tuple[MemoryDisk, int]]:
    """Disks after crashes at every call of an action, each with several outcomes."""
    rehearsal = fresh()
    save(rehearsal, 1, ROOT)
    save(rehearsal, 2, ROOT)
    rehearsal.calls = 0
    action(rehearsal)
    for at in range(rehearsal.calls + 1):
        for seed in range(count):
            disk = fresh()
            save(disk, 1, ROOT)
            save(disk, 2, ROOT)
            disk.calls, disk.stop_at, disk.fault = 0, at, Crash()
            with contextlib.suppress(Crash):
                action(disk)
            yield disk.after_crash(random.Random(1000 * at + seed)), at


def test_power_that_fails_at_any_call_of_a_save_leaves_whole_checkpoints_only():
    listed_new = 0
    for left, at in crashes(lambda disk: save(disk, 3, ROOT), 2000 if SOAK else 100):
        store, listed = Store(left, ROOT), steps_of(left)
        assert listed[:2] == [1, 2], f"call {at} lost an older one"
        listed_new += 3 in listed
        for saved in store.all():
            store.verify(saved)
            assert read(store, saved.tag) == wanted(saved.manifest.step)
        sweep(store)
        assert all(not name.startswith(".") for name in left.names(ROOT))
    assert listed_new, "after its last call it is there"


def test_power_that_fails_while_one_is_removed_leaves_the_others_and_no_half():
    for left, _ in crashes(lambda disk: remove(Store(disk, ROOT), "global_step1"), 2000 if SOAK else 100):
        store, listed = Store(left, ROOT), steps_of(left)
        assert listed in ([1, 2], [2])
        for saved in store.all():
            store.verify(saved)
        sweep(store)
        assert left.names(ROOT) == [f"global_step{step}" for step in listed]


# --- bytes that are not those that were written -------------------------------------------------------------------------


def files_of(disk: MemoryDisk) -> dict[str, Inode]:
    folder = disk._folder(f"{ROOT}/global_step2")
    return {name: inode for name, inode in folder.entries.items() if isinstance(inode, Inode)}


def damage(disk: MemoryDisk, dice: random.Random) -> str:
    """One of the ways in which a checkpoint goes bad."""
    files = files_of(disk)
    name = dice.choice(sorted(files))
    data = files[name].data
    other = disk._folder(f"{ROOT}/global_step1").entries
    entries = disk._folder(f"{ROOT}/global_step2").entries
    way = dice.choice(["flip", "flip", "flip", "cut", "longer", "zeros", "swap", "older", "gone", "empty", "folder"])
    if way == "flip":
        at = dice.randrange(len(data))
        data[at] ^= 1 << dice.randrange(8)
    elif way == "cut":
        del data[dice.randrange(len(data) - 1) :]
    elif way == "longer":
        data += dice.randbytes(dice.randint(1, 9))
    elif way == "zeros":
        at = dice.randrange(len(data))
        if not any(data[at:]):
            data[0] ^= 1
        data[at:] = bytes(len(data) - at)
    elif way == "swap":
        one, two = dice.sample([known for known in sorted(files) if known != "manifest.json"], 2)
        entries[one], entries[two] = entries[two], entries[one]
    elif way == "older":
        entries[name] = other[name]
    elif way == "gone":
        del entries[name]
    elif way == "empty":
        data.clear()
    else:
        entries[name] = Folder()
    return f"{way} of {name}"


def test_no_damage_is_ever_silent():
    silent = 0
    for seed in range(100_000 if SOAK else 5_000):
        dice = random.Random(seed)
        disk = fresh()
        save(disk, 1, ROOT)
        save(disk, 2, ROOT)
        what = damage(disk, dice)
        store = Store(disk, ROOT)
        try:
            saved = store.find("global_step2")
            store.verify(saved)
            params = {name: Param(shape=(2, 5), trained=True, updates=2) for name in NAMES}
            told = (saved.manifest.step, saved.manifest.engine, saved.manifest.params)
            same = read(store, "global_step2") == wanted(2) and told == (2, {"samples": 14}, params)
        except (CheckpointError, StorageError) as error:
            assert "global_step2" in str(error), f"seed {seed}: {what}: {error}"
            continue
        silent += not same
        assert what == "older of manifest.json" or same, f"seed {seed}: {what}"
    assert silent == 0


# --- texts that nobody of us wrote ----------------------------------------------------------------------------------------


def mutate(value: Any, dice: random.Random) -> Any:
    """A document with one thing changed, somewhere."""
    if isinstance(value, dict) and value and dice.random() < 0.8:
        key = dice.choice(sorted(value))
        if dice.random() < 0.1:
            return {inner: member for inner, member in value.items() if inner != key}
        if dice.random() < 0.1:
            return {**value, dice.choice(["../../etc", "\0", "x" * 9999, "format"]): value[key]}
        return {**value, key: mutate(value[key], dice)}
    if isinstance(value, list) and value and dice.random() < 0.8:
        at = dice.randrange(len(value))
        if dice.random() < 0.1:
            return value[:at] + value[at + 1 :] if dice.random() < 0.5 else [*value, value[at]]
        return [*value[:at], mutate(value[at], dice), *value[at + 1 :]]
    return dice.choice(
        [None, True, -1, 0, 1, 2**31, 2**62, 2**70, 1.5, 1e400, "", "F32", "../x", "x" * 5000, [], {}, [[]], {"a": 1}]
    )


@pytest.mark.parametrize("kind", [Manifest, Table])
def test_a_hostile_text_can_only_be_refused(kind):
    disk = fresh()
    save(disk, 2, ROOT)
    name = "manifest.json" if kind is Manifest else "rank-00001.json"
    good = bytes(files_of_one(disk, name).data)
    document = json.loads(good.rpartition(b"\n")[0].rpartition(b"\n")[0])
    for seed in range(50_000 if SOAK else 3_000):
        body = json.dumps(mutate(document, random.Random(seed))).encode()
        text = body + b"\n" + hashlib.sha256(body).hexdigest().encode() + b"\n"
        try:
            record = parse(kind, text, name)
        except NaughtError as error:
            assert name in str(error)
            continue
        assert text_of(record)  # what is accepted is a record like any other


def files_of_one(disk: MemoryDisk, name: str) -> Inode:
    return disk._file(f"{ROOT}/global_step2/{name}")


def test_pieces_that_reach_into_each_other_are_refused():
    pieces = (Piece(param="a", first=0, count=4, at=0), Piece(param="b", first=0, count=4, at=3))
    run = Run.model_construct(kind="weights", dtype="F32", start=0, count=8, pieces=pieces)
    table = Table.model_construct(format=1, save="0" * 32, rank=0, nbytes=32, checksums=(0,), runs=(run,))
    with pytest.raises(CheckpointDamaged, match='a piece of "b" reaches into another'):
        parse(Table, text_of(table), "rank-00000.json")


def test_a_table_that_its_manifest_does_not_mean_is_refused():
    disk = fresh()
    save(disk, 2, ROOT)
    inode = files_of_one(disk, "rank-00001.json")
    table = parse(Table, bytes(inode.data), "rank-00001.json")
    inode.data[:] = text_of(table.model_copy(update={"numbers": {"tok.weight": {"step": ("int", 3.0)}}}))
    with pytest.raises(CheckpointDamaged, match="is not the file that its manifest means"):
        Store(disk, ROOT).verify(Store(disk, ROOT).find("global_step2"))


def test_a_newer_format_says_so():
    disk = fresh()
    save(disk, 2, ROOT)
    body = json.dumps({"format": 2}).encode()
    text = body + b"\n" + hashlib.sha256(body).hexdigest().encode()
    with pytest.raises(CheckpointError, match=r"is of format 2, and this release reads 1\. Use a newer release"):
        parse(Manifest, text, "manifest.json")


def test_links_pipes_and_folders_are_not_read(tmp_path):
    disk = RealDisk()
    save(disk, 2, str(tmp_path))
    store, folder = Store(disk, str(tmp_path)), tmp_path / "global_step2"
    path = folder / "rank-00001.safetensors"
    path.rename(tmp_path / "elsewhere")
    for make, words in (
        (lambda: path.symlink_to(tmp_path / "elsewhere"), "ELOOP"),
        (lambda: os.mkfifo(path), "not a plain file"),
    ):
        make()
        with pytest.raises(StorageError, match=words):
            store.verify(store.find("global_step2"))
        path.unlink()
    path.mkdir()
    with pytest.raises(StorageError, match="not a plain file"):
        store.verify(store.find("global_step2"))


def test_a_full_disk_is_told_with_its_path_and_the_remedy(tmp_path):
    with (
        faults(str(tmp_path), 1, "ENOSPC"),
        pytest.raises(StorageError, match=r"x: No space .* \(ENOSPC\)\. Make room on the disk"),
    ):
        RealDisk().create(f"{tmp_path}/x", 1)
    with pytest.raises(StorageError, match=rf"x: .* \({errno.errorcode[errno.EEXIST]}\)"):
        RealDisk().create(f"{tmp_path}/x", 1)


def test_a_new_folder_is_on_the_disk_with_all_around_it(tmp_path):
    with faults(str(tmp_path)) as told:
        RealDisk().ensure_folder(f"{tmp_path}/a/b")
    assert told.calls.count("fsync") == 2


def test_what_is_no_folder_does_not_stop_the_sweeping(tmp_path):
    (tmp_path / ".tmp-model.safetensors").write_bytes(b"somebody else's")
    (tmp_path / ".tmp-old-0").mkdir()
    assert sweep(Store(RealDisk(), str(tmp_path))) == [".tmp-old-0"]


@pytest.mark.parametrize("threads", [0, 2])
def test_a_file_is_not_closed_while_a_thread_writes_to_it(tmp_path, threads):
    """What follows a failure may get the same number for a file of its own."""
    gate, written = threading.Event(), []

    class Slow(RealDisk):
        def create(self, path: str, nbytes: int) -> Any:
            file = super().create(path, nbytes)
            real_write, real_abandon = file.write, file.abandon

            def write(data: Any) -> None:
                gate.wait(1 if threads else 0)
                real_write(data)
                written.append("write")

            def abandon() -> None:
                written.append("abandon")
                real_abandon()

            file.write, file.abandon = write, abandon
            return file

    def broken() -> Iterator[bytes]:
        yield b"y"
        raise RuntimeError("the tensor is gone")

    with ThreadPoolExecutor(2) as pool, pytest.raises(RuntimeError, match="the tensor is gone"):
        write_shard(Slow(), f"{tmp_path}/x", b"x", broken(), 9, threads=pool if threads else None)
    assert written == ["write", "write", "abandon"]


def test_a_write_that_fails_leaves_no_open_file(tmp_path):
    before = len(list(Path("/proc/self/fd").iterdir()))

    def broken() -> Iterator[bytes]:
        yield b"x"
        raise RuntimeError("the tensor is gone")

    store = Store(RealDisk(), str(tmp_path))
    draft = Draft(store, "t", "0" * 32)
    draft.begin(0)
    table, header, _ = contents(1, "0" * 32, 0)
    with pytest.raises(RuntimeError, match="the tensor is gone"):
        draft.write_rank(table, header, broken())
    draft.abandon()
    assert len(list(Path("/proc/self/fd").iterdir())) == before
