"""Page: the one file around what a report shows, with styles, scripts and data inside. Asks the network for nothing."""

from __future__ import annotations

import hashlib
from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files

from naught.report.charts import Drawn
from naught.report.html import Html, data_block, element, joined

__all__ = ["GENERATOR", "Section", "page", "panel"]

GENERATOR = element("meta", name="generator", content="naught report")  # by this a file is known as one of ours

_HINT = "Drag across a chart to zoom in, double-click to see all of it again."
_NO_SCRIPT = "The charts over steps are drawn by a script in this file, and scripts are turned off. All else is here."


@dataclass(frozen=True)
class Section:
    """A heading and what is under it. Charts bring their data along; None is nothing, and a section of nothing is left out."""

    title: str
    pieces: Sequence[Html | Drawn | None]
    lead: str = ""


def page(title: str, header: Html, sections: Sequence[Section]) -> Html:
    """The whole file. Only the two scripts of this package may run in it, whatever a run's texts say; without a chart to draw
    there are none."""
    drawn = [piece for section in sections for piece in section.pieces if isinstance(piece, Drawn)]
    charts = {name: data for piece in drawn for name, data in piece.data.items()}
    scripts = [_asset("uPlot.iife.min.js"), _asset("report.js")] if drawn else []
    allowed = " ".join(map(_hash, scripts)) or "'none'"
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src {allowed}; base-uri 'none'"
    head = element(
        "head",
        element("meta", charset="utf-8"),
        GENERATOR,
        element("meta", http_equiv="Content-Security-Policy", content=policy),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("title", title),
        Html(f"<!-- uPlot, which draws the charts over steps:\n{_asset('uPlot.LICENSE')}\n-->") if drawn else None,
        element("style", Html((_asset("uPlot.min.css") if drawn else "") + _asset("report.css"))),
    )
    body = element(
        "body",
        element("main", header, *(_section(section) for section in sections)),
        element("footer", *((element("noscript", _NO_SCRIPT), _HINT) if drawn else ())),
        data_block("report-data", charts) if drawn else None,
        *(element("script", Html(script)) for script in scripts),
    )
    return joined([Html("<!doctype html>\n"), element("html", head, body, lang="en"), Html("\n")])


def _asset(name: str) -> str:
    return (files("naught.report") / "assets" / name).read_text(encoding="utf-8")


def _hash(script: str) -> str:
    return f"'sha256-{b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"


def _section(section: Section) -> Html | None:
    pieces = [piece.figure if isinstance(piece, Drawn) else piece for piece in section.pieces if piece]
    if not pieces:
        return None
    lead = element("p", section.lead, class_="lead") if section.lead else None
    return element("section", element("h2", section.title), lead, element("div", *pieces, class_="grid"))


def panel(title: str, *inside: str | None, size: str = "wide", note: str = "") -> Html:
    """A figure that needs no script."""
    caption = element("figcaption", element("h3", title)) if title else None
    return element("figure", caption, *inside, element("p", note, class_="note") if note else None, class_=size)
