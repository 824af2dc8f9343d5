"""`naught doctor`: a report on this machine that can be pasted anywhere. Ends with 1 if something does not work."""

from __future__ import annotations

import argparse
import json

from naught import __version__
from naught.doctor import Finding, Verdict, examine

__all__ = ["run_doctor"]

_WIDTHS = (4, 19)  # of a verdict and of a topic


def run_doctor(options: argparse.Namespace) -> int:
    found: list[Finding] = []
    for finding in examine(quick=options.quick):
        found.append(finding)
        if not options.json:
            verdict, topic = (text.ljust(width) for text, width in zip((finding.verdict, finding.topic), _WIDTHS, strict=True))
            print(f"{verdict}  {topic}  {finding}", flush=True)
    bad = sum(finding.verdict is Verdict.BAD for finding in found)
    notes = sum(finding.verdict is Verdict.NOTE for finding in found)
    if options.json:
        checks = [
            {"topic": one.topic, "verdict": one.verdict, "said": one.said, "fix": one.fix, "facts": dict(one.facts)}
            for one in found
        ]
        print(
            json.dumps({"version": __version__, "quick": options.quick, "bad": bad, "notes": notes, "checks": checks}, indent=2)
        )
    else:
        print(f"{len(found)} checks: {bad or 'none'} bad, {notes or 'no'} note{'s' * (notes != 1)}")
    return 1 if bad else 0
