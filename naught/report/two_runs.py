"""Two runs: one page that sets them beside each other. The first is drawn first."""

from __future__ import annotations

from collections.abc import Callable

from naught.report import words
from naught.report.charts import Drawn, draw
from naught.report.comparing import compare_losses, differing_settings, say_losses
from naught.report.facts import commands, errors, facts_of, origin, progress, status_of
from naught.report.figures import Figures, figures_of
from naught.report.html import Html, breakable, element, table
from naught.report.page import Section, page, panel
from naught.report.panels import memory_panel, phase_panel, traffic_panel
from naught.report.run_charts import RUN_COLORS, loss_chart, simple_chart
from naught.report.run_data import Run

__all__ = ["two_runs"]


def two_runs(one: Run, other: Run) -> Html:
    runs = (one, other)
    sections = [
        Section("Learning", _learning(runs), lead=say_losses(compare_losses(one.metrics.steps, other.metrics.steps))),
        Section("Memory", [memory_panel(runs)], lead="Bytes that one rank holds on its device."),
        Section("Time", [phase_panel(runs), traffic_panel(runs)]),
        Section("Configuration", [_settings(one, other)]),
        Section("Environment", [commands(runs)]),
    ]
    return page(f"{one.title} and {other.title}", _header(runs), sections)


def _header(runs: tuple[Run, Run]) -> Html:
    titles = [_title(run, color) for run, color in zip(runs, RUN_COLORS, strict=True)]
    beside = element("div", _figures(runs), _facts(runs), class_="grid")
    return element("header", *titles, errors(runs), beside)


def _title(run: Run, color: str) -> Html:
    swatch = element("i", class_=f"swatch area c-{color}")
    return element(
        "div", swatch, element("h1", run.title), status_of(run), element("span", progress(run), class_="progress"), class_="title"
    )


_Number = Callable[[Figures], float | None]
_SHOWN: tuple[tuple[str, _Number, Callable[[float | None], str]], ...] = (
    ("training loss, nats", lambda found: found.loss.loss if found.loss else None, words.loss),
    ("validation loss, nats", lambda found: found.validation.loss if found.validation else None, words.loss),
    ("validation, bits per byte", lambda found: found.validation.bits if found.validation else None, words.bits),
    ("throughput, tokens/s", lambda found: found.tokens_s, words.rate),
    ("time of a step", lambda found: found.step_s, words.seconds),
    ("peak memory of a rank", lambda found: found.peak_bytes, words.optional_bytes),
    ("sent by a rank in a step", lambda found: found.sent_bytes, words.optional_bytes),
    ("waited for communication", lambda found: found.waited_share, words.percent),
    ("MFU", lambda found: found.mfu, words.percent),
)


def _figures(runs: tuple[Run, Run]) -> Html:
    one, other = (figures_of(run) for run in runs)
    rows = [(name, show(number(one)), show(number(other)), _ratio(number(one), number(other))) for name, number, show in _SHOWN]
    rows = [row for row in rows if row[1:3] != ("-", "-")]
    heads = ("figures", runs[0].title, runs[1].title, "second / first")
    return panel("", table(heads, rows, class_="numbers"), size="half")


def _ratio(one: float | None, other: float | None) -> str:
    return f"{other / one:.3f}" if one and other else "-"


def _facts(runs: tuple[Run, Run]) -> Html:
    """All that is said of either; what differs stands out."""
    mine, theirs = (facts_of(run) for run in runs)
    rows = [
        (name, _marked(mine.get(name, "-"), differs), _marked(theirs.get(name, "-"), differs))
        for name in dict.fromkeys([*mine, *theirs])
        for differs in [mine.get(name) != theirs.get(name)]
    ]
    return panel("", table(("facts", runs[0].title, runs[1].title), rows, class_="beside"), size="half")


def _marked(text: str, differs: bool) -> str:
    return element("mark", breakable(text)) if differs else breakable(text)


def _learning(runs: tuple[Run, Run]) -> list[Drawn]:
    if not any(run.metrics.steps.steps or run.metrics.evals.steps for run in runs):
        return []
    small = [
        simple_chart(runs, "tokens_s", title="Throughput", unit="rate"),
        simple_chart(runs, "grad_norm", title="Gradient norm"),
    ]
    return [draw(loss_chart(runs), group="steps"), *(draw(chart, size="half", group="steps") for chart in small if chart)]


def _settings(one: Run, other: Run) -> Html:
    found = differing_settings(one, other)
    if not found:
        return panel("", element("p", "No key of the two configurations differs."))
    rows = [(row.key, row.values[0], origin(row.origins[0]), row.values[1], origin(row.origins[1])) for row in found]
    return panel("", table(("keys that differ", one.title, "from", other.title, "from"), rows, class_="keys"))
