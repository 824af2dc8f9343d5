"""A run is found by what people call it."""

from __future__ import annotations

from pathlib import Path

import pytest
from made_runs import write_run

from naught.errors import UsageError
from naught.run_folders import find_run


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    for name in ("0001-demo", "0002-other", "0010-demo", "0003-7"):
        write_run(tmp_path / "runs" / name, [])
    (tmp_path / "runs" / "0099-not-a-run").mkdir()
    (tmp_path / "runs" / "notes").mkdir()
    return tmp_path / "runs"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("10", "0010-demo"),
        ("0001", "0001-demo"),
        ("demo", "0010-demo"),
        ("last", "0010-demo"),
        ("0002-other", "0002-other"),
        ("other", "0002-other"),
    ],
)
def test_a_run_is_found_by_number_by_name_and_as_the_last(runs, text, found):
    assert find_run(text, runs) == runs / found


def test_a_run_is_found_by_its_path_wherever_it_is(runs, tmp_path):
    assert find_run(str(runs / "0001-demo"), tmp_path / "elsewhere") == runs / "0001-demo"


def test_what_is_no_run_is_refused_with_what_there_is(runs, tmp_path):
    with pytest.raises(
        UsageError, match=r'there is no run "demmo" \[.*runs\]\. The newest are 0010-demo, 0003-7, 0002-other, 0001-demo'
    ):
        find_run("demmo", runs)
    with pytest.raises(UsageError, match='there is no run "99"'):
        find_run("99", runs)
    with pytest.raises(UsageError, match=r"it has no run\.json"):
        find_run(str(runs / "notes"), runs)
    with pytest.raises(UsageError, match="there is no such folder"):
        find_run(str(runs / "0004-gone"), runs)
    with pytest.raises(UsageError, match=r"say where runs are with --runs DIR; .*nowhere has none"):
        find_run("last", tmp_path / "nowhere")
    with pytest.raises(UsageError, match='there is no run ""'):
        find_run("", runs)
