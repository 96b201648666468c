"""Imports point down only: floors, from the ground up. A new module is given its floor here."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import autospec

PACKAGE = Path(autospec.__file__).parent

FLOORS: tuple[tuple[str, ...], ...] = (
    ("user_cache",),
    ("kernel_cache",),
    ("errors", "records", "compiled", "octave", "arrays", "progress", "bench.feed", "bench.turns"),
    (
        "step.counts",
        "step.flaws",
        "acceptance.hazards",
        "profile.tuned",
        "cost.coefficients",
        "cost.shapes",
        "cost.pace",
    ),
    ("cost.regression", "allocation.choice", "allocation.gains"),
    ("allocation.depths", "allocation.cut"),
    (
        "acceptance",
        "cost",
        "workload",
        "profile.learned",
        "metrics",
        "journal.lines",
        "replay.trace",
        "prompts",
        "replay.arrivals",
        "replay.cost_file",
        "bench.contention",
        "json_file",
        "replay.latency",
    ),
    ("profile.json_form", "journal", "replay.recorded"),
    (
        "profile",
        "rails.guard",
        "rails.probe",
        "rails.speedup",
        "allocation",
        "bench.phases",
        "proposers.base",
        "proposers.index",
        "proposers.outcomes",
    ),
    ("policy", "proposers"),
    ("config", "step.rows", "expectation"),
    ("step.record", "limits"),
    ("step",),
    ("step.fused", "rails.probing", "troubles"),
    ("rails",),
    ("step.stepwise",),
    ("estimators", "outlook"),
    ("step.warmup", "profile.saving"),
    ("controller",),
    ("replay.engine",),
    ("replay",),
    ("replay.hindsight",),
    ("replay.fixed_arms",),
    ("engine", "proposers.checkpoint"),
    (
        "proposers.draft_model",
        "proposers.drawing",
        "proposers.eagle",
        "proposers.eagle_files",
        "proposers.eagle_head",
        "proposers.early_exit",
        "proposers.last_state",
        "proposers.heads",
        "proposers.lookahead",
        "proposers.medusa",
        "proposers.medusa_folder",
        "proposers.mlp_folder",
        "proposers.mlp_network",
        "proposers.mlp_speculator",
        "proposers.suffix_after",
    ),
    ("adapters",),
    ("bench.tap",),
    ("bench.serving",),
    ("bench.arms",),
    ("bench.live",),
    ("bench.summary", "report", "replay.tasks"),
    ("bench.machine", "replay.tables"),
    ("bench.comparison",),
    ("bench", "replay.report"),
    ("training",),
    ("bench.demo", "replay.recording", "serve", "check", "export"),
    ("tune",),
    ("cli",),
    ("__main__",),
)
FIRST_WITH_OPTIONAL_DEPENDENCIES = next(
    floor for floor, names in enumerate(FLOORS) if "engine" in names
)
OPTIONAL = {
    "accelerate",
    "fastapi",
    "gguf",
    "httpx2",
    "pynvml",
    "safetensors",
    "sglang",
    "skopt",
    "tensorrt_llm",
    "tokenizers",
    "torch",
    "transformers",
    "uvicorn",
    "vllm",
}
IN_A_FUNCTION = {"policy.trials": {"skopt"}}  # imported when the policy bayes first asks


def modules() -> Iterator[tuple[str, Path]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        yield ".".join(part for part in parts if part != "__init__"), path


def floor_of(name: str) -> int | None:
    while name:
        for floor, names in enumerate(FLOORS):
            if name in names:
                return floor
        name = name.rpartition(".")[0]
    return None


def imported(path: Path) -> Iterator[tuple[str, int]]:
    """Full names of what a file imports anywhere, with lines."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            assert node.module is not None
            if (PACKAGE.parent / node.module.replace(".", "/")).is_dir():
                for alias in node.names:
                    yield f"{node.module}.{alias.name}", node.lineno
            else:
                yield node.module, node.lineno


MODULES = [pytest.param(name, path, id=name) for name, path in modules() if name]


@pytest.mark.parametrize("name,path", MODULES)
def test_imports_point_down(name: str, path: Path) -> None:
    mine = floor_of(name)
    assert mine is not None, f"{name} has no floor: add it to FLOORS"
    for target, line in imported(path):
        if not target.startswith("autospec.") or target == "autospec.__version__":
            continue
        inner = target.removeprefix("autospec.")
        theirs = floor_of(inner)
        assert theirs is not None, f"{path}:{line}: imports {target}, which has no floor"
        same_package = inner.split(".")[0] == name.split(".")[0]
        assert theirs < mine or (theirs == mine and same_package), (
            f"{path}:{line}: {name} (floor {mine}) imports {target} (floor {theirs})"
        )


@pytest.mark.parametrize("name,path", MODULES)
def test_optional_dependencies_stay_up(name: str, path: Path) -> None:
    floor = floor_of(name)
    assert floor is not None
    if floor < FIRST_WITH_OPTIONAL_DEPENDENCIES:
        found = {target.split(".")[0] for target, _ in imported(path)} & OPTIONAL
        found -= IN_A_FUNCTION.get(name, set())
        assert not found, f"{path} imports {', '.join(sorted(found))}"


def test_no_import_cycles() -> None:
    names = {name for name, _ in modules()}
    edges: dict[str, set[str]] = {}
    for name, path in modules():
        if not name:
            continue
        targets = {target.removeprefix("autospec.") for target, _ in imported(path)}
        edges[name] = {
            each if each in names else each.rpartition(".")[0]
            for each in targets
            if each in names or each.rpartition(".")[0] in names
        } - {name, ""}
    done: set[str] = set()
    while edges.keys() - done:
        ready = {name for name in edges.keys() - done if edges[name] <= done}
        assert ready, f"import cycle among {sorted(edges.keys() - done)}"
        done |= ready


def loaded_after(statement: str) -> set[str]:
    code = (
        f"{statement}\nimport sys\nprint(*sorted({{name.split('.')[0] for name in sys.modules}}))"
    )
    finished = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    return set(finished.stdout.split())


def test_importing_autospec_is_cheap() -> None:
    heavy = {"torch", "transformers", "numba", "numpy", "pydantic", "yaml", "typer", "rich"}
    assert not loaded_after("import autospec") & heavy


def test_the_controller_needs_no_torch() -> None:
    loaded = loaded_after(
        "from autospec import Controller, load_settings; load_settings('default')"
    )
    assert not loaded & OPTIONAL


def test_the_command_line_is_quick_to_answer() -> None:
    heavy = {"torch", "transformers", "numba", "numpy", "pydantic", "yaml"}
    assert not loaded_after("import autospec.cli") & heavy


def test_the_package_runs_as_its_command() -> None:
    found = subprocess.run(
        [sys.executable, "-m", "autospec", "--version"], capture_output=True, text=True, check=True
    )
    assert found.stdout == f"autospec {autospec.__version__}\n"


def test_public_names_exist_and_are_the_same_everywhere() -> None:
    lazy = {name for names in autospec._MODULES.values() for name in names}
    assert lazy | {"__version__"} == set(autospec.__all__)
    for name in autospec.__all__:
        assert getattr(autospec, name) is not None
    assert dir(autospec) == sorted(autospec.__all__)


def test_unknown_names_are_attribute_errors() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Contoller'"):
        autospec.Contoller  # type: ignore[attr-defined]  # noqa: B018
