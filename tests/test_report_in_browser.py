"""The report in a real browser: every chart is drawn, in both schemes and at every width, and no text of a run is a script."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import Browser, Page
from made_runs import records, resume, run_json, step_record, write_run, write_stages_folder

from naught.report import write_report, write_scaling, write_stages
from naught.statements import STATEMENTS


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    running = Browser(tmp_path_factory.mktemp("browser") / "profile")
    yield running
    running.close()


HOSTILE = "</script><script>window.broken = 1</script><img src=x onerror='window.broken = 1'>\u2028&amp;"


def hostile(value: Any) -> Any:
    """Every text of a document, and every key that a run chooses, replaced by one that wants to be a script."""
    if isinstance(value, dict):
        free = {
            key for key in value if key in ("order-0 entropy", "zlib -9", "all-gather", "weights", "activations", "data.path")
        }
        return {
            f"{HOSTILE}{key}" if key in free else key: inner if key in ("kind", "started") else hostile(inner)
            for key, inner in value.items()
        }
    return HOSTILE if isinstance(value, str) else value


def make_pages(root: Path) -> dict[str, Path]:
    """A page of every sort of run."""
    half = records(140)
    for line in half[60:63]:
        line["loss"] = line["bpb"] = math.nan
    resumed = [*half, resume(100), *(step_record(step, random.Random(2)) for step in range(101, 231))]
    long = [step_record(step % 100 + 1, random.Random(step)) | {"step": step} for step in range(1, 9001)]
    scripted = write_run(
        root / "0006-<img src=x onerror=alert(1)>", hostile(records(60)), **hostile(run_json(status="failed", error="x"))
    )
    for name in ("config.json", "env.json"):
        (scripted / name).write_text(json.dumps(hostile(json.loads((scripted / name).read_text()))))
    nothing = write_run(root / "0007-nothing", [], status="running", ended=None, peak=None)
    folders = {
        "done": [write_run(root / "0001-demo", records())],
        "failed": [write_run(root / "0002-failed", resumed, status="failed", error="RankMismatch", plan=None, peak=None)],
        "one step": [write_run(root / "0003-one", records(1), status="running")],
        "long": [write_run(root / "0004-long", long)],
        "in nats": [write_run(root / "0005-nats", [line | {"bpb": None, "mfu": 0.41} for line in records(30)])],
        "hostile": [scripted],
        "nothing yet": [nothing],
    }
    folders |= {"two": [folders["done"][0], folders["failed"][0]], "one and nothing": [folders["done"][0], nothing]}
    pages = {name: root / f"{name}.html" for name in [*folders, "stages", "scaling"]}
    for name, runs in folders.items():
        write_report(runs, pages[name])
    write_stages(write_stages_folder(root / "0009-stages"), pages["stages"])
    write_scaling([make() for make in STATEMENTS.values()], pages["scaling"])
    return pages


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return make_pages(tmp_path_factory.mktemp("pages"))


# Of each chart: its name, what it says of itself, and how many pixels of its canvas have any colour.
DRAWN = """[...document.querySelectorAll(".plot")].map((place) => {
  const canvas = place.querySelector("canvas");
  const data = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
  let painted = 0;
  for (let at = 3; at < data.length; at += 4) painted += data[at] > 0;
  return [place.dataset.chart, place.dataset.drawn, painted / (canvas.width * canvas.height)];
})"""

# Pixels of a chart that have exactly a colour of the style sheet.
COLORED = """((chart, name) => {
  const probe = document.body.appendChild(document.createElement("i"));
  probe.style.color = `var(--${name})`;
  const wanted = getComputedStyle(probe).color.match(/[0-9]+/g).map(Number);
  probe.remove();
  const canvas = document.querySelector(`[data-chart="${chart}"] canvas`);
  const data = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
  let found = 0;
  const same = (at) => data[at + 3] === 255 && wanted.every((value, part) => data[at + part] === value);
  for (let at = 0; at < data.length; at += 4) found += same(at);
  return found;
})"""

MEMORY = ["memory-forward", "memory-backward", "memory-step"]
CHARTS = {
    "done": ["loss", "lr", "grad_norm", "tokens_s", *MEMORY],
    "failed": ["loss", "lr", "grad_norm", "tokens_s", *MEMORY],
    "one step": ["loss", "lr", "grad_norm", "tokens_s", *MEMORY],
    "long": ["loss", "lr", "grad_norm", "tokens_s", *MEMORY],
    "in nats": ["loss", "lr", "grad_norm", "tokens_s", *MEMORY],
    "hostile": ["loss", "lr", "grad_norm", "tokens_s", *MEMORY],
    "nothing yet": [],
    "two": ["loss", "tokens_s", "grad_norm"],
    "one and nothing": ["loss", "tokens_s", "grad_norm"],
    "stages": ["losses"],
    "scaling": [],  # drawn without a script
}


@pytest.mark.parametrize("name", CHARTS)
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_every_chart_is_drawn_without_a_complaint_and_without_the_network(browser, pages, name, dark):
    page = browser.open(pages[name], dark=dark)
    drawn = page.ask(DRAWN)
    assert [chart for chart, _, _ in drawn] == CHARTS[name]
    for chart, said, painted in drawn:
        assert int(said.removesuffix(" points")) > 0, chart
        assert painted > 0.01, chart
    assert page.complaints == []
    assert page.asked_for == [pages[name].as_uri()]


def test_a_complaint_of_the_console_is_heard(browser, tmp_path):
    (tmp_path / "page.html").write_text("<script>console.error('one'); nonsense()</script><img src='no.png'>")
    page = browser.open(tmp_path / "page.html")
    assert any("one" in said for said in page.complaints)
    assert any("nonsense is not defined" in said for said in page.complaints)
    assert any(address.endswith("no.png") for address in page.asked_for)


def test_a_chart_says_how_many_points_it_has(browser, pages):
    said = {chart: text for chart, text, _ in browser.open(pages["done"]).ask(DRAWN)}
    assert said["loss"] == "408 points"  # 400 of training, 8 of validation
    assert said["lr"] == "400 points"
    assert said["memory-backward"] == f"{6 * 400} points"  # five categories and the peak


def test_colours_follow_the_scheme_also_while_the_page_is_open(browser, pages):
    page = browser.open(pages["done"])
    light = page.ask(f"{COLORED}('loss', 'blue')")
    assert light > 100
    paper = page.ask("getComputedStyle(document.body).backgroundColor")
    page.choose(dark=True)
    page.settle()
    assert page.ask(f"{COLORED}('loss', 'blue')") > 100
    assert page.ask("getComputedStyle(document.body).backgroundColor") != paper
    assert page.ask(f"{COLORED}('memory-forward', 'grey')") > 1000


def test_stacked_areas_have_the_heights_of_their_bytes(browser, pages):
    page = browser.open(pages["done"])
    counted = {name: page.ask(f"{COLORED}('memory-forward', '{name}')") for name in ("grey", "green", "blue")}
    held = {"grey": 39_800_000, "green": 3_362_816, "blue": 1_681_408}
    # A line between two areas and the grid take a pixel or two of each.
    assert counted["grey"] / counted["green"] == pytest.approx(held["grey"] / held["green"], rel=0.35)
    assert counted["grey"] > 8 * counted["green"] > 8 * counted["blue"] > 0


def test_yardsticks_and_saves_are_drawn_where_there_are_any(browser, pages):
    page, bare = browser.open(pages["done"]), browser.open(pages["in nats"])
    dashes = page.ask(f"{COLORED}('loss', 'soft')")
    assert dashes > 3 * 500  # three lines over more than a thousand pixels, of which four in seven are drawn
    assert bare.ask(f"{COLORED}('loss', 'soft')") < 500  # the letters of the axes
    assert page.ask(f"{COLORED}('loss', 'ink')") > 4 * 20
    assert bare.ask(f"{COLORED}('loss', 'ink')") == 0


@pytest.mark.parametrize("width", [400, 500, 700, 860, 1000, 1280, 1600])
@pytest.mark.parametrize("name", ["done", "two", "stages", "scaling", "failed", "nothing yet", "hostile"])
def test_nothing_is_cut_off_at_any_width(browser, pages, name, width):
    page = browser.open(pages[name], width=width)
    assert page.ask("document.documentElement.scrollWidth") <= width
    too_wide = """[...document.querySelectorAll(".tile, .tile *, figcaption, .bars, .bars *, dd, h1, .plot, .uplot")]
      .filter((it) => it.scrollWidth > it.clientWidth + 1 && getComputedStyle(it).display !== "inline")
      .map((it) => it.outerHTML.slice(0, 80))"""
    assert page.ask(too_wide) == []


# Of each picture of curves: what sticks out of its figure, and which texts lie on one another.
CLASHES = """[...document.querySelectorAll(".curves")].map((plot) => {
  const frame = plot.closest("figure").getBoundingClientRect();
  const parts = [...plot.querySelectorAll("text, circle, polyline, path")].map((it) => [it, it.getBoundingClientRect()]);
  const out = parts.filter(([, at]) => at.left < frame.left || at.right > frame.right || at.bottom > frame.bottom);
  const texts = parts.filter(([it]) => it.tagName === "text");
  const meet = (a, b) => a.left < b.right - 2 && b.left < a.right - 2 && a.top < b.bottom - 3 && b.top < a.bottom - 3;
  const pairs = texts.flatMap(([one, a], at) => texts.slice(at + 1).filter(([, b]) => meet(a, b)).map(([other]) => [one, other]));
  const name = (it) => it.textContent || it.tagName;
  return [plot.dataset.curves, parts.length, out.map(([it]) => name(it)), pairs.map((pair) => pair.map(name).join(" on "))];
})"""


@pytest.mark.parametrize("width", [400, 860, 1280])
def test_no_part_of_a_curve_sticks_out_and_no_text_lies_on_another(browser, pages, width):
    found = browser.open(pages["scaling"], width=width).ask(CLASHES)
    assert [name.split("-")[0] for name, *_ in found] == ["zero", "zero", "offload", "offload", "infinity", "infinity"]
    for name, parts, out, clashes in found:
        assert parts > 20, name
        assert (out, clashes) == ([], []), name


def test_a_window_that_changes_its_width_draws_its_charts_again(browser, pages):
    page = browser.open(pages["done"], width=1280)
    page.resize(500)
    page.settle()
    widths = page.ask(
        "[...document.querySelectorAll('.plot')].map((it) => [it.clientWidth, it.querySelector('canvas').clientWidth])"
    )
    assert widths and all(place == canvas for place, canvas in widths)
    assert page.ask("document.documentElement.scrollWidth") <= 500


def test_nothing_moves_while_the_page_loads(browser, pages):
    shifts = """new Promise((done) => {
      let sum = 0;
      const add = (list) => { for (const entry of list.getEntries()) sum += entry.value; };
      new PerformanceObserver(add).observe({ type: "layout-shift", buffered: true });
      requestAnimationFrame(() => requestAnimationFrame(() => done(sum)));
    })"""
    assert browser.open(pages["done"]).ask(shifts) == 0


def inside_of(page: Page, chart: str) -> tuple[float, float, float, float]:
    """Where the inside of a chart is in the window, and how large; it is scrolled there."""
    left, top, width, height = page.ask(
        f"""(() => {{
          const place = document.querySelector('[data-chart="{chart}"] .u-over');
          place.scrollIntoView({{ block: "center" }});
          const at = place.getBoundingClientRect();
          return [at.x, at.y, at.width, at.height];
        }})()"""
    )
    return left, top, width, height


def point_into(page: Page, chart: str, share: float) -> str:
    """The text beside the cursor, at a share of a chart's width."""
    left, top, width, height = inside_of(page, chart)
    page.point_at(left + width * share, top + height / 2)
    said: str = page.ask(f"""document.querySelector('[data-chart="{chart}"] .tip').innerText""")
    return said


def test_the_cursor_tells_the_values_and_what_happened_there(browser, pages):
    page = browser.open(pages["done"])
    said = point_into(page, "loss", (200 - 1) / 399)
    losses = {line["step"]: line for line in records() if line["kind"] == "step"}
    assert "step 200" in said
    assert f"{losses[200]['bpb']:.3f} bits/byte, {losses[200]['loss']:.4f} nats" in said
    assert "saved global_step200 (10.1 MB in 110.0 ms)" in said
    said = point_into(page, "memory-backward", 0.5)
    assert "owned gradients" in said and "1.68 MB" in said
    said = point_into(page, "tokens_s", 0.5)
    assert "tokens/s" in said


def test_dragging_across_a_chart_zooms_all_of_them(browser, pages):
    page = browser.open(pages["done"])
    left, top, width, height = inside_of(page, "loss")
    page.drag((left + width * 0.25, top + height / 2), (left + width * 0.5, top + height / 2))
    for chart in ("loss", "lr", "memory-step"):
        first, last = (int(point_into(page, chart, share).split()[1]) for share in (0.01, 0.99))
        assert 99 <= first <= 105 and 195 <= last <= 202, chart


def test_no_text_of_a_run_becomes_a_script(browser, pages):
    page = browser.open(pages["hostile"])
    point_into(page, "loss", 0.5)
    assert page.ask("window.broken") is None
    assert page.ask("document.querySelectorAll('img').length") == 0
    assert page.ask("document.querySelector('h1').textContent") == "0006-<img src=x onerror=alert(1)>"
    assert page.ask("document.querySelector('.trouble pre').textContent") == HOSTILE
    assert page.complaints == []


def test_a_script_that_got_in_all_the_same_would_not_run(browser, pages, tmp_path):
    text = pages["done"].read_text().replace("<main>", "<main><script>window.broken = 1</script>")
    (tmp_path / "page.html").write_text(text)
    page = browser.open(tmp_path / "page.html")
    assert page.ask("window.broken") is None
    assert any("Content Security Policy" in said for said in page.complaints)


def test_paper_is_light_whatever_the_screen_is(browser, pages, tmp_path):
    page = browser.open(pages["done"], dark=True)
    screen = page.ask("getComputedStyle(document.documentElement).getPropertyValue('--panel')")
    page.ask("dispatchEvent(new Event('beforeprint'))")
    assert (
        page.ask("getComputedStyle(document.documentElement).getPropertyValue('--panel')").strip() == "#ffffff" != screen.strip()
    )
    page.settle()
    assert page.ask(f"{COLORED}('loss', 'blue')") > 100
    page.ask("dispatchEvent(new Event('afterprint'))")
    assert page.ask("getComputedStyle(document.documentElement).getPropertyValue('--panel')") == screen
    page.print(tmp_path / "page.pdf")
    assert (tmp_path / "page.pdf").read_bytes().startswith(b"%PDF")
