"""The layers hold, the exports are real, and asking for help waits for nobody."""

from __future__ import annotations

import ast
import importlib
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest

import naught
from naught.config import Effect
from naught.config.keys import entries, plain_path
from naught.config.recipe import Recipe

PACKAGE = Path(naught.__file__).parent

# A file imports from rows above it, or from the left in its own row.
LAYERS = [
    ["errors", "file_errors", "torn"],
    [
        "extras",
        "surroundings",
        "whole_files",
        "quantity",
        "run_folders",
        "cache",
        "measured",
        "text",
        "placement",
        "layout",
        "within",
        "extents",
        "units",
        "arguments",
        "running",
    ],
    ["steps", "uses", "expansion", "holding", "moving", "plan", "rooms"],
    ["formulas", "shapes", "presets", "hugging_face", "model_names", "machine"],
    ["job", "sizes", "working_set", "model_states", "traffic", "estimate", "lanes", "pacing", "papers"],
    ["advice", "pictures", "scaling", "statements", "showing", "pooling"],
    [
        "config.read",
        "config.refused",
        "config.types",
        "config.optimizers",
        "config.observation",
        "config.precisions",
        "config.ours",
        "config.schema",
        "config.old_names",
        "config.keys",
        "config.contradictions",
        "config.check",
        "config.recipe",
        "config.yaml_text",
        "config.resolving",
    ],
    ["config.batch", "config.placing", "config.disk", "config.schema_json", "config.starters", "config"],
    ["loss_scale", "rates", "accumulation", "seats"],
    [
        *(f"report.{name}" for name in ("documents", "records", "run_data", "series", "html", "charts", "bars", "words")),
        *(f"report.{name}" for name in ("figures", "memory", "comparing", "page", "run_charts", "facts", "tiles", "panels")),
        *(
            f"report.{name}"
            for name in ("one_run", "two_runs", "stages_data", "stages_page", "curves", "scaling_page", "writing")
        ),
        "report",
    ],
    [
        "checkpoints.disk",
        "checkpoints.shard",
        "checkpoints.manifest",
        "checkpoints.elements",
        "checkpoints.reading",
        "checkpoints.weights_file",
        "checkpoints.names",
        "checkpoints.store",
        "checkpoints.removing",
        "checkpoints.draft",
        "checkpoints",
    ],
    ["tiled", "vertical", "describe", "trace", "modules", "needs"],
    ["precision"],
    ["freed_pages", "cpu", "accelerator", "devices", "streams"],
    [
        "comm.together",
        "comm.ledger",
        "comm.board",
        "comm.summary",
        "comm.wires",
        "comm.among",
        "comm.lineup",
        "comm.dtensors",
        "comm.group",
        "comm.standing",
        "comm.mail",
        "comm.imagined",
        "comm.turns",
        "comm.rehearsed",
        "comm.listening",
        "comm.starting",
        "comm.agent",
        "comm",
        "flat",
        "present",
    ],
    [
        "block_norms",
        "rounding",
        "shelves",
        "spill_file",
        "spill",
        "staging",
        "ferry",
        "host_crew",
        "rota",
        "disk_side",
        "sum_rooms",
        "home",
        "stash",
        "disk_sum",
        "stored_part",
        "activation_rests",
        "activation_disk",
        "saved",
        "folded",
        "beside",
        "moments",
        "born",
    ],
    [
        "shortage",
        "stall",
        "husks",
        "versions",
        "guard",
        "weights",
        "delivery",
        "gradients",
        "rules",
        "states",
        "bringing",
        "segment",
        "unit",
        "amiss",
    ],
    [
        "measuring",
        "measuring.rounds",
        "measuring.ranks",
        "measuring.disk",
        "measuring.adam",
        "measuring.link",
        "measuring.step",
        "measuring.comm",
    ],
    ["claims", "dividing", "local_parts", "wholes", "hints", "membership", "foreign", "optimizer"],
    ["limits", "tiers"],
    [
        "program",
        "schedule",
        "in_graph",
        "loans",
        "hooks",
        "scout",
        "agreement",
        "tile_update",
        "host_update",
        "strays",
        "applying",
        "verdict",
        "update",
        "early",
        "filling",
        "untrainable",
        "build",
        "watch",
        "lending",
        "passes",
        "stepping",
    ],
    ["watchdog", "planned", "norms", "parking", "data", "costs", "flop_counts", "flops", "monitors", "step_log", "observing"],
    ["answers"],
    [
        "saves.inventory",
        "saves.numbers",
        "saves.own_states",
        "saves.places",
        "saves.plain",
        "saves.memory",
        "saves.snapshot",
        "saves.saving",
        "saves.background",
        "saves.contents",
        "saves.loading",
        "saves.importing",
        "saves.exporting",
        "saves.comparing",
        "saves.whole",
        "saves",
    ],
    ["inputs", "between", "engine", "request", "start", "fused_attention", "live_bytes", "unit_flops", "simulation"],
    ["fragments", "checkpointing", "zero", "utils", "ops.adam", "ops.adagrad", "ops.lion", "ops"],
    [
        *(f"doctor.{name}" for name in ("finding", "software", "hardware", "place", "network", "speeds", "numerics", "training")),
        "doctor",
    ],
    [
        *(f"trainer.{name}" for name in ("gpt", "texts", "tokens", "corpus", "windows", "models", "forecasting", "stopping")),
        *(f"trainer.{name}" for name in ("run_folder", "console", "telling", "introducing", "measures", "evaluating")),
        *(
            f"trainer.{name}"
            for name in ("training", "parting", "preparing", "checking", "seating", "failing", "rank", "simulating", "rehearsing")
        ),
        "trainer",
    ],
    ["stages.runs", "stages.worker", "stages.benching", "stages"],
    [
        "cli.arguments",
        "cli.files",
        "cli.config",
        "cli.machines",
        "cli.plan_file",
        "cli.plan",
        "cli.rehearse",
        "cli.simulate",
        "cli.ckpt",
        "cli.report",
        "cli.launch",
        "cli.train",
        "cli.stages",
        "cli.bench",
        "cli.doctor",
        "cli",
        "__main__",
    ],
]
ORDER = [name for row in LAYERS for name in row]
TORCH_ALLOWED = {
    *(
        "describe",
        "vertical",
        "tiled",
        "trace",
        "modules",
        "precision",
        "husks",
        "guard",
        "filling",
        "stepping",
        "devices",
        "comm.wires",
        "simulation",
        "fused_attention",
        "unit_flops",
        "live_bytes",
        "comm.among",
        "comm.group",
        "comm.standing",
        "comm.imagined",
        "comm.rehearsed",
        "flat",
        "weights",
        "gradients",
        "rules",
        "states",
        "moments",
        "spill",
        "rota",
        "present",
        "tile_update",
        "dividing",
        "local_parts",
        "wholes",
        "comm.lineup",
        "comm.dtensors",
        "born",
        "bringing",
        "segment",
        "block_norms",
        "rounding",
        "limits",
        "tiers",
        "shelves",
        "staging",
        "ferry",
        "host_crew",
        "stash",
        "sum_rooms",
        "activation_rests",
        "activation_disk",
        "saved",
        "inputs",
        "checkpointing",
        "comm.among",
        "stored_part",
        "delivery",
        "disk_side",
        "disk_sum",
        "home",
        "folded",
        "beside",
        "streams",
    ),
    *(
        "schedule",
        "in_graph",
        "loans",
        "hooks",
        "scout",
        "agreement",
        "untrainable",
        "build",
        "host_update",
        "strays",
        "applying",
        "amiss",
        "verdict",
        "early",
        "update",
        "watch",
        "passes",
        "engine",
    ),
    *("freed_pages", "cpu", "accelerator", "comm", "comm.starting", "claims", "hints", "membership", "foreign"),
    *("optimizer", "norms", "versions"),
    *(
        "between",
        "lending",
        "needs",
        "parking",
        "data",
        "costs",
        "flops",
        "flop_counts",
        "monitors",
        "observing",
        "answers",
        "start",
        "request",
        "fragments",
        "zero",
    ),
    *(
        f"saves.{name}"
        for name in (
            "inventory",
            "numbers",
            "own_states",
            "snapshot",
            "saving",
            "background",
            "plain",
            "memory",
            "places",
            "loading",
            "importing",
            "contents",
            "exporting",
            "comparing",
            "whole",
        )
    ),
    *("comm.mail", "comm.board", "comm.listening", "comm.agent", "ops.adam", "ops.adagrad", "ops.lion"),
    *(f"trainer.{name}" for name in ("gpt", "windows", "models", "forecasting", "introducing", "evaluating", "training", "rank")),
    *("trainer.simulating", "trainer.rehearsing"),
    *("stages.worker", "stages.benching"),
    *(f"measuring.{name}" for name in ("rounds", "adam", "link", "step", "comm")),
    *(f"doctor.{name}" for name in ("software", "hardware", "training")),
}


def modules() -> list[str]:
    return [info.name.removeprefix("naught.") for info in pkgutil.walk_packages([str(PACKAGE)], "naught.")]


def path_of(name: str) -> Path:
    path = PACKAGE / Path(*name.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def imported(name: str) -> set[str]:
    """Modules of ours that a file imports, at its top or inside a function."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path_of(name).read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {full for full in inner if full.removeprefix("naught.") in ORDER} or {str(node.module)}
    return found


def test_every_module_has_its_layer():
    assert sorted(modules()) == sorted(ORDER)


@pytest.mark.parametrize("name", ORDER)
def test_imports_go_up_the_layers_only(name):
    allowed = set(ORDER[: ORDER.index(name)])
    ours = {full.removeprefix("naught.") for full in imported(name) if full.startswith("naught.")}
    assert ours <= allowed, f"{name} imports {sorted(ours - allowed)} from below"


@pytest.mark.parametrize("name", [name for name in ORDER if name not in TORCH_ALLOWED])
def test_only_the_modules_for_modules_import_torch(name):
    assert not any(full.split(".")[0] == "torch" for full in imported(name))


@pytest.mark.parametrize("name", ORDER)
def test_only_comm_calls_torch_distributed_and_only_hooks_touch_autograds_hooks(name):
    text = path_of(name).read_text(encoding="utf-8")
    assert name.startswith("comm") or "torch.distributed" not in text
    assert name in ("devices", "streams") or "torch.cuda" not in text
    assert name == "hooks" or not re.search(r"register_\w*hook", text)


@pytest.mark.parametrize("name", ORDER)
def test_every_export_exists_and_every_public_name_is_exported(name):
    if name == "__main__":
        return
    module = importlib.import_module(f"naught.{name}")
    exported = set(module.__all__)
    assert exported <= set(dir(module))
    tree = ast.parse(path_of(name).read_text(encoding="utf-8"))
    public = {
        node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_")
    }
    # Blocks of the configuration are reached through Config.
    assert name in ("config.schema", "config.optimizers", "config.recipe") or public <= exported


SCHEMA = ("config.schema", "config.ours", "config.precisions", "config.optimizers", "config.observation", "config.recipe")


def test_every_key_that_is_said_to_be_honoured_is_read_somewhere():
    """As an attribute or, where a block is handed on, as a name; not only where it is checked."""
    words = {
        word
        for name in ORDER
        if name not in (*SCHEMA, "config.contradictions", "config.refused", "config.old_names", "config.starters")
        for node in ast.walk(ast.parse(path_of(name).read_text(encoding="utf-8")))
        for word in (getattr(node, "attr", None), getattr(node, "arg", None), getattr(node, "value", None))
        if isinstance(word, str)
    }
    honoured = {plain_path(entry.path) for entry in entries(Recipe) if entry.key.effect is Effect.HONOURED}
    assert {path for path in honoured if path.rpartition(".")[2] not in words} == set()


def test_every_name_of_the_package_can_be_had():
    for name in naught.__all__:
        assert getattr(naught, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        naught.nonsense  # noqa: B018


def test_every_file_says_what_it_is_for():
    for name in ORDER:
        assert ast.get_docstring(ast.parse(path_of(name).read_text(encoding="utf-8"))), name


@pytest.mark.parametrize(
    ("arguments", "absent"),
    [
        (["--help"], {"torch", "pydantic", "numpy"}),
        (["plan", "--help"], {"torch", "pydantic", "numpy"}),
        (["plan", "7.5B", "--ranks", "64", "--gpu", "32GB"], {"torch", "pydantic", "numpy"}),
        (["plan", "--paper", "zero-table1"], {"torch", "pydantic", "numpy"}),
        (["plan", "--paper", "scaling"], {"torch", "pydantic", "numpy"}),
        (["config", "init", "stage2"], {"torch", "numpy"}),
        (["ckpt", "--help"], {"torch", "pydantic", "numpy"}),
        (["ckpt", "info", "."], {"torch", "numpy"}),
        *(([name, "--help"], {"torch", "pydantic", "numpy"}) for name in ("train", "bench", "report", "launch", "doctor")),
    ],
)
def test_quick_questions_import_nothing_slow(arguments, absent):
    code = (
        "import sys\nfrom naught.cli import main\n"
        "try:\n    main(sys.argv[1:])\nexcept SystemExit:\n    pass\n"
        "print('\\nLOADED', *sorted(sys.modules), file=sys.stderr)"
    )
    run = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=60, check=True)
    loaded = set(run.stderr.rpartition("LOADED")[2].split())
    assert "naught" in loaded
    assert not absent & loaded


def test_nothing_speaks_of_where_it_was_made():
    root = PACKAGE.parent
    if not (root / ".git").exists():
        pytest.skip("not a checkout")
    listed = subprocess.run(["git", "ls-files"], cwd=root, capture_output=True, text=True, timeout=60, check=True).stdout
    for name in listed.split():
        text = (root / name).read_text(encoding="utf-8", errors="replace")
        for word in ("/wo" + "rk/", "/ro" + "ot/", "pypi" + ".org"):
            assert word not in text, f"{name} names {word}"
