"""Several ranks in one process: what they compute, send and hold is what processes do, and they fail as one."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
from typing import Any

import pytest
import torch
from menagerie import MODELS, Noisy, batch_of
from test_offload import BF16, BOTH, FP16, HOST, ON_GPU
from torch import Tensor, nn
from training import Outcome, config_of, digest_of_weights, engine_of, my_rank, start, take_steps, train

import naught
from naught import checkpointing, comm, zero
from naught.cli import main
from naught.comm import Ledger, make_group, rehearse
from naught.errors import ConfigError, ModelError, RankMismatch, ScheduleError, UsageError
from naught.model_names import parse_model
from naught.trainer.rehearsing import train_gpt
from naught.trainer.simulating import Batch

pytestmark = [pytest.mark.skipif(ON_GPU, reason="a rehearsal is on CPUs"), pytest.mark.usefixtures("one_thread")]

SPREAD = {"stage3_param_persistence_threshold": 0}
CASES: dict[str, tuple[str, int, dict[str, Any]]] = {
    "stage 0": ("plain", 0, {}),
    "stage 1": ("plain", 1, {"clip": 1.0}),
    "stage 2": ("tied", 2, {"clip": 1.0}),
    "stage 3": ("plain", 3, {"clip": 1.0, **SPREAD}),
    "stage 3, small units whole": ("plain", 3, {}),
    "micro-batches": ("plain", 2, {"accumulation": 3}),
    "bf16": ("block_used_twice", 3, {"more": BF16, "accumulation": 2, **SPREAD}),
    "fp16": ("plain", 2, {"more": FP16}),
    "autocast": ("plain", 3, {"more": {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}, **SPREAD}),
    "a reduce in pieces": ("plain", 2, {"reduce_bucket_size": 4096}),
    "optimizer on the host": ("plain", 2, {"offload_optimizer": HOST}),
    "everything on the host": ("plain", 3, BOTH),
    "experts": ("experts_by_rank_and_batch", 3, SPREAD),
    "a block skipped on one rank": ("block_skipped_on_one_rank", 3, SPREAD),
    "recomputed": ("checkpoint_reentrant", 3, SPREAD),
}


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("case", CASES)
def test_the_bits_are_those_of_processes(worlds, case, size):
    name, stage, options = CASES[case]
    assert rehearse(lambda _: train(name, stage, **options), ranks=size) == worlds[size].reference(train, name, stage, **options)


def test_on_disk_too(two, tmp_path):
    disk = {"device": "nvme", "nvme_path": str(tmp_path)}
    options = {"offload_optimizer": disk, "offload_param": disk, **SPREAD}
    assert rehearse(lambda _: train("plain", 3, **options), ranks=2) == two.reference(train, "plain", 3, **options)


def draw(stage: int) -> tuple[Outcome | list[float], str, float, float]:
    """Random numbers before, in and after forwards, other ones on each rank."""
    torch.manual_seed(7)
    random.seed(my_rank())
    model = Noisy()
    torch.manual_seed(my_rank())
    engine = engine_of(model, config_of(stage, **(SPREAD if stage == 3 else {})))
    losses = take_steps(engine, 3)
    return losses, digest_of_weights(engine), float(torch.rand(())), random.random()


@pytest.mark.parametrize("stage", [1, 3])
def test_every_rank_draws_its_own_random_numbers(two, stage):
    assert rehearse(lambda _: draw(stage), ranks=2) == two.run(draw, stage)


def mixed(stage: int) -> tuple[list[float], str]:
    """A backward of the user's own beside one of the engine's: who has divided the loss is told apart by rank."""
    engine = start(stage, accumulation=2, **(SPREAD if stage == 3 else {}))
    losses = []
    for step in range(2):
        for micro in range(2):
            loss = engine(batch_of(2 * step + micro, my_rank()))
            if micro:
                engine.backward(loss)
            else:
                engine.scale(loss).backward()
            engine.step()
            losses.append(loss.item())
    return losses, digest_of_weights(engine)


@pytest.mark.parametrize("stage", [1, 3])
def test_backwards_of_two_kinds_are_told_apart(two, stage):
    assert rehearse(lambda _: mixed(stage), ranks=2) == two.run(mixed, stage)


def born() -> tuple[list[float], str]:
    torch.manual_seed(my_rank())
    with zero.Init(window_bytes=1 << 14):
        model = MODELS["plain"]()
    engine = engine_of(model, config_of(3, **SPREAD))
    return take_steps(engine, 2), digest_of_weights(engine)


def test_models_are_split_while_they_are_built(two):
    make = nn.Parameter.__new__
    assert rehearse(lambda _: born(), ranks=2) == two.run(born)
    assert nn.Parameter.__new__ is make


def saved(folder: str, asynchronous: bool) -> list[float]:
    engine = start(3, **SPREAD)
    take_steps(engine, 2)
    engine.save_checkpoint(folder, asynchronous=asynchronous)
    losses = take_steps(engine, 2, first=2)
    engine.destroy()
    again = start(3, **SPREAD)
    again.load_checkpoint(folder)
    assert take_steps(again, 2, first=2) == losses
    again.destroy()
    return losses


@pytest.mark.parametrize("asynchronous", [False, True])
def test_checkpoints_are_saved_and_loaded(two, tmp_path, asynchronous):
    found = rehearse(lambda _: saved(str(tmp_path / "here"), asynchronous), ranks=2)
    assert found == two.run(saved, str(tmp_path / "there"), asynchronous)


def counted() -> tuple[dict[str, int], dict[str, int]]:
    engine = start(3, **SPREAD)
    take_steps(engine, 2)
    report = engine.report()
    return report["sent"], report["peak"]


def test_bytes_are_those_of_processes(two):
    assert rehearse(lambda _: counted(), ranks=2) == two.run(counted)


def test_one_runs_at_a_time_and_in_the_same_order_every_time():
    def watched(rank: int, said: list[tuple[int, int]]) -> list[float]:
        engine = start(3, **SPREAD)
        forward = engine.module.forward

        def spoken(ids: Tensor) -> Tensor:
            said.append((rank, threading.get_ident() == mine))
            time.sleep(0.01)
            loss = forward(ids)
            assert comm.get_rank() == rank
            return loss

        mine = threading.get_ident()
        engine.module.forward = spoken
        return take_steps(engine, 2)

    first: list[tuple[int, int]] = []
    second: list[tuple[int, int]] = []
    rehearse(lambda rank: watched(rank, first), ranks=3)
    rehearse(lambda rank: watched(rank, second), ranks=3)
    assert first == second
    assert len(first) == 6


def test_a_rank_knows_which_it_is():
    def facts(rank: int) -> tuple[int, int, int, bool]:
        naught.init_distributed()
        assert comm.is_initialized()
        return comm.get_rank(), comm.get_world_size(), comm.get_local_rank(), rank == start(1).global_rank

    assert rehearse(facts, ranks=3) == [(rank, 3, rank, True) for rank in range(3)]
    assert not comm.is_initialized()
    assert rehearse(lambda _: train("plain", 3), ranks=1)[0].losses


def test_what_a_process_has_once_is_left_as_it_was():
    torch.manual_seed(3)
    before = torch.get_rng_state()

    def disturb(rank: int) -> None:
        checkpointing.configure(checkpoint_in_cpu=rank == 0)
        torch.manual_seed(rank)
        engine = start(3, **SPREAD)
        torch.set_default_dtype(torch.float64)
        assert checkpointing.is_configured()
        take_steps(engine)
        assert torch.get_default_dtype() is torch.float64

    rehearse(disturb, ranks=2)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.get_default_dtype() is torch.float32
    assert not checkpointing.is_configured()


# --- failing ---


class OopsError(Exception):
    pass


def broken(rank: int, seen: dict[int, BaseException], where: str) -> None:
    engine = start(3, **SPREAD)
    try:
        take_steps(engine)
        if rank == 1 and where == "between":
            raise OopsError("no more")
        if rank == 1 and where == "forward":
            engine.module.blocks[1].register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(OopsError("no more")))
        take_steps(engine)
    except Exception as error:
        seen[rank] = error
        raise


@pytest.mark.parametrize("where", ["between", "forward"])
def test_a_rank_that_fails_ends_all(where):
    seen: dict[int, BaseException] = {}
    began = time.monotonic()
    with pytest.raises(OopsError, match="no more") as raised:
        rehearse(lambda rank: broken(rank, seen, where), ranks=3)
    assert time.monotonic() - began < 10
    assert raised.value is seen[1]
    assert sorted(seen) == [0, 1, 2]
    for rank in (0, 2):
        assert isinstance(seen[rank], UsageError)
        assert str(seen[rank]) == "OopsError: no more [rank 1]"
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("rank ")]
    assert rehearse(lambda _: take_steps(start(1)), ranks=2), "the next one is not disturbed"


def test_a_rank_that_leaves_is_named():
    def leave(rank: int) -> None:
        engine = start(3, **SPREAD)
        take_steps(engine)
        if rank != 1:
            take_steps(engine)

    with pytest.raises(
        ScheduleError, match=r'rank 0 waits in all-gather #\d+ for "root" \(forward\); rank 1 has ended; rank 2 w'
    ):
        rehearse(leave, ranks=3)


def test_ranks_that_do_different_things_are_told_so():
    def differ(rank: int) -> None:
        engine = start(3, **SPREAD)
        group, flat = engine.schedule.group, torch.zeros(2)
        if rank == 0:
            group.meet()
        else:
            group.gather(flat, [flat[:1], flat[1:]], "mine").wait()

    with pytest.raises(ScheduleError, match=r'rank 0 is in exchange #\d+ \(start\), and rank 1 in all-gather #\d+ for "mine"'):
        rehearse(differ, ranks=2)


def test_what_one_rank_tells_the_others_is_raised_as_it_was():
    """Mistakes that all are told of: on the rank that has made it, with where it was made."""
    with pytest.raises(ConfigError, match="1 problem"):
        rehearse(lambda _: naught.initialize(model=nn.Linear(2, 2), config={"nonsense": 1}), ranks=2)
    with pytest.raises(RankMismatch, match="the ranks differ in"):
        rehearse(lambda rank: engine_of(nn.Linear(2, 2 + rank), config_of(1)), ranks=2)

    def one_sided(rank: int) -> None:
        engine_of(nn.Linear(2, 2).requires_grad_(rank == 0), config_of(1))

    with pytest.raises(ModelError, match="no parameters to train") as raised:
        rehearse(one_sided, ranks=2)
    assert raised.value.where == "", "it is not what another has heard of it"
    shared = nn.Linear(2, 2)
    with pytest.raises(UsageError, match="belongs to another rank already"):
        rehearse(lambda _: engine_of(shared, config_of(1)), ranks=2)


def test_mistakes_of_the_call_are_told():
    with pytest.raises(UsageError, match="0 ranks are none"):
        rehearse(lambda _: None, ranks=0)
    with pytest.raises(UsageError, match="a rehearsal or a simulation already"):
        rehearse(lambda _: rehearse(lambda _: None, ranks=2), ranks=2)


def test_an_interrupt_ends_all():
    def interrupted(rank: int) -> None:
        group = make_group(Ledger(), torch.device("cpu"), reduce_numel=1)
        if rank == 1:
            os.kill(os.getpid(), signal.SIGINT)
        while True:
            group.meet()

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # in the background of a shell it is ignored
    try:
        with pytest.raises(KeyboardInterrupt):
            rehearse(interrupted, ranks=3)
    finally:
        signal.signal(signal.SIGINT, before)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("rank ")]
    assert not comm.is_initialized()


# --- the command ---

TINY = "gpt:layers=2,hidden=64,heads=2,vocab=128"


def of_processes(config: dict[str, Any]) -> dict[str, Any]:
    shape = parse_model(TINY).shape
    assert shape is not None
    return train_gpt(shape, config, Batch(micro=2, seq=16, recomputes=True), 2)._asdict()


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_command_trains_as_processes_do(two, capsys, tmp_path, stage):
    config = config_of(stage, clip=1.0, **(SPREAD if stage == 3 else {}))
    (tmp_path / "ds.json").write_text(json.dumps(config))
    asked = ["simulate", TINY, "--real", "--ranks", "2", "--steps", "2", "--seq", "16", "--config", str(tmp_path / "ds.json")]
    assert main([*asked, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == two.run(of_processes, config)
    assert main(asked) == 0
    shown = capsys.readouterr().out
    for words in ("2 ranks in this process", "rank 1", "reduce-scatter", "weights "):
        assert words in shown


def test_the_command_says_what_goes_between_tiers(capsys, tmp_path):
    disk = {"device": "nvme", "nvme_path": str(tmp_path / "spill")}
    (tmp_path / "ds.json").write_text(json.dumps(config_of(3, offload_optimizer=disk, offload_param=disk, **SPREAD)))
    asked = ["simulate", TINY, "--real", "--seq", "16", "--steps", "1", "--config", str(tmp_path / "ds.json")]
    assert main([*asked, "--json"]) == 0
    assert all(nbytes > 0 for one in json.loads(capsys.readouterr().out) for nbytes in one["moved"].values())
    assert main(asked) == 0
    assert "moved by rank 0" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ([TINY, "--real", "--ranks", "65"], "65 ranks in this process"),
        ([TINY, "--real", "--ranks", "0"], "0 ranks in this process"),
        ([TINY, "--real", "--steps", "0"], "for 0 steps"),
        ([TINY, "--real", "--gpu", "h100", "--rank", "1"], "--rank, --gpu and --real cannot be meant together"),
        ([TINY, "--steps", "2"], "--steps is for --real"),
        (["175B", "--real", "--ranks", "64"], "Take a smaller model"),
    ],
)
def test_mistakes_of_the_command_are_one_line(capsys, asked, said):
    assert main(["simulate", *asked]) == 2
    told = capsys.readouterr().err
    assert said in told
    assert told.count("\n") == 1
