"""Documents that are made from the code are what the code would make now, and what they name exists."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from naught.cli import main
from naught.config import keys
from naught.config.recipe import Recipe

ROOT = Path(__file__).parent.parent


def test_the_page_of_keys_is_what_the_schema_says():
    made = subprocess.run(
        [sys.executable, ROOT / "tools" / "defaults_page.py"], capture_output=True, text=True, timeout=60, check=True
    ).stdout
    assert (ROOT / "docs" / "config.md").read_text(encoding="utf-8") == made, "run make docs"


def test_the_page_lists_every_key():
    page = (ROOT / "docs" / "config.md").read_text(encoding="utf-8")
    for entry in keys.entries():
        if not keys.variants(entry.info):
            assert f"| `{entry.path.rpartition('.')[2]}` |" in page


def test_links_and_the_file_tree_of_the_readme_point_to_what_exists():
    for path in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]:
        text = path.read_text(encoding="utf-8")
        for link in re.findall(r"\]\((?!http)([^)#]+)", text):
            assert (path.parent / link).exists(), f"{path.name} links to {link}"
    tree = (ROOT / "README.md").read_text(encoding="utf-8").split("## The tree")[1]
    folder = "naught"
    for line in tree.split("```")[1].splitlines():
        match = re.match(r"( *)([\w./]+)", line)
        if not match:
            continue
        depth, name = len(match[1]), match[2]
        parent = {0: "", 2: "naught/", 4: f"{folder}/"}[depth]
        folder = f"naught/{name.rstrip('/')}" if depth == 2 and name.endswith("/") else folder
        assert (ROOT / parent / name).exists(), f"the README names {parent}{name}"


@pytest.mark.parametrize(
    "folder", ["naught", "naught/trainer", "naught/saves", "naught/checkpoints", "naught/config", "benchmarks"]
)
def test_the_readmes_tree_names_every_file(folder):
    tree = (ROOT / "README.md").read_text(encoding="utf-8").split("## The tree")[1]
    files = {path.name for path in (ROOT / folder).glob("*.py") if not path.stem.startswith("__")}
    assert not files - set(re.findall(r"\w+\.py", tree))


def test_the_contributing_page_is_short():
    assert len((ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").splitlines()) < 60


def test_the_readmes_plan_is_what_the_command_prints(capsys):
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    shown = readme.split("$ naught plan ")[1].split("```")[0]
    arguments, *lines = shown.splitlines()
    assert main(["plan", *arguments.split()]) == 0
    printed = capsys.readouterr().out.splitlines()
    for line in lines:
        assert line == "..." or line in printed


@pytest.mark.timeout(300)
def test_the_planners_example_runs():
    shown = subprocess.run(
        [sys.executable, ROOT / "examples" / "plan_questions.py"], capture_output=True, text=True, timeout=240, check=True
    ).stdout
    assert "recommended: stage1-offload, likely" in shown  # 13B on a GPU of 32 GB
    assert "20" in shown
    assert "the configuration text has 4 problems" in shown


def test_the_readmes_script_runs_as_ranks_and_learns(tmp_path):
    text = (ROOT / "README.md").read_text(encoding="utf-8").split("## In a script of your own")[1]
    (tmp_path / "script.py").write_text(text.split("```python\n")[1].split("```")[0])
    ended = subprocess.run(
        [sys.executable, "-m", "naught", "launch", "--nproc", "2", str(tmp_path / "script.py")],
        env=os.environ | {"PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}", "DS_ACCELERATOR": "cpu"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert float(re.match(r"loss ([0-9.]+) ", ended.stdout)[1]) < 0.9, "it began at about 1"


def test_the_page_of_training_lists_every_key_of_a_recipe():
    page = (ROOT / "docs" / "training.md").read_text(encoding="utf-8")
    for entry in keys.entries(Recipe):
        if entry.path.partition(".")[0] in ("model", "data", "train") and "." in entry.path:
            assert f"| `{entry.path}` |" in page
