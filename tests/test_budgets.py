"""Budgets in the configuration bound memory and traffic, and change no bit."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from menagerie import WIDTH
from training import digest_of_weights, start, take_steps
from workers import World

from naught.comm.ledger import Ledger
from naught.comm.wires import Collectives, Peers
from naught.holding import Buffer

pytestmark = pytest.mark.usefixtures("one_thread")

LARGEST = 128 * WIDTH * 2 + WIDTH * 3 + 128  # elements of a block, the largest unit of the plain model


class Run(NamedTuple):
    losses: list[float]
    weights: str
    peak: dict[str, int]
    gathered: int
    whole: int


def bounded(stage: int, **zero: Any) -> Run:
    engine = start(stage, clip=0.5, **zero)
    losses = take_steps(engine, 2)
    engine.meter.peak.clear()
    before = engine.watch.ledger.total("all-gather")
    losses += take_steps(engine, 1, first=2)
    gathered = engine.watch.ledger.total("all-gather") - before
    whole = sum(unit.sizes().weights for unit in engine.schedule.units.values())
    report = engine.report()
    peak = report["peak"] | {"weights": report["live"]["weights"]}
    return Run(losses, digest_of_weights(engine), peak, gathered, whole)


def same_bits(one: list[Run], other: list[Run]) -> bool:
    return [run[:2] for run in one] == [run[:2] for run in other]


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("bucket", [64, 1024, 5000])
def test_a_reduce_needs_no_more_scratch_than_its_bucket(worlds, stage, bucket):
    plain, small = (worlds[3].run(bounded, stage, **zero) for zero in ({}, {"reduce_bucket_size": bucket}))
    assert same_bits(plain, small)
    for before, after in zip(plain, small, strict=True):
        assert after.peak[Buffer.SCRATCH] <= 4 * max(2 * 64, bucket)
        assert after.peak[Buffer.SCRATCH] < before.peak[Buffer.SCRATCH]


@pytest.mark.parametrize("key", ["sub_group_size", "allgather_bucket_size"])
@pytest.mark.parametrize("stage", range(4))
def test_updates_and_their_gathers_in_small_parts_change_no_bit(two, stage, key):
    assert same_bits(two.run(bounded, stage), two.run(bounded, stage, **{key: 100}))


def largest_at_once(stage: int, **zero: Any) -> tuple[int, int, int]:
    """The largest part that the rule was given, and the most bytes of new weights under way, and the largest unit's."""
    engine = start(stage, **zero)
    parts: list[int] = []
    under_way: list[int] = [0]
    rule, units = engine.optimizer.rule, engine.schedule.units.values()
    update = rule.update

    def watch_parts(given, hyper):
        parts.extend(part.weights.numel() for part in given)
        update(given, hyper)

    def watch_gather(gather):
        gather()
        under_way.append(sum(other.gathered_bytes for other in units if other.pending))

    rule.update = watch_parts
    for unit in units:
        unit.gather = partial(watch_gather, unit.gather)
    try:
        take_steps(engine, 1)
    finally:
        del rule.update  # all engines have this rule
    return max(parts), max(under_way), max(unit.gathered_bytes for unit in units)


def test_parts_and_weights_under_way_keep_to_their_limits(two):
    for part, _, _ in two.run(largest_at_once, 2, sub_group_size=100):
        assert part == 64
    for part, _, _ in two.run(largest_at_once, 2):
        assert part > 64
    for _, under_way, largest in two.run(largest_at_once, 2, allgather_bucket_size=100):
        assert under_way == largest, "one at a time"
    for _, under_way, largest in two.run(largest_at_once, 2):
        assert under_way > largest


def test_small_units_stay_whole_as_far_as_there_is_room(two):
    split = two.run(bounded, 3)
    kept = two.run(bounded, 3, stage3_param_persistence_threshold=LARGEST)
    some = two.run(bounded, 3, stage3_param_persistence_threshold=LARGEST, stage3_model_persistence_threshold=WIDTH * 2)
    assert same_bits(split, kept)
    assert same_bits(split, some)
    for every, few, fewer in zip(split, some, kept, strict=True):
        assert every.peak["weights"] < few.peak["weights"] < fewer.peak["weights"] < every.whole


def test_a_reuse_distance_buys_a_gather_with_memory(two):
    released = two.run(bounded, 3)
    kept = two.run(bounded, 3, stage3_max_reuse_distance=1e9)
    narrow = two.run(bounded, 3, stage3_max_reuse_distance=1e9, stage3_max_live_parameters=1)
    assert same_bits(released, kept)
    assert same_bits(released, narrow)
    for before, after, bound in zip(released, kept, narrow, strict=True):
        assert after.gathered == after.whole // 2, "once, not twice"
        assert after.peak[Buffer.GATHERED] == after.whole
        assert before.gathered >= bound.gathered > after.gathered
        assert bound.peak[Buffer.GATHERED] <= 2 * 4 * LARGEST + 4 * 4 * 64


def over_a_wire(kind: str, piece: int, shard: int) -> tuple[list[float], list[float]]:
    """What a rank's slice holds after a reduce and a gather of small whole numbers, which add without rounding."""
    import torch.distributed as dist

    rank, size = dist.get_rank(), dist.get_world_size()
    wire = Collectives(rank, size) if kind == "collectives" else Peers(rank, size, piece * size, 64)
    flat = torch.arange(size * shard, dtype=torch.float32) * (rank + 1)
    slices = list(flat.split(shard))
    wire.reduce(flat, slices, 1).wait()
    reduced = slices[rank].tolist()
    wire.gather(flat, slices).wait()
    return reduced, flat.tolist()


@pytest.mark.parametrize(
    ("kind", "piece", "shard"),
    [("collectives", 0, 192), ("peers", 64, 192), ("peers", 128, 192), ("peers", 10**6, 192), ("peers", 64, 64 * 1100)],
)
def test_both_wires_bring_every_slice_to_its_place(worlds, kind, piece, shard):
    wanted = (torch.arange(3 * shard, dtype=torch.float32) * 6).tolist()
    for rank, (reduced, whole) in enumerate(worlds[3].run(over_a_wire, kind, piece, shard)):
        assert reduced == wanted[rank * shard : (rank + 1) * shard]
        assert whole == wanted


def over_nccl(folder: str) -> list[float]:
    import torch.distributed as dist

    dist.init_process_group("nccl", store=dist.FileStore(f"{folder}/store", 1), rank=0, world_size=1)
    try:
        flat = torch.arange(192, dtype=torch.float32, device="cuda")
        wire = Collectives(0, 1)
        wire.reduce(flat, [flat], 1).wait()
        wire.gather(flat, [flat]).wait()
        return flat.tolist()
    finally:
        dist.destroy_process_group()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="NCCL needs a GPU")
def test_nccl_accepts_a_flat_in_place(tmp_path):
    world = World(1)
    try:
        assert world.run(over_nccl, str(tmp_path))[0] == list(range(192))
    finally:
        world.stop()


def test_a_ledger_adds_up():
    ledger = Ledger()
    ledger.add("all-gather", "a", 3)
    ledger.phase = "forward"
    ledger.add("all-gather", "a", 4)
    ledger.add("reduce-scatter", "a", 5)
    assert (ledger.total("all-gather"), ledger.total()) == (7, 12)
