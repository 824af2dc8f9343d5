"""Software: which versions are here, and whether they are those that were tested. Imports torch and nothing else of them."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

from naught import __version__
from naught.doctor.finding import Finding, Verdict

__all__ = ["EXTRAS", "NEEDED", "TESTED_TORCH", "extras", "naught_itself", "packages", "torch_itself"]

TESTED_TORCH = ((2, 10), (2, 14))  # from, and before
NEEDED = ("numpy", "safetensors", "pydantic")
EXTRAS = {
    "rich": ("rich",),
    "hf": ("transformers", "tokenizers", "accelerate"),
    "lightning": ("pytorch-lightning",),
    "track": ("tensorboard", "trackio", "wandb"),
    "peft": ("peft",),
    "yaml": ("pyyaml",),
}


def naught_itself() -> Sequence[Finding]:
    system = f"{platform.system()} {platform.release()} {platform.machine()}"
    libc = " ".join(platform.libc_ver()).strip()
    python = f"{platform.python_implementation()} {platform.python_version()}"
    facts = {"naught": __version__, "python": platform.python_version(), "system": system, "libc": libc}
    return [Finding("naught", f"{__version__} on {python}, {system}{f', {libc}' if libc else ''}", facts=facts)]


def torch_itself() -> Sequence[Finding]:
    first, last = TESTED_TORCH
    try:
        import torch

        from naught.devices import nccl_version
    except Exception as error:  # a broken one may raise anything
        fix = f"install it: pip install 'torch>={first[0]}.{first[1]},<{last[0]}.{last[1]}'"
        return [Finding("torch", f"it cannot be imported: {type(error).__name__}: {error}", Verdict.BAD, fix, {"torch": None})]
    nccl = nccl_version()
    found = str(torch.__version__)
    said = f"{found}, CUDA {torch.version.cuda or 'none'}, NCCL {nccl or 'none'}"
    facts = {"torch": found, "cuda": torch.version.cuda, "nccl": nccl}
    if first <= _release(found) < last:
        return [Finding("torch", said, facts=facts)]
    spoken = f"{first[0]}.{first[1]} to {last[0]}.{last[1] - 1}"
    return [Finding("torch", f"{said}: not a tested version", Verdict.NOTE, f"tested are {spoken}", facts)]


def _release(text: str) -> tuple[int, ...]:
    """The first two numbers of "2.13.0+cpu"."""
    numbers = text.split("+")[0].split(".")[:2]
    return tuple(int(number) for number in numbers if number.isdigit())


def packages() -> Sequence[Finding]:
    found = {name: _version(name) for name in NEEDED}
    missing = [name for name, number in found.items() if number is None]
    said = ", ".join(f"{name} {number or 'missing'}" for name, number in found.items())
    if missing:
        return [Finding("packages", said, Verdict.BAD, f"install them: pip install {' '.join(missing)}", found)]
    return [Finding("packages", said, facts=found)]


def extras() -> Sequence[Finding]:
    """None of them is needed, so none that is missing is a fault."""
    found = {name: _version(name) for names in EXTRAS.values() for name in names}
    here = ", ".join(f"{name} {number}" for name, number in found.items() if number is not None)
    absent = [extra for extra, names in EXTRAS.items() if any(found[name] is None for name in names)]
    rest = f"not all here: {', '.join(absent)}" if absent else "all are here"
    return [Finding("extras", f"{here or 'none'}; {rest}", facts=found)]


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
