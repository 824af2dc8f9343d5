"""Text: tables for the console. Uses rich where it is installed and somebody is looking, plain columns otherwise."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

__all__ = ["print_table", "table"]

_GAP = "  "


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as their widest cell; the first is flush left, the others right."""
    lines = [list(header), *(list(row) for row in rows)]
    widths = [max(len(line[at]) for line in lines) for at in range(len(header))]

    def put(line: Sequence[str]) -> str:
        cells = [
            cell.ljust(width) if at == 0 else cell.rjust(width) for at, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        return _GAP.join(cells).rstrip()

    rule = _GAP.join("-" * width for width in widths)
    return "\n".join([put(header), rule, *(put(row) for row in rows)])


def print_table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    if _somebody_looks():
        try:
            from rich.console import Console
            from rich.table import Table
        except ImportError:
            pass
        else:
            shown = Table(title=title, title_justify="left", box=None, pad_edge=False, header_style="bold")
            for at, name in enumerate(header):
                shown.add_column(name, justify="left" if at == 0 else "right", no_wrap=True)
            for row in rows:
                style = "green" if row[-1] == "yes" else "dim" if row[-1] == "no" else ""
                shown.add_row(*row, style=style)
            # A table that is wider than the window would be cut; plain columns wrap and lose nothing.
            console = Console()
            if console.measure(shown).maximum <= console.width:
                console.print(shown)
                return
    print(f"{title}\n{table(header, rows)}")


def _somebody_looks() -> bool:
    return sys.stdout.isatty() and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"
