"""Scaling page: what the papers say of more and more devices, as curves of this planner with the papers' figures on them."""

from __future__ import annotations

from collections.abc import Sequence

from naught.pictures import Picture, Statement
from naught.report.curves import Axis, Band, Curve, Curves, Dot, axis_over, draw_curves
from naught.report.html import Html, element, table
from naught.report.page import Section, page, panel

__all__ = ["scaling_page"]

_TITLE = "Scaling, as the ZeRO papers state it"
_WHAT = (
    "Lines are forecasts of this planner for the papers' machine: DGX-2 nodes of 16 V100 with 32 GB, 1.5 TB of memory and 28 TB "
    "of NVMe. Nothing here was measured by us. Marks are the papers' figures; the tables say how far those were checked."
)
_COLORS = {"ours": ("blue", "vermilion", "green"), "most": ("sky",), "reference": ("ink", "brown")}
_MARKS = {"diamond": "the paper", "triangle": "the paper: at least"}
_LOOKS = {"ours": "line", "most": "thin", "reference": "dashed"}


def scaling_page(statements: Sequence[Statement]) -> Html:
    header = element("header", element("div", element("h1", _TITLE), class_="title"), element("p", _WHAT, class_="lead"))
    return page(_TITLE, header, [_section(statement) for statement in statements])


def _section(statement: Statement) -> Section:
    rows = table(("", "the paper", "ours", "how the paper's figure is known"), statement.rows)
    pieces = [*(draw_curves(_curves(picture)) for picture in statement.pictures), panel("Side by side", rows)]
    return Section(statement.title, pieces, lead=f"The paper: {statement.paper} Ours: {statement.ours}")


def _curves(picture: Picture) -> Curves:
    scales = picture.scales
    colors = _colors(picture)
    values = [spot.value for line in picture.lines for spot in line.spots] + [figure.spot.value for figure in picture.figures]
    return Curves(
        picture.name,
        picture.title,
        Axis("devices", scales.devices, str, scales.log_devices),
        axis_over(scales.unit, values, show=scales.show, log=scales.log_values),
        [Curve(line.name, colors[line.name], _LOOKS[line.kind], line.spots) for line in picture.lines],
        [
            Dot(*figure.spot, colors[figure.line], "triangle" if figure.at_least else "diamond", figure.text, figure.side)
            for figure in picture.figures
        ],
        _MARKS,
        Band(*picture.stretch) if picture.stretch else None,
    )


def _colors(picture: Picture) -> dict[str, str]:
    """By kind and order: blue is the first of ours in every picture."""
    return {
        line.name: color
        for kind, colors in _COLORS.items()
        for line, color in zip((line for line in picture.lines if line.kind == kind), colors, strict=False)
    }
