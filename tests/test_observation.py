"""What a run says of itself: monitors, lines, a count of operations, a log of collectives. Training never notices."""

from __future__ import annotations

import csv
import gc
import logging
import re
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from menagerie import batch_of, my_rank
from torch import nn
from training import config_of, digest_of_weights, start, take_steps

from naught.comm.ledger import Ledger
from naught.comm.summary import listen, log_summary
from naught.config import Config, load
from naught.config.observation import FlopsProfiler
from naught.costs import costs_of, listing
from naught.engine import Engine
from naught.errors import UsageError
from naught.flops import Profiler
from naught.monitors import Monitor
from naught.observing import Observer, StepFacts
from naught.quantity import show_bytes

pytestmark = pytest.mark.usefixtures("one_thread")

# The products of the plain model's forward: 32 tokens through three blocks of 64 x 128 twice, and a head of 64 x 64.
PLAIN_FLOPS = 2 * 32 * (3 * 2 * 64 * 128 + 64 * 64)


@pytest.fixture(autouse=True)
def _hear_everything(caplog):
    caplog.set_level(logging.INFO, "naught")


def settings(**more: Any) -> Config:
    return load(config_of(0, more=more))


def observed(engine: Engine, observer: Observer, steps: int, *, accumulation: int = 1) -> list[float]:
    """Train while the engine tells another observer everything."""
    engine.observer = observer
    return take_steps(engine, steps * accumulation)


def plain_facts(step: int, **more: Any) -> StepFacts:
    facts = StepFacts(step, 4 * step, skipped=0, rates=[0.01], scale=1.0, norm=None)
    return facts._replace(**more)


def rows_of(path: Path) -> list[list[str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.reader(file))


# --- monitors ---------------------------------------------------------------------------------------------------------


def test_every_tag_is_a_csv_file_with_a_row_for_every_step(tmp_path):
    engine = start(0, accumulation=2)
    observer = Observer(settings(csv_monitor={"enabled": True, "output_path": str(tmp_path), "job_name": "j"}), engine.watch, 0)
    losses = observed(engine, observer, 2, accumulation=2)
    means = [(losses[0] + losses[1]) / 2, (losses[2] + losses[3]) / 2]
    assert rows_of(tmp_path / "j" / "Train_Samples_train_loss.csv") == [
        ["step", "Train_Samples_train_loss"],
        ["4", str(means[0])],
        ["8", str(means[1])],
    ]
    assert rows_of(tmp_path / "j" / "Train_Samples_lr.csv")[1:] == [["4", "0.01"], ["8", "0.01"]]
    assert rows_of(tmp_path / "j" / "Train_Samples_grad_norm.csv")[2] == ["8", str(engine.get_global_grad_norm())]
    assert not (tmp_path / "j" / "Train_Samples_loss_scale.csv").exists()  # nothing is scaled


def test_the_scale_of_the_loss_is_written_under_fp16(tmp_path):
    config = settings(csv_monitor={"enabled": True, "output_path": str(tmp_path)}, fp16={"enabled": True})
    Observer(config, start(0).watch, 0).stepped(plain_facts(1, scale=65536.0))
    assert rows_of(tmp_path / "naught" / "Train_Samples_loss_scale.csv")[1] == ["4", "65536.0"]


def test_losses_of_a_step_that_was_given_up_are_not_counted_and_later_changes_are_not_seen(tmp_path):
    observer = Observer(settings(csv_monitor={"enabled": True, "output_path": str(tmp_path)}), start(0).watch, 0)
    mine = torch.tensor([3.0])
    observer.lost(torch.tensor(100.0))
    observer.forget()
    for loss in (torch.tensor(1.0, dtype=torch.bfloat16), mine):
        observer.lost(loss)
    mine /= 2
    observer.stepped(plain_facts(1))
    observer.stepped(plain_facts(2))  # its losses never came by
    assert rows_of(tmp_path / "naught" / "Train_Samples_train_loss.csv")[1:] == [["4", "2.0"]]


def test_csv_files_are_in_the_working_directory_and_grow_from_run_to_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for value in (1.0, float("inf")):
        monitor = Monitor(settings(csv_monitor={"enabled": True}), 0)
        assert monitor.enabled
        monitor.write_events([("a tag/of mine", value, 3)])
        monitor.close()
    path = tmp_path / "csv_monitor" / "naught" / "a_tag_of_mine.csv"
    assert path.read_text(encoding="utf-8") == "step,a_tag_of_mine\n3,1.0\n3,inf\n"


def test_only_rank_0_writes_and_only_if_somebody_asked(tmp_path):
    other = Monitor(settings(csv_monitor={"enabled": True, "output_path": str(tmp_path)}), 1)
    other.write_events([("tag", 1.0, 1)])
    assert not other.enabled
    assert not list(tmp_path.iterdir())
    assert not Monitor(settings(), 0).enabled


def test_losses_are_not_kept_for_nobody():
    observer = Observer(settings(), start(0).watch, 0)
    observer.lost(torch.tensor(1.0))
    assert not observer.losses


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("package", ["tensorboard", "wandb"])
def test_a_missing_package_stops_every_rank_and_names_the_remedy(package, rank):
    if find_spec(package) is not None:
        pytest.skip("it is installed")
    with pytest.raises(UsageError, match=f"pip install {package}"):
        Monitor(settings(**{package: {"enabled": True}}), rank)


@pytest.mark.filterwarnings("ignore")  # of packages that are not ours
@pytest.mark.skipif(find_spec("tensorboard") is None, reason="tensorboard is not installed")
def test_tensorboard_reads_what_was_written(tmp_path, monkeypatch):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.chdir(tmp_path)
    monitor = Monitor(settings(tensorboard={"enabled": True, "job_name": "j"}), 0)
    monitor.write_events([("Train/Samples/lr", 0.5, 4)])
    read = EventAccumulator(str(tmp_path / "runs" / "j"))  # before the close: a run that dies loses nothing
    read.Reload()
    assert [(event.step, event.value) for event in read.Scalars("Train/Samples/lr")] == [(4, 0.5)]
    monitor.close()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.skipif(find_spec("wandb") is None, reason="wandb is not installed")
def test_weights_and_biases_gets_project_group_team_and_scalars(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monitor = Monitor(settings(wandb={"enabled": True, "group": "g", "team": "t", "project": "p"}), 0)
    run = monitor.sinks[0].run
    assert (run.project, run.group, run.entity) == ("p", "g", "t")
    monitor.write_events([("Train/Samples/lr", 0.5, 4), ("Train/Samples/grad_norm", 2.0, 4)])
    monitor.write_events([("mine", 3.0, 4)])
    monitor.write_events([("Train/Samples/lr", 0.25, 8)])
    assert [run.summary[tag] for tag in ("Train/Samples/lr", "Train/Samples/grad_norm", "mine")] == [0.5, 2.0, 3.0]
    monitor.close()


# --- lines ------------------------------------------------------------------------------------------------------------


def test_a_line_every_few_steps_says_how_far_and_how_fast(caplog):
    engine = start(0)
    observed(engine, Observer(settings(steps_per_print=2), engine.watch, 0), 5)
    assert [message.rpartition(", ")[0] for message in caplog.messages] == [
        "step 2: skipped 0, lr 0.01, loss scale 1",
        "step 4: skipped 0, lr 0.01, loss scale 1",
    ]
    assert all(re.fullmatch(r"[0-9.e+]+ samples/s", message.rpartition(", ")[2]) for message in caplog.messages)


def test_samples_a_second_are_those_since_the_last_line(caplog, monkeypatch):
    observer = Observer(settings(steps_per_print=2), start(0).watch, 0)
    for step, now in enumerate([10.0, 12.0, 13.0, 14.0], start=1):
        monkeypatch.setattr("time.perf_counter", lambda now=now: now)
        observer.stepped(plain_facts(step))
    assert [message.rpartition(", ")[2] for message in caplog.messages] == ["2 samples/s", "4 samples/s"]


def test_a_first_line_has_no_time_to_compare_with_and_throughput_can_be_off(caplog):
    watch = start(0).watch
    Observer(settings(steps_per_print=1), watch, 0).stepped(plain_facts(1))
    quiet = Observer(settings(steps_per_print=1, timers={"throughput": {"enabled": False}}), watch, 0)
    for step in (1, 2):
        quiet.stepped(plain_facts(step, rates=[0.5, 0.25]))
    assert len(caplog.messages) == 3
    assert "samples/s" not in caplog.text
    assert caplog.messages[2] == "step 2: skipped 0, lr 0.5, 0.25, loss scale 1"


def test_nothing_is_said_that_was_not_asked_for_nor_twice_nor_by_other_ranks(caplog):
    watch = start(0).watch
    Observer(settings(), watch, 0).stepped(plain_facts(1))
    Observer(settings(steps_per_print=1, wall_clock_breakdown=True, memory_breakdown=True), watch, 1).stepped(plain_facts(1))
    assert not caplog.messages
    observer = Observer(settings(steps_per_print=2), watch, 0)
    for facts in (plain_facts(0, skipped=1), plain_facts(1), plain_facts(2), plain_facts(2, skipped=2)):
        observer.stepped(facts)
    assert len(caplog.messages) == 1


def test_the_times_of_phases_are_means_since_the_last_line(caplog):
    engine = start(3)
    observer = Observer(settings(steps_per_print=2, wall_clock_breakdown=True), engine.watch, 0)
    before: dict[str, float] = {}
    for step in (2, 4):
        caplog.clear()
        for at in (step - 1, step):
            take_steps(engine, first=at)
            observer.stepped(plain_facts(at))
        seconds = engine.report()["seconds"]
        means = {phase: 500 * (seconds[phase] - before.get(phase, 0.0)) for phase in ("forward", "backward", "step")}
        shown = ", ".join(f"{phase} {mean:.2f} ms" for phase, mean in means.items())
        assert caplog.messages[1] == f"time of step {step}: {shown}"
        assert all(mean > 0 for mean in means.values())
        before = seconds


def test_breakdowns_without_steps_per_print_come_with_every_step_and_name_the_bytes_of_each_phase(caplog):
    engine = start(3)
    observed(engine, Observer(settings(memory_breakdown=True, wall_clock_breakdown=True), engine.watch, 0), 2)
    after = engine.report()["after"]
    assert set(after) == {"forward", "backward", "step"}
    for phase, held in after.items():
        shown = ", ".join(f"{category} {show_bytes(nbytes)}" for category, nbytes in held.items() if nbytes)
        assert shown
        assert f"memory after {phase} of step 2: {shown}" in caplog.messages
    assert len(caplog.messages) == 2 * (1 + 3)


# --- operations -------------------------------------------------------------------------------------------------------

COUNTED = ["plain", "tied", "block_used_twice", "checkpoint_reentrant", "checkpoint_non_reentrant", "convolution"]
PROFILE = {"enabled": True, "profile_step": 2}


def counted_run(stage: int, name: str, path: str) -> tuple[list[float], str]:
    engine = start(stage, name)
    config = settings(flops_profiler={**PROFILE, "output_file": path})
    return observed(engine, Observer(config, engine.watch, my_rank()), 3), digest_of_weights(engine)


def uncounted_run(stage: int, name: str) -> tuple[list[float], str]:
    engine = start(stage, name)
    return take_steps(engine, 3), digest_of_weights(engine)


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("name", COUNTED)
def test_a_counted_forward_trains_the_same_bit_for_bit(two, tmp_path, stage, name):
    path = tmp_path / "listing"
    assert two.run(counted_run, stage, name, str(path)) == two.reference(uncounted_run, stage, name)
    text = path.read_text(encoding="utf-8")
    assert "FLOPs of the forward" in text
    assert text.splitlines()[-1].startswith("the next forward")


@pytest.mark.parametrize("stage", [0, 3])
def test_the_listing_has_the_operations_of_every_module(caplog, stage):
    engine = start(stage)
    observed(engine, Observer(settings(flops_profiler=PROFILE), engine.watch, 0), 3)
    text, time = caplog.messages
    cells = {" ".join(line.split()) for line in text.splitlines()}
    assert {"parameters 58.4k", "MACs of the forward 1.70M", "FLOPs of the forward 3.41M"} <= cells
    assert {"level 0: 1 of Plain 58.4k 3.41M 100.0%", "level 2: 3 of Block 50.1k 3.15M 92.3%"} <= cells
    assert {"root Plain 58.4k 3.41M 100.0%", "blocks ModuleList 50.1k 3.15M 92.3%"} <= cells
    assert {"blocks.2.up Linear 8.32k 524k 15.4%", "tok Embedding 4.10k 0 0.0%"} <= cells
    said = re.fullmatch(r"the next forward, which was not counted: ([0-9.]+) (ms|us), ([0-9.]+)([MB]) FLOP/s", time)
    seconds = float(said[1]) * {"ms": 1e-3, "us": 1e-6}[said[2]]
    assert float(said[3]) * {"M": 1e6, "B": 1e9}[said[4]] == pytest.approx(PLAIN_FLOPS / seconds, rel=0.1)


@pytest.mark.parametrize(
    ("options", "present", "absent"),
    [
        ({"module_depth": 1}, ["level 1:", "blocks"], ["level 2:", "blocks.0"]),
        ({"module_depth": 0}, ["level 0:", "root"], ["level 1:", "blocks"]),
        ({"detailed": False}, ["level 3:"], ["blocks.0", "root"]),
        ({"top_modules": 1}, ["level 3: 6 of Linear"], ["level 3: 3 of"]),
        ({"top_modules": 2}, ["level 3: 6 of Linear", "level 3: 3 of LayerNorm"], []),
        ({"recompute_fwd_factor": 0.0}, ["FLOPs of forward, backward and recompute 3.00k"], []),
        ({"recompute_fwd_factor": 1.0}, ["FLOPs of forward, backward and recompute 4.00k"], []),
    ],
)
def test_the_listing_is_as_deep_wide_and_detailed_as_asked(options, present, absent):
    model = start(0).module
    text = listing(costs_of(model, {"Plain.blocks.0.up": 1000}), FlopsProfiler(**options), flops=1000)
    words = " ".join(text.split()) + " "
    assert all(f"{part} " in words for part in present), text
    assert not any(f" {part} " in words for part in absent), text


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleList([nn.Identity()])
        self.again = self.inner[0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.again(nn.functional.scaled_dot_product_attention(x, x, x))


def test_attention_on_the_cpu_counts_and_a_shared_module_is_found_under_any_of_its_names(tmp_path):
    model = Attention()
    x = torch.ones(1, 2, 8, 4, requires_grad=True)
    chosen = FlopsProfiler(output_file=str(tmp_path / "new" / "listing"))
    with Profiler(chosen, torch.device("cpu")).forward(model, 1):
        model(x)
    # Two heads, each with two products of 8 x 4 x 8, are 2048 operations.
    assert "FLOPs of the forward 2.05k" in " ".join(Path(chosen.output_file).read_text("utf-8").split())
    costs = {cost.name: cost.flops for cost in costs_of(model, {"Attention": 7, "Attention.again": 5})}
    assert costs == {"": 7, "inner": 5, "inner.0": 5}


def test_only_the_first_training_forward_of_that_step_is_counted_and_only_the_next_is_timed(caplog):
    engine = start(3)
    observer = Observer(settings(flops_profiler=PROFILE), engine.watch, 0)
    said = []
    for step, trains in ((1, True), (2, False), (2, True), (2, False), (2, True), (2, True), (3, True)):
        caplog.clear()
        with torch.set_grad_enabled(trains), observer.forward(engine.module, step):
            engine.forward(batch_of(0, 0))
        said.append(" ".join(caplog.messages)[:10])
    assert said == ["", "", "operations", "", "the next f", "", ""]


def test_a_forward_that_fails_while_it_is_counted_leaves_no_listing_and_training_goes_on(caplog):
    engine, other = start(3), start(3)
    observer = Observer(settings(flops_profiler={**PROFILE, "profile_step": 1}), engine.watch, 0)
    with pytest.raises(RuntimeError), observer.forward(engine.module, 1):
        engine.forward(batch_of(0, 0).float())  # no index into an embedding
    assert not caplog.messages
    assert observed(engine, observer, 2) == take_steps(other, 2)
    assert digest_of_weights(engine) == digest_of_weights(other)
    assert len(caplog.messages) == 2


# --- collectives ------------------------------------------------------------------------------------------------------


class Heard(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


class Said(NamedTuple):
    """What a step's collectives left behind: lines, the summary, and the rows that it should have by the ledger."""

    lines: list[str]
    text: str
    rows: list[list[str]]


def collectives_of_a_step(**comms: Any) -> Said:
    gc.collect()  # engines of earlier tests, with their logs
    log, heard = logging.getLogger("naught"), Heard()
    log.addHandler(heard)
    before, log.level = log.level, logging.INFO
    engine = start(3)
    ledger = engine.watch.ledger
    ledger.sent.clear()
    ledger.order.clear()
    try:
        observed(engine, Observer(settings(comms_logger=comms), engine.watch, my_rank()), 1)
        lines, text = list(heard.lines), log_summary()
        assert heard.lines[len(lines) :] == ([f"collectives of this rank\n{text}"] if text else [])
    finally:
        log.removeHandler(heard)
        log.setLevel(before)
    said = Said(lines, text, rows_by(ledger))
    engine.destroy()
    return said


def rows_by(ledger: Ledger) -> list[list[str]]:
    """A unit sends as much whenever it calls a collective, so the ledger's sums and its order tell the size of each call."""
    sent: Counter[tuple[str, str]] = Counter()
    for (collective, unit, _), nbytes in ledger.sent.items():
        sent[collective, unit] += nbytes
    calls: Counter[tuple[str, int]] = Counter()
    for key, times in Counter(ledger.order).items():
        calls[key[0], sent[key] // times] += times
    return [
        [collective, show_bytes(nbytes), str(times), show_bytes(nbytes * times)]
        for (collective, nbytes), times in sorted(calls.items())
    ]


def test_the_summary_counts_every_collective_by_size(two):
    mine, other = two.run(collectives_of_a_step, enabled=True)
    assert (mine.lines, other.lines, other.text) == ([], [], "")
    assert mine.text.splitlines()[0].split() == ["collective", "message", "calls", "sent"]
    assert [re.split(r" {2,}", line) for line in mine.text.splitlines()[2:]] == mine.rows
    assert len(mine.rows) > 2


@pytest.mark.parametrize(
    ("ops", "kinds"),
    [
        (["all_gather_into_tensor"], {"all-gather"}),
        (["reduce_scatter_tensor", "broadcast"], {"reduce-scatter"}),
        (["_reduce_scatter_base"], {"reduce-scatter"}),
        (["all-gather"], {"all-gather"}),
        (["all_reduce"], {"all-gather", "reduce-scatter"}),
        ([], set()),
    ],
)
def test_a_line_for_each_call_of_the_collectives_that_were_named(ops, kinds):
    said = collectives_of_a_step(enabled=True, verbose=True, prof_all=False, prof_ops=ops)
    assert len(said.lines) == sum(int(times) for kind, _, times, _ in said.rows if kind in kinds)
    assert {line.partition(":")[0] for line in said.lines} == kinds
    assert {line.split("  ")[0] for line in said.text.splitlines()[2:]} == kinds


def test_debug_names_the_unit_and_a_name_that_means_nothing_is_said(caplog):
    ledger = Ledger(phase="forward")
    log = listen(ledger, ops=["barrier", "broadcast"], verbose=True, debug=True)
    ledger.add("broadcast", "blocks.0", 2000)
    ledger.add("broadcast", "", 0)
    ledger.add("all-gather", "blocks.0", 1)
    assert 'a "barrier"' in caplog.messages[0]
    assert caplog.messages[1:] == ["broadcast for blocks.0: 2.00 kB in forward", "broadcast for root: 0 B in forward"]
    assert log.calls == {("broadcast", 2000): 1, ("broadcast", 0): 1}


def test_a_log_goes_with_its_ledger_and_without_the_key_nobody_listens():
    gc.collect()
    ledger = Ledger()
    listen(ledger, ops=None, verbose=False, debug=False)
    ledger.add("all-gather", "", 5000)
    ledger.add("all-gather", "", 5000)
    assert log_summary().splitlines()[2].split() == ["all-gather", "5.00", "kB", "2", "10.0", "kB"]
    del ledger
    assert log_summary() == ""
    watch = start(0).watch
    Observer(settings(comms_logger={"verbose": True}), watch, 0)
    assert watch.ledger.listener is None


# --- through the engine -----------------------------------------------------------------------------------------------


def everything(folder: Path, stage: int) -> tuple[list[float], str]:
    keys = {
        "steps_per_print": 2,
        "wall_clock_breakdown": True,
        "memory_breakdown": True,
        "flops_profiler": {"enabled": True, "profile_step": 2, "output_file": str(folder / "flops.txt")},
        "csv_monitor": {"enabled": True, "output_path": str(folder), "job_name": "run"},
        "comms_logger": {"enabled": True, "verbose": True, "debug": True},
    }
    engine = start(stage, accumulation=2, more=keys)
    losses = take_steps(engine, 8)
    engine.monitor.write_events([("Users/own", 3.5, 16)])
    found = log_summary()
    engine.destroy()
    return losses, found


def nothing(stage: int) -> list[float]:
    return take_steps(start(stage, accumulation=2), 8)


@pytest.mark.parametrize("stage", [0, 3])
def test_an_engine_does_what_the_keys_say_and_trains_the_same(two, tmp_path, stage):
    (losses, summary), (_, silent) = two.run(everything, tmp_path, stage)
    assert losses == two.run(nothing, stage)[0]
    assert "reduce-scatter" in summary
    assert silent == ""
    assert (tmp_path / "flops.txt").read_text().count("blocks.") >= 3
    rows = [row.split(",") for row in (tmp_path / "run" / "Train_Samples_train_loss.csv").read_text().splitlines()]
    assert [int(row[0]) for row in rows[1:]] == [8, 16, 24, 32]
    means = [(losses[2 * at] + losses[2 * at + 1]) / 2 for at in range(4)]
    assert [float(row[1]) for row in rows[1:]] == pytest.approx(means, rel=1e-6)
    assert (tmp_path / "run" / "Users_own.csv").read_text().splitlines()[1] == "16,3.5"


def test_an_engine_logs_the_lines_that_were_asked_for(caplog):
    more = {"steps_per_print": 2, "wall_clock_breakdown": True, "memory_breakdown": True, "comms_logger": {"enabled": True}}
    take_steps(start(1, more=more), 4)
    lines = [record.getMessage() for record in caplog.records]
    assert sum(bool(re.match(r"step [24]: skipped 0, lr 0.01", line)) for line in lines) == 2
    assert sum(line.startswith("time of step") and "backward" in line for line in lines) == 2
    assert any(line.startswith("memory after step of step 4: ") and "states" in line for line in lines)


def test_a_monitor_that_fails_is_switched_off_and_training_goes_on(tmp_path, caplog):
    engine = start(0, more={"csv_monitor": {"enabled": True, "output_path": str(tmp_path), "job_name": "run"}})
    take_steps(engine, 1)
    folder = tmp_path / "run"
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()
    folder.write_text("a file where the folder was")
    take_steps(engine, 2, first=1)
    assert engine.global_steps == 3
    assert caplog.text.count("the monitor failed and is switched off; training goes on") == 1


def cannot_write(folder: Path) -> str:
    try:
        start(2, more={"csv_monitor": {"enabled": True, "output_path": str(folder / "file"), "job_name": "run"}})
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def test_a_monitor_that_cannot_begin_stops_every_rank(two, tmp_path):
    (tmp_path / "file").write_text("no folder")
    one, other = two.run(cannot_write, tmp_path)
    assert "NotADirectoryError" in one or "FileExistsError" in one
    assert "[rank 0]" in other
    assert "file" in other
