"""A run that does not get on says where every rank is, once, and goes on if it can. A run that does says nothing."""

from __future__ import annotations

import gc
import logging
import os
import re
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import torch.distributed as dist
from menagerie import Plain, batch_of, my_rank
from training import config_of, engine_of, start, take_steps
from workers import PATIENCE_S, World, run_script

from naught.comm.ledger import Call
from naught.config import Config, load
from naught.errors import ConfigError
from naught.stall import Place, ranks_named, story_of
from naught.watchdog import _Sentry

pytestmark = pytest.mark.usefixtures("one_thread")

SOON = {"naught": {"watchdog_s": 0.5}}
ORDER = "The ranks must run the same modules in the same order; look at"

# --- the words --------------------------------------------------------------------------------------------------------

WAITS = Place(Call(412, "reduce-scatter", "layers.7", "backward"), "backward of step 57", "forward of step 57", None)
COMPUTES = Place(None, "forward of step 1", "", Call(9, "exchange", "", "start"))
OUTSIDE = Place(None, "", "update of step 56", Call(411, "all-gather", "", "step"))


@pytest.mark.parametrize(
    ("places", "told"),
    [
        (
            [WAITS, OUTSIDE, WAITS, None],
            'Ranks 0 and 2 wait in reduce-scatter #412 for "layers.7" (backward of step 57); rank 1 is outside of forward, '
            'backward and step, behind the update of step 56, after collective #411 (all-gather for "root"); rank 3 says '
            f"nothing: its process may be dead or stopped. {ORDER} the log and the stack of ranks 1 and 3.",
        ),
        (
            [None, None, WAITS],
            'Rank 2 waits in reduce-scatter #412 for "layers.7" (backward of step 57); ranks 0 and 1 say nothing: their '
            "processes may be dead or stopped. Look at the log of ranks 0 and 1.",
        ),
        (
            [WAITS._replace(waits=Call(8, "exchange", "", "idle"), phase=""), COMPUTES],
            "Rank 0 waits in exchange #8 (behind the forward of step 57); rank 1 is in the forward of step 1, after collective "
            f"#9 (exchange). {ORDER} the log and the stack of rank 1.",
        ),
        (
            [WAITS, WAITS._replace(waits=Call(412, "all-gather", "", "backward"))],
            'Rank 0 waits in reduce-scatter #412 for "layers.7" (backward of step 57); rank 1 waits in all-gather #412 for '
            f'"root" (backward of step 57). {ORDER} the stacks of all.',
        ),
        (
            [WAITS] * 4,
            'Ranks 0-3 wait in reduce-scatter #412 for "layers.7" (backward of step 57). All wait in the same one: look at the '
            "network between them.",
        ),
        (
            [COMPUTES, Place(None, "", "", None)],
            "Rank 0 is in the forward of step 1, after collective #9 (exchange); rank 1 is outside of forward, backward and "
            "step, before the first step, after no collective. No rank waits in a collective: this may be a long computation, as "
            "where a first step compiles, or a device that is stuck; look at the stacks, or set naught.watchdog_s to more than a "
            "step takes.",
        ),
    ],
)
def test_one_warning_tells_of_all_ranks_who_waits_for_what_and_where_to_look(places, told):
    assert story_of(60.0, dict(enumerate(places))) == f"no progress for 60 s. {told}"


def test_many_ranks_are_told_in_few_words():
    assert ranks_named([3]) == "rank 3"
    assert ranks_named([0, 1]) == "ranks 0 and 1"
    assert ranks_named([0, 1, 2, 3, 5, 7, 8, 10, 11, 12]) == "ranks 0-3, 5, 7, 8 and 10-12"
    assert ranks_named(range(64)) == "ranks 0-63"


@pytest.mark.parametrize("place", [WAITS, COMPUTES, OUTSIDE, Place(None, "", "", None, 1.5)])
def test_a_place_arrives_as_it_was_sent(place):
    assert Place.from_text(place.to_text()) == place


# --- ranks that do not get on -----------------------------------------------------------------------------------------


@contextmanager
def hearing(act: Callable[[str], None]) -> Iterator[list[str]]:
    """Collect what is logged meanwhile, and do something about every line."""
    lines: list[str] = []

    class Ear(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())
            act(lines[-1])

    ear = Ear()
    logging.getLogger("naught").addHandler(ear)
    try:
        yield lines
    finally:
        logging.getLogger("naught").removeHandler(ear)


@contextmanager
def errors_to(path: Path) -> Iterator[None]:
    """What is written to the system's stream of errors goes to a file meanwhile."""
    before = os.dup(2)
    with path.open("w") as file:
        os.dup2(file.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(before, 2)
        os.close(before)


def store() -> Any:
    return dist.distributed_c10d._get_default_store()


def lingers_outside(key: str) -> None:
    store().wait([key])


def one_stays_away(key: str, folder: str) -> tuple[list[str], int, str]:
    """Rank 1 does not come to the third step before somebody has complained twice."""
    engine = start(3, more=SOON)
    take_steps(engine, 2)
    latest = engine.watch.ledger.count
    heard = threading.Event()
    complaints = 0

    def act(line: str) -> None:
        nonlocal complaints
        complaints += line.startswith("no progress")
        if complaints == 2 and line.startswith("no progress"):
            store().set(key, "")
        if line.startswith("progress again"):
            heard.set()

    path = Path(folder, f"errors{my_rank()}")
    with hearing(act) as lines, errors_to(path):
        if my_rank() == 1:
            lingers_outside(key)
        take_steps(engine, 1, first=2)
        if my_rank() == 0:
            assert heard.wait(30)
    engine.destroy()
    assert engine.watchdog.sentry is not None
    assert not engine.watchdog.sentry.is_alive()
    return lines, latest, path.read_text(encoding="utf-8")


def test_a_rank_that_stays_away_is_named_with_its_stack_and_it_is_told_when_it_comes(two, tmp_path):
    (told, latest, errors), (silent, _, its_errors) = two.run(one_stays_away, uuid4().hex, str(tmp_path))
    story = (
        f'Rank 0 waits in all-gather #{latest + 1} for "root" (forward of step 3); rank 1 is outside of forward, backward and '
        f"step, behind the update of step 2, after collective #{latest} (exchange). {ORDER} the log and the stack of rank 1."
    )
    assert told[:2] == [f"no progress for {seconds} s. {story}" for seconds in (0.5, 1)]
    assert re.fullmatch(r"progress again, after [0-9.]+ (ms|s)", told[2])
    assert (len(told), silent) == (3, [])
    assert errors.count("no progress; the stacks of rank 0:") == its_errors.count("no progress; the stacks of rank 1:") == 2
    assert "in wait" in errors
    assert "in lingers_outside" in its_errors


def one_is_stopped(key: str) -> list[str]:
    engine = start(2, more=SOON)
    take_steps(engine, 2)
    if my_rank() == 1:
        store().set(key, str(os.getpid()))

    def act(line: str) -> None:
        if line.startswith("no progress"):
            os.kill(int(store().get(key)), signal.SIGCONT)

    with hearing(act) as lines:
        if my_rank() == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        take_steps(engine, 1, first=2)
    engine.destroy()
    return [line for line in lines if line.startswith("no progress")]


def test_a_rank_that_is_stopped_says_nothing_and_that_is_said(two):
    (told, *more), silent = two.run(one_is_stopped, uuid4().hex)
    assert re.fullmatch(
        r'no progress for 0\.5 s\. Rank 0 waits in reduce-scatter #\d+ for "head" \(backward of step 3\); rank 1 says nothing: '
        r"its process may be dead or stopped\. Look at the log of rank 1\.",
        told,
    )
    assert not more
    assert not silent


def one_is_killed(folder: str) -> None:
    """Rank 2 dies once rank 0 waits for both others: it would notice only when rank 1 had come."""
    engine = start(2, more=SOON)
    take_steps(engine, 2)
    Path(folder, f"pid{my_rank()}").write_text(str(os.getpid()))
    engine.schedule.group.meet()
    if my_rank() > 0:
        threading.Event().wait()

    def act(line: str) -> None:
        if "ranks 1 and 2 are outside" in line:
            os.kill(int(Path(folder, "pid2").read_text()), signal.SIGKILL)
        else:
            Path(folder, "told").write_text(line)
            os.kill(int(Path(folder, "pid1").read_text()), signal.SIGKILL)

    with hearing(act):
        take_steps(engine, 1, first=2)


def test_a_rank_that_was_killed_says_nothing_and_those_who_are_well_are_told_from_it(tmp_path):
    world = World(3)
    try:
        world._start()  # its run() would not wait for long once a rank has died
        for pipe in world.pipes:
            pipe.send((one_is_killed, (str(tmp_path),), {}))
        assert world.pipes[0].poll(PATIENCE_S)
    finally:
        world.stop()
    assert re.fullmatch(
        r'no progress for 1 s\. Rank 0 waits in reduce-scatter #(\d+) for "head" \(backward of step 3\); rank 1 is outside of '
        r"forward, backward and step, behind the update of step 2, after collective #\d+ \(exchange\); rank 2 says nothing: its "
        rf"process may be dead or stopped\. {ORDER} the log and the stack of ranks 1 and 2\.",
        (tmp_path / "told").read_text(),
    )


class Slow(Plain):
    """Computes until it is told to go on."""

    key = ""

    def body(self, x):
        if self.key:
            store().wait([self.key])
        return super().body(x)


def all_compute(key: str) -> tuple[list[str], dict[bool, float]]:
    model = Slow()
    engine = engine_of(model, config_of(0, more=SOON))
    take_steps(engine, 2)
    model.key = key
    with hearing(lambda line: store().set(key, "") if line.startswith("no progress") else None) as lines:
        take_steps(engine, 1, first=2)
    sentry = engine.watchdog.sentry
    assert sentry is not None
    engine.destroy()
    return [line for line in lines if line.startswith("no progress")], sentry.patience_s


def test_ranks_that_compute_for_long_are_complained_of_once_and_then_have_twice_the_time(two):
    told = two.run(all_compute, uuid4().hex)
    lines = [line for lines, _ in told for line in lines]
    assert len(lines) == 1
    assert re.match(r"no progress for 0\.5 s\. Ranks 0 and 1 are in the forward of step 3, after collective #\d+ \(", lines[0])
    assert ". No rank waits in a collective: this may be a long computation" in lines[0]
    assert [patience for _, patience in told] == [{True: 0.5, False: 1.0}] * 2


def both_ask() -> tuple[int, list[str]]:
    """At the very same time: nobody has seen the other's question."""
    engine = start(2, more={"naught": {"watchdog_s": 60}})
    sentry = _Sentry(engine.schedule.group, 60.0, engine.watchdog.place)
    with hearing(lambda _: None) as lines:
        engine.schedule.group.meet()
        sentry._say(COMPUTES, asks=True)
        engine.schedule.group.meet()
    engine.destroy()
    return sentry.round, lines


def test_of_ranks_that_ask_at_once_the_lowest_tells(two):
    (round_, told), (other, silent) = two.run(both_ask)
    assert round_ == other == 1
    assert [line.partition(",")[0] for line in told] == ["no progress for 60 s. Ranks 0 and 1 are in the forward of step 1"]
    assert silent == []


def places_of_a_plain_loop() -> list[str]:
    """What is known where a script calls backward and the optimizer by itself."""
    engine = start(2, more=SOON)
    found = []

    def note(*_: object) -> None:
        found.append(engine.watchdog.place().phase)

    for _ in range(2):
        note()
        loss = engine(batch_of(0, my_rank()))
        note()
        loss.register_hook(note)
        loss.backward()
        engine.optimizer.step()
    engine.backward(engine(batch_of(0, my_rank())))
    note()
    engine.step()
    note()
    return found


def test_a_phase_that_the_user_has_begun_is_known_until_the_engine_leaves_it(two):
    for found in two.run(places_of_a_plain_loop):
        assert found == ["", "", "backward of step 1", "", "", "backward of step 2", "", ""]


# --- no noise ---------------------------------------------------------------------------------------------------------


def lives(watchdog_s: float) -> list[bool]:
    """Whether there is a thread, and whether it is there still, once the engine is gone."""
    engine = start(1, more={"naught": {"watchdog_s": watchdog_s}})
    sentry = engine.watchdog.sentry
    if sentry is None:
        return [False]
    found = [sentry.is_alive()]
    del engine
    gc.collect()
    return [*found, sentry.is_alive()]


def test_an_engine_takes_its_thread_along_zero_is_never_and_one_rank_watches_nobody(two):
    assert two.run(lives, 60) == [[True, False]] * 2
    assert two.run(lives, 0) == [[False]] * 2
    assert lives(60) == [False]


@pytest.mark.parametrize("value", [-1, "60", float("nan")])
def test_only_a_number_of_seconds_is_one(value):
    with pytest.raises(ConfigError, match="watchdog_s"):
        load(config_of(0, more={"naught": {"watchdog_s": value}}))
    assert Config().naught.watchdog_s == 60.0


BLOCKED = """
import logging, sys
from test_watchdog import hearing, store

def act(line):
    store().set("go", "")
    print(line.partition(" is ")[0])

with hearing(act):
    if group.rank == 1:
        store().wait(["go"])
    take_steps(engine, 1, first=2)
"""


STARTS = """
import os, select, sys
import naught
naught.comm.init_distributed()
from training import start, take_steps
engine = start(2, more={"naught": {"watchdog_s": 4}})
take_steps(engine, 2)
group = engine.schedule.group
"""
OVER = "engine.watchdog.sentry.join(30); assert not engine.watchdog.sentry.is_alive()"
ENDS = {
    "just ends": "",
    "exits": "sys.exit(0)",
    "destroys the process group": "naught.comm.destroy_process_group()\n" + OVER,
    "destroys the engine": "engine.destroy()",
    "ends after the rank that keeps the store": """
pids = [int(text) for text in group.exchange_texts(str(os.getpid()))]
if group.rank == 1:
    select.select([os.pidfd_open(pids[0])], [], [], 60)  # until that process is gone
    OVER
""".replace("OVER", OVER),
    "ends while it still saves": "engine.save_checkpoint(sys.argv[1], asynchronous=True)",
}


@pytest.mark.parametrize("how", ENDS)
def test_a_script_that_ends_ends_as_without_a_watchdog(tmp_path, how):
    assert run_script(STARTS + ENDS[how], str(tmp_path), NAUGHT_DEVICE="cpu") == [(0, "", "")] * 2


def test_a_rank_that_waits_in_the_store_itself_answers_beside_that():
    soon = STARTS.replace('"watchdog_s": 4', '"watchdog_s": 2')
    (status, said, _), (other, nothing, _) = run_script(soon + BLOCKED, NAUGHT_DEVICE="cpu")
    assert (status, other, nothing) == (0, 0, "")
    assert re.fullmatch(
        r'no progress for 2 s\. Rank 0 waits in reduce-scatter #\d+ for "head" \(backward of step 3\); rank 1\n', said
    )
