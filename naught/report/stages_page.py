"""Stages page: the same training under every placement, on one page: memory, time, losses, and why they differ."""

from __future__ import annotations

from collections.abc import Sequence

from naught.quantity import show_bytes, show_seconds
from naught.report import words
from naught.report.bars import Scale, Stack, stacks
from naught.report.charts import Chart, Drawn, Line, Trace, draw
from naught.report.comparing import say_groups
from naught.report.html import Html, breakable, element
from naught.report.page import Section, page, panel
from naught.report.stages_data import Stage, Stages, Trained

__all__ = ["stages_page"]

_KINDS = {"weights": "blue", "gradients": "vermilion", "states": "green"}
_LINES = ("grey", "sky", "blue", "orange", "green", "vermilion", "purple")
_BASE = "ddp"  # times are ratios to it


def stages_page(found: Stages) -> Html:
    losses = {stage.title: trained.losses for stage, trained in _trained(found) if trained.losses}
    sections = [
        Section("Memory", [_at_rest(found), _memory_table(found)], lead=f"Counted: {found.counts}." if found.counts else ""),
        Section("Time", [_time_bars(found), _time_table(found)]),
        Section("Losses", [_losses(found)], lead=say_groups(losses)),
    ]
    facts = [element("div", element("dt", name), element("dd", breakable(text))) for name, text in found.setting.items()]
    title = element(
        "div", element("h1", found.title), element("span", "one training, placed in every way", class_="progress"), class_="title"
    )
    return page(f"{found.title}: stages", element("header", title, element("dl", *facts, class_="facts")), sections)


def _trained(found: Stages) -> list[tuple[Stage, Trained]]:
    return [(stage, stage.trained) for stage in found.stages if stage.trained is not None]


def _at_rest(found: Stages) -> Html:
    rows = []
    for stage in found.stages:
        if stage.trained is None:
            rows.append(Stack(stage.title, {}, absent=stage.reason))
            continue
        held = {kind: stage.trained.held.get(kind, 0.0) for kind in dict.fromkeys([*_KINDS, *stage.trained.held])}
        values = (show_bytes(sum(held.values())), words.optional_bytes(stage.trained.peak_bytes))
        rows.append(Stack(stage.title, held, values, mark=stage.trained.peak_bytes, aside=stage.why))
    bars = stacks(rows, _KINDS, Scale(show_bytes, ("at rest", "peak"), mark="peak"))
    return panel("At rest after backward, and the peak", bars)


def _memory_table(found: Stages) -> Html:
    steps = list(dict.fromkeys(moment.step for _, trained in _trained(found) for moment in trained.memory))
    above = [
        element("th", ""),
        *(element("th", f"step {step:,}", colspan="3", scope="colgroup") for step in steps),
        element("th", ""),
    ]
    below = ["run", *(word for _ in steps for word in ("forward", "backward", "step")), "peak"]
    rows = [_memory_row(stage, steps) for stage in found.stages]
    head = element("thead", element("tr", *above), element("tr", *(element("th", word, scope="col") for word in below)))
    body = element("table", head, element("tbody", *rows), class_="numbers")
    return panel("Held after forward, backward and step", element("div", body, class_="scroll"))


def _memory_row(stage: Stage, steps: Sequence[int]) -> Html:
    if stage.trained is None:
        return _absent_row(stage, 3 * len(steps) + 1)
    moments = {moment.step: moment for moment in stage.trained.memory}
    held = [moments.get(step) for step in steps]
    cells = [
        words.optional_bytes(nbytes)
        for moment in held
        for nbytes in ((moment.forward, moment.backward, moment.after_step) if moment else (None, None, None))
    ]
    cells.append(words.optional_bytes(stage.trained.peak_bytes))
    return element("tr", element("th", stage.title, scope="row"), *(element("td", cell) for cell in cells))


def _absent_row(stage: Stage, columns: int) -> Html:
    return element(
        "tr",
        element("th", stage.title, scope="row"),
        element("td", stage.reason, colspan=str(columns), class_="reason"),
        class_="faint",
    )


def _time_bars(found: Stages) -> Html:
    rows = []
    for stage in found.stages:
        taken = stage.trained.seconds if stage.trained else None
        absent = "" if taken is not None else stage.reason
        rows.append(Stack(stage.title, {"time": taken or 0.0}, (words.seconds(taken),), absent=absent))
    iterations = f" of {found.iterations:,} iterations" if found.iterations else ""
    return panel(f"Time{iterations}", stacks(rows, {"time": "blue"}, Scale(show_seconds, ("",))), size="half")


def _time_table(found: Stages) -> Html:
    """Seconds, the ratio to the base, and what a step sends."""
    base_s = next((trained.seconds for stage, trained in _trained(found) if stage.name == _BASE), None)
    heads = ["run", "time", "a step", f"ratio to {_BASE}", "sent a step"]
    rows = []
    for stage in found.stages:
        if stage.trained is None:
            rows.append(_absent_row(stage, len(heads) - 1))
            continue
        taken = stage.trained.seconds
        cells = [
            words.seconds(taken),
            words.seconds(taken / found.iterations if taken is not None and found.iterations else None),
            f"{taken / base_s:.2f}" if taken and base_s else "-",
            words.optional_bytes(sum(stage.trained.sent.values()) if stage.trained.sent else None),
        ]
        rows.append(element("tr", element("th", stage.title, scope="row"), *(element("td", cell) for cell in cells)))
    head = element("thead", element("tr", *(element("th", word, scope="col") for word in heads)))
    body = element("table", head, element("tbody", *rows), class_="numbers")
    return panel("Time and traffic", element("div", body, class_="scroll"), size="half")


def _losses(found: Stages) -> Drawn | None:
    """Curves that lie on one another are told apart by their width: the first is the widest."""
    traces = []
    for at, (stage, trained) in enumerate(_trained(found)):
        line = Line(stage.title, _LINES[at % len(_LINES)], trained.losses, ("broad", "wide", "line", "dashed")[min(at, 3)])
        traces.append(Trace(range(1, len(trained.losses) + 1), [line]))
    traces = [trace for trace in traces if trace.steps]
    return draw(Chart("losses", "Training loss", "nats", traces)) if traces else None
