"""A picture of two steps with the optimizer on the host: what the GPU computes, what travels down and up, and the host's threads.

python benchmarks/timeline.py docs/offload-timeline.svg          # the 1.64B model of h200.py on a GPU, a tiny one on a CPU
python benchmarks/timeline.py --delay picture.svg                # with naught.delay_update_after
"""

from __future__ import annotations

import argparse
import json
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from gpt import GPT, fill
from torch.profiler import ProfilerActivity, profile

import naught
from naught import host_crew

WIDTH, LEFT, ROW, GAP = 1160, 150, 22, 7
COLOURS = {"forward": "#4c78a8", "backward": "#e45756", "step": "#b279a2", "compute": "#54a24b", "down": "#f58518"}
COLOURS |= {"up": "#72b7b2", "host": "#9d755d"}


class Span(NamedTuple):
    """Something that took from one moment to another, in seconds of one clock."""

    row: str
    colour: str
    began: float
    ended: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path)
    parser.add_argument("--stage", type=int, default=2, choices=(1, 2, 3))
    parser.add_argument("--delay", action="store_true")
    options = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    layers, width, heads, batch, seq, vocab = (48, 1600, 25, 8, 1024, 50304) if on_gpu else (4, 64, 4, 2, 64, 512)
    with torch.device("cuda" if on_gpu else "cpu"):
        model = fill(GPT(layers, width, heads, seq, vocab))
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": batch,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "betas": [0.9, 0.95], "weight_decay": 0.1}},
        "zero_optimization": {"stage": options.stage, "offload_optimizer": {"device": "cpu"}},
        "naught": {"delay_update_after": 1 if options.delay else None},
    }
    engine = naught.initialize(model=model, config=config)[0]
    spans: list[Span] = []

    def step() -> None:
        ids = torch.randint(0, vocab, (batch, seq), device=engine.device)
        with timed(spans, "script", "forward"):
            loss = engine(ids, ids)
        with timed(spans, "script", "backward"):
            engine.backward(loss)
        with timed(spans, "script", "step"):
            engine.step()

    for _ in range(5):
        step()
    with watched_threads(spans), profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as seen:
        spans.clear()
        for _ in range(3):
            step()
    spans += on_the_device(seen)
    first, second, third = (span.began for span in spans if span.colour == "forward")
    options.path.write_text(picture(spans, second, second + (third - second) * 2, title=f"stage {options.stage}"))
    print(f"{second - first:.3f} and {third - second:.3f} s a step, with the profiler at work; {options.path}")


@contextmanager
def timed(spans: list[Span], row: str, colour: str) -> Iterator[None]:
    began = time.time()
    yield
    spans.append(Span(row, colour, began, time.time()))


@contextmanager
def watched_threads(spans: list[Span]) -> Iterator[None]:
    """Note what each thread of the crew does."""
    rows: dict[int, str] = {}
    noted: set[Any] = set()
    before = host_crew._Queue.take

    def take(queue: host_crew._Queue) -> Any:
        taken = before(queue)
        if taken is None:
            return None
        job, piece = taken
        rows.setdefault(threading.get_ident(), f"host thread {len(rows) + 1}")
        if job not in noted:
            noted.add(job)
            job.do = partial(do_and_note, job.do)
        return job, piece

    def do_and_note(do: Callable[[int], None], piece: int) -> None:
        with timed(spans, rows[threading.get_ident()], "host"):
            do(piece)

    host_crew._Queue.take = take
    try:
        yield
    finally:
        host_crew._Queue.take = before


def on_the_device(seen: profile) -> Iterator[Span]:
    with tempfile.TemporaryDirectory() as folder:
        seen.export_chrome_trace(f"{folder}/trace.json")
        trace = json.loads(Path(f"{folder}/trace.json").read_text())
    base = trace.get("baseTimeNanoseconds", 0) / 1e9
    for event in trace["traceEvents"]:
        kind = event.get("cat")
        if kind not in ("kernel", "gpu_memcpy", "gpu_memset"):
            continue
        row, colour = "GPU computes", "compute"
        if "DtoH" in event["name"]:
            row, colour = "to the host", "down"
        elif "HtoD" in event["name"]:
            row, colour = "to the GPU", "up"
        began = base + event["ts"] / 1e6
        yield Span(row, colour, began, began + event["dur"] / 1e6)


def picture(spans: list[Span], first: float, last: float, *, title: str) -> str:
    """Rows from the script down to the host's threads; neighbours that nobody could tell apart are one."""
    spans = [span for span in spans if span.ended > first and span.began < last]
    names = ["script", "GPU computes", "to the host", "to the GPU"]
    names += sorted({span.row for span in spans} - set(names), key=lambda name: int(name.split()[-1]))
    scale = (WIDTH - LEFT) / (last - first)
    height = GAP + len(names) * (ROW + GAP) + 24
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH + 10} {height}" font-family="sans-serif" font-size="12">',
        f'<title>{title}, optimizer on the host: two steps</title><rect width="100%" height="100%" fill="#fff"/>',
    ]
    for at, name in enumerate(names):
        top = GAP + at * (ROW + GAP)
        parts.append(f'<text x="4" y="{top + 15}" fill="#333">{name}</text>')
        for colour, left, right in _merged(spans, name, first, scale):
            parts.append(
                f'<rect x="{LEFT + left:.1f}" y="{top}" width="{max(right - left, 0.3):.1f}" height="{ROW}" '
                f'fill="{COLOURS[colour]}"/>'
            )
            if name == "script" and right - left > 50:
                parts.append(f'<text x="{LEFT + left + 5:.1f}" y="{top + 15}" fill="#fff">{colour}</text>')
    for tenth in range(int((last - first) * 10) + 1):
        x = LEFT + tenth / 10 * scale
        parts.append(f'<path d="M{x:.1f} {GAP}V{height - 20}" stroke="#bbb" stroke-width="0.5"/>')
        parts.append(f'<text x="{x:.1f}" y="{height - 6}" fill="#333">{tenth / 10:.1f} s</text>')
    return "\n".join([*parts, "</svg>"])


def _merged(spans: list[Span], row: str, first: float, scale: float) -> Iterator[tuple[str, float, float]]:
    open_span: tuple[str, float, float] | None = None
    for span in sorted((span for span in spans if span.row == row), key=lambda span: span.began):
        left, right = max(0.0, (span.began - first) * scale), min(WIDTH - LEFT, (span.ended - first) * scale)
        if open_span and open_span[0] == span.colour and left - open_span[2] < 0.4 and row != "script":
            open_span = (span.colour, open_span[1], max(right, open_span[2]))
            continue
        if open_span:
            yield open_span
        open_span = (span.colour, left, right)
    if open_span:
        yield open_span


if __name__ == "__main__":
    main()
