"""The report: what it reads from a run folder, and what it says of it."""

from __future__ import annotations

import argparse
import json
import math
import random
import subprocess
import sys
from pathlib import Path

import pytest
from made_runs import (
    CONFIG,
    MB,
    PLAN,
    eval_record,
    records,
    resume,
    run_json,
    save_record,
    step_record,
    write_run,
    write_stages_folder,
)

from naught.cli.report import run_report
from naught.errors import UsageError
from naught.report import write_report, write_stages
from naught.report.comparing import compare_losses, differing_settings, say_groups, say_losses
from naught.report.figures import figures_of, phases_of
from naught.report.html import Html, data_block, element
from naught.report.memory import OTHER, by_position, compared_with_plan
from naught.report.run_data import read_run
from naught.report.series import picked, thin
from naught.report.tiles import say_yardsticks


def page_of(tmp_path: Path, *runs: Path) -> str:
    out = tmp_path / "page.html"
    write_report(runs, out)
    return out.read_text()


# Reading


def test_the_last_record_of_a_step_counts_and_nothing_of_an_earlier_one(tmp_path):
    lines = [{"kind": "step", "step": step, "loss": loss} for step, loss in ((1, 5.0), (2, 4.0), (5, 3.0), (2, 4.5), (4, 3.5))]
    lines[1]["grad_norm"] = 7.0
    table = read_run(write_run(tmp_path / "run", lines)).metrics.steps
    assert list(table.steps) == [1, 2, 4, 5]
    assert list(table.column("loss")) == [5.0, 4.5, 3.5, 3.0]
    assert all(math.isnan(norm) for norm in table.column("grad_norm"))


def test_a_resume_supersedes_what_was_written_beyond_it(tmp_path):
    lines = records(140)
    again = [step_record(step, random.Random(9)) for step in range(101, 121)]
    metrics = read_run(write_run(tmp_path / "run", [*lines, save_record(130), resume(100), *again])).metrics
    assert list(metrics.steps.steps) == list(range(1, 121))
    assert metrics.steps.column("loss")[119] == again[-1]["loss"]
    assert list(metrics.evals.steps) == [50, 100]
    assert [save.tag for save in metrics.saves] == ["global_step100"]
    assert [(found.step, found.tag, found.world) for found in metrics.resumes] == [(100, "global_step100", 4)]


def test_a_step_that_lacks_a_number_has_none_there_and_shifts_no_other(tmp_path):
    lines = [{"kind": "step", "step": step, "loss": 1.0, **({"grad_norm": step} if step % 2 else {})} for step in range(1, 6)]
    table = read_run(write_run(tmp_path / "run", lines)).metrics.steps
    norms = table.column("grad_norm")
    assert [norms[0], norms[2], norms[4]] == [1, 3, 5]
    assert math.isnan(norms[1]) and math.isnan(norms[3])


def test_a_torn_last_line_is_ignored(tmp_path):
    metrics = read_run(write_run(tmp_path / "run", records(3), torn='{"kind": "step", "step": 4, "lo')).metrics
    assert list(metrics.steps.steps) == [1, 2, 3]
    assert metrics.unreadable == 0


def test_a_line_in_the_middle_that_cannot_be_read_is_told(tmp_path):
    run = write_run(tmp_path / "run", records(2), torn='{"kind": "st\n' + json.dumps(eval_record(2)) + "\n")
    assert read_run(run).metrics.unreadable == 1
    assert "1 line of run/metrics.jsonl could not be read" in page_of(tmp_path, run)


@pytest.mark.parametrize(
    "line",
    [
        "[]",
        "3",
        '"x"',
        "{}",
        '{"kind": "step", "step": "x"}',
        '{"kind": "step", "step": 1e400}',
        '{"kind": "step", "step": true}',
    ],
)
def test_a_line_that_is_no_record_is_counted_and_left_out(tmp_path, line):
    metrics = read_run(write_run(tmp_path / "run", [], torn=line + "\n")).metrics
    assert (len(metrics.steps.steps), metrics.unreadable) == (0, 1)


def test_a_folder_that_is_no_run_is_refused(tmp_path):
    with pytest.raises(UsageError, match=r"is no run: it has no run\.json\. Give the folder"):
        write_report([tmp_path], tmp_path / "page.html")
    (tmp_path / "run.json").write_text('{"name": ')
    with pytest.raises(UsageError, match=r"run\.json\" is not JSON"):
        write_report([tmp_path], tmp_path / "page.html")
    assert not (tmp_path / "page.html").exists()


def test_a_run_that_wrote_nothing_but_run_json_has_a_page(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").write_text("{}")
    page = page_of(tmp_path, tmp_path / "run")
    assert "No step is logged yet." in page
    assert '<span class="status unknown">unknown</span>' in page


def test_the_command_is_found_in_its_own_file_too(tmp_path):
    run = write_run(tmp_path / "run", [], command=None)
    (run / "command.txt").write_text("naught train --stage 2 && true")
    assert "naught train --stage 2 &amp;&amp; true" in page_of(tmp_path, run)


# Figures


def test_the_figures_leave_out_the_first_step_which_is_slow(tmp_path):
    lines = [
        step_record(step, random.Random(1))
        | {"seconds": 9.0 if step == 1 else 0.5, "tokens_s": 100.0 if step == 1 else 4096.0, "waited": {"all-gather": 0.1}}
        for step in (1, 2, 3)
    ]
    figures = figures_of(read_run(write_run(tmp_path / "run", lines)))
    assert figures.step_s == 0.5
    assert figures.tokens_s == 4096.0
    assert figures.waited_share == pytest.approx(0.2)
    assert figures.sent_bytes == 3_362_816 + 1_681_408 + 12
    assert figures.loss is not None
    assert (figures.loss.step, figures.loss.loss) == (3, lines[2]["loss"])


def test_the_peak_is_held_against_the_plan(tmp_path):
    run = read_run(write_run(tmp_path / "run", records(2), peak={"measured": 50 * MB}, plan=PLAN | {"total": 51 * MB}))
    assert figures_of(run).plan_error(51 * MB) == pytest.approx(0.02)
    assert "plan 51.0 MB, +2.0%" in page_of(tmp_path, tmp_path / "run")


def test_a_run_that_has_not_ended_takes_the_highest_peak_so_far(tmp_path):
    lines = records(3)
    lines[1]["memory"]["peak"] = 60 * MB
    assert figures_of(read_run(write_run(tmp_path / "run", lines, peak=None))).peak_bytes == 60 * MB
    for line in lines:
        line["memory"]["peak"] = None
    most = max(line["memory"]["allocated"]["forward"] for line in lines)
    assert figures_of(read_run(write_run(tmp_path / "other", lines, peak=None))).peak_bytes == most


def test_what_no_category_counts_is_activations_and_other(tmp_path):
    steps = read_run(write_run(tmp_path / "run", records(2))).metrics.steps
    assert list(by_position(steps, "forward")) == ["weights", "states", OTHER]  # reduce scratch is never held
    assert by_position(steps, "forward")[OTHER] == [39_800_000, 39_800_000]


def test_where_nobody_counts_all_bytes_there_is_no_other(tmp_path):
    lines = records(2)
    for line in lines:
        line["memory"]["allocated"] = dict.fromkeys(line["memory"]["allocated"])
    steps = read_run(write_run(tmp_path / "run", lines)).metrics.steps
    assert list(by_position(steps, "backward")) == ["weights", "states", "owned gradients", "gathered weights"]


def test_each_category_of_the_plan_stands_beside_what_was_measured_of_it(tmp_path):
    rows = {row.name: row for row in compared_with_plan(read_run(write_run(tmp_path / "run", records(2))))}
    assert (rows["parameters"].plan, rows["parameters"].measured) == (1_681_408, 1_681_408)
    assert (rows["gradients"].plan, rows["gradients"].measured) == (1_681_408, 1_681_408)
    assert (rows["optimizer states"].plan, rows["optimizer states"].measured) == (3_362_816, 3_362_816)
    assert (rows[OTHER].plan, rows[OTHER].measured) == (41_500_000, 39_800_000)
    assert (rows["gathered"].measured, rows["gathered"].passing) == (131_072, True)
    assert '<div class="value">at least 131 kB</div>' in page_of(tmp_path, tmp_path / "run")


def test_phases_and_the_rest_are_the_whole_step(tmp_path):
    lines = [
        step_record(step, random.Random(1))
        | {"seconds": 1.0, "phases": {"data": 0.1, "forward": 0.3, "backward": 0.4, "step": 0.1}}
        for step in (1, 2)
    ]
    phases = phases_of(read_run(write_run(tmp_path / "run", lines)).metrics.steps)
    assert phases == pytest.approx({"data": 0.1, "forward": 0.3, "backward": 0.4, "step": 0.1, "rest": 0.1})


def test_a_loss_is_read_against_its_yardsticks():
    yardsticks = {"order-0 entropy": 4.54, "zlib -9": 2.04, "lzma": 1.76}
    assert say_yardsticks(3.3, yardsticks) == "below order-0 entropy 4.54; not yet below zlib -9 2.04, lzma 1.76"
    assert say_yardsticks(1.5, yardsticks) == "below order-0 entropy 4.54, zlib -9 2.04, lzma 1.76"
    assert say_yardsticks(5.0, {"lzma": 1.76}) == "not yet below lzma 1.76"


# Comparing


def compared(tmp_path: Path, one: list[float], other: list[float], *, first: int = 1) -> str:
    folders = []
    for name, losses in (("one", one), ("other", other)):
        lines = [
            {"kind": "step", "step": step, "loss": loss} for step, loss in enumerate(losses, start=1 if name == "one" else first)
        ]
        folders.append(write_run(tmp_path / name, lines))
    mine, theirs = (read_run(folder).metrics.steps for folder in folders)
    return say_losses(compare_losses(mine, theirs))


def test_equal_losses_are_said_to_be_bitwise_equal(tmp_path):
    assert (
        compared(tmp_path, [0.1, 0.2, math.nan], [0.1, 0.2, math.nan, 0.4])
        == "The losses are bitwise equal at every one of the 3 common steps."
    )


def test_the_first_and_the_largest_difference_are_said(tmp_path):
    near = math.nextafter(0.2, 1)
    assert (
        compared(tmp_path, [0.1, 0.2, 0.5], [0.1, near, 0.25])
        == "The losses differ first at step 2, and most at step 3, by 0.25 nats (3 common steps)."
    )


def test_a_loss_that_is_not_finite_differs_from_one_that_is(tmp_path):
    assert "differ first at step 2, and most at step 2, by more than any number" in compared(
        tmp_path, [0.1, 0.2], [0.1, math.nan]
    )


def test_runs_without_a_common_step_are_not_called_equal(tmp_path):
    assert compared(tmp_path, [0.1, 0.2], [0.1, 0.2], first=3) == "The two runs have no logged step in common."


def test_several_runs_are_grouped_by_their_losses():
    losses = {"ddp": [1.0, 0.5], "zero1": [1.0, 0.5], "zero2": [1.0, 0.5], "fp16": [1.0, 0.75]}
    assert (
        say_groups(losses)
        == "Bitwise equal in all 2 losses: ddp, zero1 and zero2. fp16 differs from ddp from loss 2 on, by at most 0.25 nats."
    )


def test_only_keys_that_differ_are_listed_with_where_they_came_from(tmp_path):
    settings = CONFIG["settings"] | {"gradient_clipping": 0.5, "seed": 1}
    one = read_run(write_run(tmp_path / "one", []))
    other = read_run(write_run(tmp_path / "other", [], config={"settings": settings, "origins": {}}))
    found = {row.key: (row.values, row.origins) for row in differing_settings(one, other)}
    assert found == {"gradient_clipping": (("1.0", "0.5"), ("my.json line 3", "default")), "seed": (("", "1"), ("", "default"))}


# Thinning and escaping


def test_few_points_are_all_drawn():
    assert thin([[1.0] * 100], most=100) is None


def test_a_single_outlier_among_many_points_is_drawn():
    column = [math.sin(at) for at in range(100_000)]
    column[61_803], column[27_182] = 50.0, -50.0
    rows = thin([column], most=1000)
    assert rows is not None
    assert {0, 27_182, 61_803, 99_999} <= set(rows)
    assert len(rows) <= 1002
    assert rows == sorted(rows)


def test_every_column_keeps_the_extremes_of_every_stretch():
    noise = random.Random(5)
    columns = [[noise.random() for _ in range(5000)] for _ in range(3)]
    rows = thin(columns, most=600)
    assert rows is not None
    for column in columns:
        for start in range(0, 5000, 50):
            drawn = [column[row] for row in rows if start <= row < start + 50]
            assert (min(drawn), max(drawn)) == (min(column[start : start + 50]), max(column[start : start + 50]))


def test_a_gap_stays_a_gap():
    column = [1.0] * 10_000
    column[5001] = math.nan
    rows = thin([column], most=100)
    assert rows is not None
    assert picked(column, rows)[rows.index(5001)] is None


def test_a_long_run_makes_a_small_page_that_says_so(tmp_path):
    tape = [step_record(step, random.Random(1)) for step in range(1, 101)]
    run = write_run(tmp_path / "run", [tape[step % 100] | {"step": step} for step in range(1, 12_001)])
    page = page_of(tmp_path, run)
    assert len(page) < 1_000_000
    assert "of 12,000 steps are drawn: the lowest and the highest of each stretch." in page


def test_text_is_escaped_and_markup_is_not():
    assert element("b", "<i>", Html("<i>"), title='"x"') == '<b title="&quot;x&quot;">&lt;i&gt;<i></b>'


def test_no_text_ends_a_block_of_data():
    block = data_block("x", {"name": "</script><script>alert(1)</script><!--"})
    assert block.count("<") == 2
    assert json.loads(block.partition(">")[2].rpartition("<")[0]) == {"name": "</script><script>alert(1)</script><!--"}


def test_losses_that_are_no_numbers_become_gaps(tmp_path):
    lines = records(4)
    for line, loss in zip(lines, (math.nan, math.inf, -math.inf, None), strict=True):
        line["loss"] = loss
    page = page_of(tmp_path, write_run(tmp_path / "run", lines))
    data = json.loads(page.partition('id="report-data">')[2].partition("</script>")[0])
    assert [line["values"] for line in data["loss"]["traces"][0]["lines"]][1] == [None] * 4
    assert "The loss is not finite at 4 steps, the first of them 1" in page
    assert '<div class="figure">not finite' in page


# The page


def test_keys_that_somebody_chose_come_first_with_where_they_came_from(tmp_path):
    page = page_of(tmp_path, write_run(tmp_path / "run", []))
    chosen, _, folded = page.partition("<details>")
    assert 'zero_optimization.stage</th><td>3</td><td><span class="origin">--stage</span>' in chosen
    assert "my.json line 3" in chosen
    assert "stage3_prefetch_bucket_size" not in chosen
    assert "stage3_prefetch_bucket_size" in folded
    assert "11 keys have their defaults" in folded


def test_a_failed_run_shows_its_error(tmp_path):
    page = page_of(tmp_path, write_run(tmp_path / "run", records(3), status="failed", error="ModelError: <rank 1>"))
    assert '<span class="status failed">failed</span>' in page
    assert "<pre>ModelError: &lt;rank 1&gt;</pre>" in page


def test_a_run_without_a_plan_says_so(tmp_path):
    page = page_of(tmp_path, write_run(tmp_path / "run", records(3), plan=None))
    assert "there is no plan to hold it against" in page
    assert "Plan and measured" not in page


def test_two_runs_are_compared_in_the_order_in_which_they_were_named(tmp_path):
    one, other = (
        write_run(tmp_path / "0001-one", records(5)),
        write_run(tmp_path / "0002-other", records(5, stage=1), placement="stage1"),
    )
    page = page_of(tmp_path, other, one)
    assert page.index("0002-other training") < page.index("0001-one training")
    assert "The losses are bitwise equal at every one of the 5 common steps." in page
    assert "<mark>stage1</mark>" in page
    assert "No key of the two configurations differs." in page


def test_two_runs_of_one_name_are_told_apart_by_their_paths(tmp_path):
    one, other = (write_run(tmp_path / where / "0001-demo", records(2, stage=stage)) for where, stage in (("a", 3), ("b", 1)))
    page = page_of(tmp_path, one, other)
    assert f"<h1>{one}</h1>" in page
    assert f"<h1>{other}</h1>" in page


def test_a_report_shows_one_run_or_two(tmp_path):
    runs = [write_run(tmp_path / name, []) for name in "abc"]
    with pytest.raises(UsageError, match="shows one run or two, not 3"):
        write_report(runs, tmp_path / "page.html")


def test_the_page_of_the_stages_says_why_they_differ_and_why_some_are_absent(tmp_path):
    write_stages(write_stages_folder(tmp_path / "0009-stages"), tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert page.count("out of memory: 30 GB are not there") == 8  # two runs, each in two charts and two tables
    assert "Each rank keeps the states of its share only." in page
    assert (
        "Bitwise equal in all 23 losses: DDP, ZeRO-1, ZeRO-2 and ZeRO-3. ZeRO-3 in fp16 differs from DDP from loss 1 on" in page
    )
    assert "<td>24.00 s</td><td>1.20 s</td><td>1.12</td>" in page
    with pytest.raises(UsageError, match=r"has no stages\.json"):
        write_stages(tmp_path, tmp_path / "page.html")


def test_an_earlier_page_is_replaced_and_nothing_else_is(tmp_path):
    run = write_run(tmp_path / "run", [])
    out = tmp_path / "page.html"
    write_report([run], out)
    (run / "run.json").write_text(json.dumps(run_json(status="stopped")))
    write_report([run], out)
    assert ">stopped</span>" in out.read_text()
    for foreign in (tmp_path / "notes.html", tmp_path / "folder.html"):
        foreign.mkdir() if foreign.name.startswith("folder") else foreign.write_text("<html>mine</html>")
        with pytest.raises(UsageError, match=r"exists already, and is no report\. Name another file"):
            write_report([run], foreign)
    assert (tmp_path / "notes.html").read_text() == "<html>mine</html>"
    with pytest.raises(UsageError, match="cannot be written: No such file"):
        write_report([run], tmp_path / "nowhere" / "page.html")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder.html", "notes.html", "page.html", "run"]


def test_the_page_keeps_the_licence_of_what_draws_it(tmp_path):
    page = page_of(tmp_path, write_run(tmp_path / "run", records(2)))
    assert "Copyright (c) 2022 Leon Sorokin" in page
    assert "Permission is hereby granted" in page


# The command


def command(runs: Path, run: str, other: str | None = None, output: str | None = None) -> int:
    return run_report(argparse.Namespace(run=run, other=other, output=output, runs=str(runs)))


def test_the_command_writes_into_the_run_that_was_named_first(tmp_path, capsys):
    one, other = (write_run(tmp_path / name, records(2)) for name in ("0001-one", "0002-other"))
    assert command(tmp_path, "1") == 0
    assert (one / "report.html").is_file()
    assert capsys.readouterr().out == f"wrote {one / 'report.html'}\n"
    assert command(tmp_path, "other", "one") == 0
    assert (other / "report-vs-0001-one.html").is_file()
    assert command(tmp_path, "last", output=str(tmp_path / "mine.html")) == 0
    assert "<title>0002-other: done</title>" in (tmp_path / "mine.html").read_text()


def test_the_command_knows_a_folder_of_stages(tmp_path):
    write_stages_folder(tmp_path / "0009-stages")
    assert command(tmp_path, "stages") == 0
    assert "one training, placed in every way" in (tmp_path / "0009-stages" / "report.html").read_text()


def test_a_run_is_not_compared_with_itself(tmp_path):
    write_run(tmp_path / "0001-one", [])
    with pytest.raises(UsageError, match='"1" and "one" are the same run'):
        command(tmp_path, "1", "one")


def test_a_report_needs_nothing_slow(tmp_path):
    write_run(tmp_path / "0001-one", records(2))
    code = f"""import sys, argparse
from naught.cli.report import run_report
run_report(argparse.Namespace(run="1", other=None, output=None, runs={str(tmp_path)!r}))
print(*sorted({{"torch", "numpy", "pydantic"}} & set(sys.modules)))"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines()[-1] == ""
