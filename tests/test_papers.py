"""The papers' tables, cell by cell, as the planner's own formulas compute them."""

from __future__ import annotations

from itertools import pairwise

from naught.papers import TABLES
from naught.presets import PRESETS
from naught.scaling import CURVES, curve

ZERO_TABLE1 = """
1     120  120  120   2048 2048 2048  16000 16000 16000
4     52.5 41.3 30    896  704  512   7000  5500  4000
16    35.6 21.6 7.5   608  368  128   4750  2875  1000
64    31.4 16.6 1.88  536  284  32    4187  2218  250
256   30.4 15.4 0.47  518  263  8     4046  2054  62.5
1024  30.1 15.1 0.12  513  257  2     4011  2013  15.6
"""
ZERO_TABLE2 = """
1   64    2B   7.6B    14.4B   128B
2   128   4B   15.2B   28.8B   256B
4   256   8B   30.4B   57.6B   0.5T
8   512   16B  60.8B   115.2B  1T
16  1024  32B  121.6B  230.4B  2T
"""
FIGURE2 = """
0.10T    1.83     2.03   0.05  1.56    1.63
0.50T    9.16     3.91   0.12  6.25    2.50
1.01T    18.31    7.13   0.20  9.77    3.56
10.05T   182.81   24.38  0.76  64.00   8.00
101.47T  1845.70  88.59  3.08  400.00  18.00
"""


def rows(text: str) -> list[tuple[str, ...]]:
    return [tuple(line.split()) for line in text.strip().splitlines()]


def test_all_54_cells_of_zero_table_1():
    assert list(TABLES["zero-table1"]().rows) == rows(ZERO_TABLE1)


def test_all_20_theory_cells_of_zero_table_2():
    assert list(TABLES["zero-table2"]().rows) == rows(ZERO_TABLE2)


def test_zero_figure_1():
    assert [row[1] for row in TABLES["zero-figure1"]().rows] == ["120", "31.4", "16.6", "1.9"]


def test_infinity_figure_2a_but_for_its_one_misprint():
    computed = TABLES["infinity-figure2"]().rows
    assert [row[:6] for row in computed] == rows(FIGURE2)
    # The last column is what the paper prints: equal everywhere but in the first row's working memory.
    differing = [
        (at, ours, theirs)
        for at, row in enumerate(computed)
        for ours, theirs in zip(row[1:6], row[6].split(" / "), strict=True)
        if ours != theirs
    ]
    assert differing == [(0, "1.56", "1.95")]


def test_the_six_bandwidth_checks():
    shares = [row[5] for row in TABLES["infinity-bandwidth"]().rows]
    assert shares == ["50.6%", "50.6%", "91.6%", "58.4%", "73.7%", "89.4%"]


def test_c1_to_c5_come_in_the_papers_order():
    sizes = {row[0]: float(row[3].removesuffix("B")) for row in TABLES["zero-c1-c5"]().rows}
    assert sizes["C1"] < sizes["C2"] < sizes["C4"] < sizes["C5"]
    assert sizes["C1"] < sizes["C3"] < sizes["C4"]
    measured = {"C1": 40, "C2": 60, "C4": 140, "C5": 150}
    assert all(measured[name] < sizes[name] < 2 * measured[name] for name in measured), "formulas bound what was measured"


def test_zero_scales_more_than_linearly():
    """ZeRO, figure 3: with more devices each has room for a larger batch."""
    found = curve(PRESETS["zero-60b"], "stage3", (64, 128, 256, 400))
    totals = [point.total / point.ranks for point in found]
    assert all(later > 0.999 * earlier for earlier, later in pairwise(totals))
    assert totals[-1] > 1.2 * totals[0]
    assert [point.micro_batch for point in found] == sorted(point.micro_batch for point in found)


def test_offload_goes_where_stage_2_cannot_and_is_overtaken_near_64_devices():
    ranks = (1, 4, 16, 32, 64, 128)
    far, near = (curve(PRESETS["offload-10b"], name, ranks, samples=512) for name in ("stage2-offload", "stage2"))
    assert all(point.forecast is not None for point in far)
    assert [point.forecast is not None for point in near] == [False, False, False, True, True, True]
    assert [close.flops > point.flops for point, close in zip(far[3:], near[3:], strict=True)] == [False, True, True]
    assert far[0].flops > 40e12, "the paper: 40 TFLOP/s on one V100"


def test_infinity_has_room_for_a_trillion_on_a_node_and_32_on_32():
    rows = CURVES["infinity-scaling"]().rows
    assert [(row[0], row[1], row[-1]) for row in rows] == [
        ("1.0T", "1", "no"),
        ("1.0T", "1", "yes"),
        ("32.0T", "32", "no"),
        ("32.0T", "32", "yes"),
    ]
