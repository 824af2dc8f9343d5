"""Finding: one line of the doctor's report. What a probe says, and what becomes of one that fails."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path

from naught.errors import NaughtError

__all__ = ["Fact", "Finding", "Probe", "Verdict", "discreet", "findings_of"]

Fact = str | int | float | bool | None | Sequence[str]
_LONGEST = 600
_REPORT = "report it together with these lines"
_HOMES = re.compile(r"(/home/|/Users/)[^/\s:'\"]+")


class Verdict(StrEnum):
    OK = "ok"
    NOTE = "note"  # works, but better with a change
    BAD = "bad"  # does not work


@dataclass(frozen=True)
class Finding:
    """What was looked at, how it is, and what to do about it. `facts` are the same as data."""

    topic: str
    said: str
    verdict: Verdict = Verdict.OK
    fix: str = ""
    facts: Mapping[str, Fact] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.said}. {self.fix[:1].upper()}{self.fix[1:]}" if self.fix else self.said


Probe = Callable[[], Sequence[Finding]]


def findings_of(topic: str, probe: Probe) -> list[Finding]:
    """What a probe finds. If it fails, that is the finding: a report must reach its end."""
    try:
        found = list(probe())
    except NaughtError as error:
        found = [Finding(topic, f"{error.what}{f' [{error.where}]' if error.where else ''}", Verdict.BAD, error.fix or _REPORT)]
    except Exception as error:
        said = f"this check has failed: {type(error).__name__}: {error}"
        found = [Finding(topic, said, Verdict.BAD, _REPORT)]
    return [_discreet(one) for one in found]


def _discreet(found: Finding) -> Finding:
    facts = {name: discreet(fact) if isinstance(fact, str) else fact for name, fact in found.facts.items()}
    return replace(found, said=discreet(found.said), fix=discreet(found.fix), facts=facts)


def discreet(text: str) -> str:
    """One line without the name of the user, as far as paths tell it."""
    with suppress(RuntimeError):  # there is no home
        home = str(Path.home())
        text = text.replace(home, "~") if len(home) > 1 else text
    line = " ".join(_HOMES.sub("~", text).split())
    return line if len(line) <= _LONGEST else f"{line[:_LONGEST]} ..."
