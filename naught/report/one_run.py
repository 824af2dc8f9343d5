"""One run: its page from top to bottom. Every part is left out where the run has nothing to say of it."""

from __future__ import annotations

from naught.report.charts import Drawn, draw, key_of
from naught.report.facts import commands, configuration, environment, errors, facts_of, progress, status_of
from naught.report.html import Html, breakable, element
from naught.report.page import Section, page, panel
from naught.report.panels import phase_panel, plan_panel, traffic_panel
from naught.report.run_charts import loss_chart, memory_charts, simple_chart
from naught.report.run_data import Run
from naught.report.tiles import tiles

__all__ = ["one_run"]


def one_run(run: Run) -> Html:
    begun = bool(run.metrics.steps.steps or run.metrics.evals.steps)
    sections = [
        Section("Learning", _learning(run))
        if begun
        else Section("Learning", [panel("", element("p", "No step is logged yet."))]),
        Section("Memory", _memory(run), lead="Bytes that one rank holds on its device."),
        Section("Time", [phase_panel([run]), traffic_panel([run])]),
        Section("Configuration", [_framed(configuration(run))]),
        Section("Environment", [commands([run]), _framed(environment(run))]),
    ]
    return page(f"{run.title}: {run.course.status}", _header(run), sections)


def _header(run: Run) -> Html:
    facts = [element("div", element("dt", name), element("dd", breakable(text))) for name, text in facts_of(run).items()]
    return element(
        "header",
        element(
            "div", element("h1", run.title), status_of(run), element("span", progress(run), class_="progress"), class_="title"
        ),
        errors([run]),
        element("dl", *facts, class_="facts"),
        tiles(run),
    )


def _learning(run: Run) -> list[Drawn]:
    small = [
        simple_chart([run], "lr", title="Learning rate"),
        simple_chart([run], "grad_norm", title="Gradient norm"),
        simple_chart([run], "tokens_s", title="Throughput", unit="rate"),
    ]
    there = [chart for chart in small if chart]
    return [draw(loss_chart([run]), group="steps"), *(draw(chart, size="third", group="steps") for chart in there)]


def _memory(run: Run) -> list[Html | Drawn | None]:
    charts = memory_charts(run)
    most = max(charts, key=lambda chart: len(chart.traces[0].lines), default=None)
    key = element("div", key_of(most), class_="wide") if most else None
    return [key, *(draw(chart, size="third", group="steps", key=False) for chart in charts), plan_panel(run)]


def _framed(inside: Html | None) -> Html | None:
    return panel("", inside) if inside else None
