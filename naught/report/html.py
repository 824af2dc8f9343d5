"""Html: markup in which every text that was not written as markup is escaped. Knows no runs."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from html import escape

__all__ = ["Html", "breakable", "data_block", "element", "joined", "table"]


class Html(str):
    """Markup. Any other text is escaped where it is put in."""

    __slots__ = ()


def element(name: str, /, *inside: str | None, **attributes: str | bool | None) -> Html:
    """An element; attribute `class_` is class, `data_x` is data-x, None and False are left out."""
    given = {key.rstrip("_").replace("_", "-"): value for key, value in attributes.items() if value not in (None, False)}
    shown = "".join(f" {key}" if value is True else f' {key}="{escape(str(value))}"' for key, value in given.items())
    if name == "meta":  # the only one here that has no end
        return Html(f"<{name}{shown}>")
    return Html(f"<{name}{shown}>{joined(inside)}</{name}>")


def joined(pieces: Iterable[str | None]) -> Html:
    return Html("".join(piece if isinstance(piece, Html) else escape(piece) for piece in pieces if piece is not None))


def breakable(text: str) -> Html:
    """A text that may be broken after its commas, where otherwise a long one would be broken anywhere."""
    return Html(escape(text).replace(",", ",<wbr>"))


def table(header: Sequence[str], rows: Iterable[Sequence[str | None]], *, class_: str | None = None) -> Html:
    """A table that scrolls by itself where the window is narrow. Its first column names the row."""
    head = element("thead", element("tr", *(element("th", cell, scope="col") for cell in header)))
    body = element("tbody", *(element("tr", *_cells(row)) for row in rows))
    return element("div", element("table", head, body, class_=class_), class_="scroll")


def _cells(row: Sequence[str | None]) -> list[Html]:
    return [element("th", row[0], scope="row"), *(element("td", cell) for cell in row[1:])]


def data_block(name: str, data: object) -> Html:
    """Data for a script to read. A text in it cannot end the block, whatever it says."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"), ensure_ascii=True).replace("<", "\\u003c")
    return Html(f'<script type="application/json" id="{escape(name)}">{text}</script>')
