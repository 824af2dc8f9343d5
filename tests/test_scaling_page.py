"""The page of the papers' statements on scaling: every line and every mark lies where its number says."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

import pytest

from naught.cli import main
from naught.presets import PRESETS
from naught.report import write_scaling
from naught.report.curves import axis_over
from naught.scaling import bandwidth, curve, largest_model
from naught.statements import STATEMENTS

PETA, TERA, GIGA = 1e15, 1e12, 1e9

# What the papers print, by picture: the number of devices and the value.
PRINTED = {
    "zero-total": {(400, 15 * PETA)},
    "zero-each": {(400, 38 * TERA)},
    "offload-total": {(1, 40 * TERA), (128, 128 * 30 * TERA)},
    "offload-each": {(1, 40 * TERA), (128, 30 * TERA)},
    "infinity-size": {(16, TERA), (512, 32 * TERA), (16, 100 * GIGA), (16, 20 * GIGA)},
    "infinity-bandwidth": {(1, 12 * GIGA), (16, 48 * GIGA), (16, 25 * GIGA), (1024, 3 * TERA), (1024, 1.5 * TERA)},
}
UNITS = {"T": TERA, "B": GIGA, " TB/s": TERA, " GB/s": GIGA}
AXES = {"zero-total": PETA, "zero-each": TERA, "offload-total": PETA, "offload-each": TERA}


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    out = tmp_path_factory.mktemp("scaling") / "page.html"
    write_scaling([make() for make in STATEMENTS.values()], out)
    return out.read_text()


class Drawing(NamedTuple):
    """A picture, read back from its SVG by nothing but the letters at its axes."""

    lines: dict[str, list[tuple[float, float]]]
    marks: list[tuple[float, float]]


class Scale(NamedTuple):
    """Two ticks, and whether what is between them is logarithmic."""

    low: tuple[float, float]
    high: tuple[float, float]
    log: bool

    def value(self, place: float) -> float:
        (start, first), (stop, last) = self.low, self.high
        share = (place - start) / (stop - start)
        return math.exp(math.log(first) + share * math.log(last / first)) if self.log else first + share * (last - first)


def percent(text: str) -> float:
    assert text.endswith("%")
    return float(text[:-1])


def written(text: str, one: float) -> float:
    number, unit = re.fullmatch(r"([0-9.]+)(.*)", text).groups()
    return float(number) * UNITS.get(unit, one)


def scale_of(ticks: list[tuple[float, float]]) -> Scale:
    """Ticks that multiply are of a logarithmic axis; those of the other sort start at zero."""
    return Scale(ticks[0], ticks[-1], log=ticks[0][1] > 0)


def drawing(page: str, name: str) -> Drawing:
    inside = re.search(rf'data-curves="{name}">(<svg class="inside">.*?</svg>)</div></figure>', page)[1]
    svg = ElementTree.fromstring(inside)
    texts = [text for text in svg.findall("text") if text.get("text-anchor")]
    y = scale_of([(percent(it.get("y")), written(it.text, AXES.get(name, 1))) for it in texts if it.get("x") == "-7"])
    x = scale_of([(percent(it.get("x")), float(it.text)) for it in texts if it.get("dy") == "17"])
    lines = {
        line.get("data-name"): [
            (x.value(float(a)), y.value(float(b))) for a, b in (p.split(",") for p in line.get("points").split())
        ]
        for line in svg.iter("polyline")
    }
    spots = [it for it in svg.findall("svg") if it.find("path") is not None]
    return Drawing(lines, [(x.value(percent(it.get("x"))), y.value(percent(it.get("y")))) for it in spots])


def close(found: list[tuple[float, float]], expected: list[tuple[float, float]]) -> bool:
    return len(found) == len(expected) and all(
        pytest.approx(one, rel=1e-3) == other for one, other in zip(sorted(found), sorted(expected), strict=True)
    )


@pytest.mark.parametrize("name", PRINTED)
def test_every_figure_of_a_paper_is_marked_at_its_value_and_no_other_is(page, name):
    assert close(drawing(page, name).marks, list(PRINTED[name]))


def test_the_line_of_zero_is_its_forecast_and_lies_above_the_linear_one(page):
    points = curve(PRESETS["zero-60b"], "stage3", tuple(range(64, 401, 16)))
    total, each = drawing(page, "zero-total").lines, drawing(page, "zero-each").lines
    assert close(total["ours, nothing overlaps"], [(point.ranks, point.total) for point in points])
    assert close(each["ours, nothing overlaps"], [(point.ranks, point.flops) for point in points])
    assert close(each["ours, everything overlaps"], [(point.ranks, point.most_flops) for point in points])
    assert close(total["linear"], [(point.ranks, points[0].flops * point.ranks) for point in points])
    assert close(each["linear"], [(point.ranks, points[0].flops) for point in points])
    assert total["ours, nothing overlaps"][-1][1] > 1.2 * total["linear"][-1][1]


def test_stage_2_starts_where_it_fits_and_crosses_offload_by_64_devices(page):
    ranks = (1, 2, 4, 8, 16, 32, 64, 128)
    lines = drawing(page, "offload-each").lines
    far, near = lines["ours, offload"], lines["ours, stage 2"]
    for drawn, placement in ((far, "stage2-offload"), (near, "stage2")):
        points = curve(PRESETS["offload-10b"], placement, ranks, samples=512)
        assert close(drawn, [(point.ranks, point.flops) for point in points if point.forecast])
    assert [round(devices) for devices, _ in near] == [32, 64, 128]
    assert [close > distant for (_, distant), (_, close) in zip(far[-3:], near, strict=True)] == [False, True, True]
    assert "stage 2 fits from 32 devices on and is faster from 64 on" in page
    assert 'width="14.286%"' in page, "the stretch of which the paper says so is one of seven doublings, to 128 from 64"


def test_the_largest_models_grow_with_the_devices_and_hold_what_the_paper_trained(page):
    lines = drawing(page, "infinity-size").lines
    disk = lines["ours, all on NVMe"]
    assert close(disk, [(count, largest_model("infinity-disk-all", count)) for count in (16, 32, 64, 128, 256, 512)])
    assert close(lines["linear"], [(count, disk[0][1] * count / 16) for count in (16, 32, 64, 128, 256, 512)])
    assert disk[0][1] > TERA and disk[-1][1] > 32 * TERA
    assert lines["ours, all in CPU memory"][0][1] < TERA, "without disks a trillion has no room on a node"


def test_bandwidth_of_host_and_disk_grows_with_the_nodes(page):
    lines = drawing(page, "infinity-bandwidth").lines
    ranks = [2**power for power in range(11)]
    assert close(lines["ours, CPU memory"], [(count, bandwidth(count).host) for count in ranks])
    assert close(lines["ours, NVMe"], [(count, bandwidth(count).disk) for count in ranks])
    assert [round(value / GIGA) for _, value in lines["ours, CPU memory"][:5]] == [12, 24, 48, 48, 48]
    for name in ("ours, CPU memory", "ours, NVMe"):
        assert lines[name][-1][1] == pytest.approx(64 * lines[name][4][1], rel=1e-3)
    assert close(lines["linear"], [(count, 3 * GIGA * count) for count in ranks[4:]])


def test_the_page_says_how_far_each_figure_was_checked(page):
    rows = re.findall(r'<tr><th scope="row">(.*?)</th><td>(.*?)</td><td>(.*?)</td><td>(.*?)</td></tr>', page)
    assert {known for *_, known in rows} == {"read in the paper", "by an account of the paper", "from memory, not checked"}
    assert ("all on NVMe, 32 nodes", "32T", "room for 53.2T", "by an account of the paper") in rows


def test_the_page_needs_no_script(page):
    assert "<script" not in page
    assert "script-src 'none'" in page.replace("&#x27;", "'")


@pytest.mark.parametrize("log", [False, True], ids=["plain", "log"])
@pytest.mark.parametrize(("least", "most"), [(1.0, 1.5), (12e9, 3e12), (0.02, 53.0), (9.99, 1000.0), (40.0, 49.0)])
def test_an_axis_has_round_ticks_around_all_values(least, most, log):
    ticks = axis_over("", [least, most], show=str, log=log).ticks
    assert ticks[0] <= least and ticks[-1] >= most
    assert 2 <= len(ticks) <= 10 and list(ticks) == sorted(ticks)
    assert all(f"{tick:e}"[:8] in ("1.000000", "2.000000", "5.000000") for tick in ticks) or not log
    assert log or ticks[0] == 0


# The command


def test_the_command_prints_the_tables_and_writes_the_page(tmp_path, capsys):
    out = tmp_path / "page.html"
    assert main(["plan", "--paper", "scaling", "--html", str(out)]) == 0
    said = capsys.readouterr()
    assert said.err == f"wrote {out}\n"
    assert [title in said.out for title in ("ZeRO, figure 3", "ZeRO-Offload, figure 11", "ZeRO-Infinity:")] == [True] * 3
    assert out.read_text().count("<section>") == 3
    assert main(["plan", "--paper", "offload-scaling", "--json", "--html", str(out)]) == 0
    assert json.loads(capsys.readouterr().out)["title"].startswith("ZeRO-Offload")
    assert re.findall('data-curves="(.*?)"', out.read_text()) == ["offload-total", "offload-each"]


def test_all_three_tables_are_one_list_of_data(capsys):
    assert main(["plan", "--paper", "scaling", "--json"]) == 0
    assert [table["title"].split(":")[0].split(",")[0] for table in json.loads(capsys.readouterr().out)] == [
        "ZeRO",
        "ZeRO-Offload",
        "ZeRO-Infinity",
    ]


@pytest.mark.parametrize("asked", [[], ["7.5B"], ["--paper", "zero-table1"], ["--models"]], ids=str)
def test_a_page_of_anything_else_is_refused_in_one_line(tmp_path, capsys, asked):
    assert main(["plan", *asked, "--html", str(tmp_path / "page.html")]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err == (
        "naught: --html draws what the papers say of scaling. "
        "Give --paper scaling, zero-scaling, offload-scaling or infinity-scaling\n"
    )
    assert not list(tmp_path.iterdir())


def test_nothing_but_an_earlier_page_is_overwritten(tmp_path, capsys):
    mine = tmp_path / "notes.html"
    mine.write_text("mine")
    for out, said in ((mine, "exists already, and is no report"), (tmp_path / "nowhere" / "page.html", "cannot be written")):
        assert main(["plan", "--paper", "zero-scaling", "--html", str(out)]) == 2
        error = capsys.readouterr().err
        assert said in error and error.count("\n") == 1
    assert mine.read_text() == "mine"
    assert [path.name for path in Path(tmp_path).iterdir()] == ["notes.html"]


@pytest.mark.parametrize("beside", [["7.5B"], ["--ranks", "64"], ["7.5B", "--gpu", "h100", "--batch", "2"]], ids=str)
def test_a_paper_has_models_and_machines_of_its_own(capsys, tmp_path, beside):
    out = tmp_path / "scaling.html"
    assert main(["plan", "--paper", "scaling", "--html", str(out), *beside]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert beside[0] in printed.err
    assert not out.exists()


def test_nothing_is_printed_where_its_page_cannot_be_written(capsys, tmp_path):
    (tmp_path / "mine.html").write_text("mine")
    assert main(["plan", "--paper", "scaling", "--html", str(tmp_path / "mine.html")]) == 2
    assert capsys.readouterr().out == ""
