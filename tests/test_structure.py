"""The layout as a test: who may import what, how long a file may be, what kernels are called, where tolerances live."""

import ast
import graphlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "tsattn"
MODULES = sorted(PACKAGE.rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))

# Room -> rooms of tsattn it may import. A room is a module of tsattn/ or a package in it.
ARROWS = {
    "selection": set(),
    "scratch": set(),
    "marks": set(),  # whoever runs a part of a step tells it; only the profiler listens
    "summaries": set(),
    "quantisation": set(),
    "config": {"summaries"},
    "checks_tensor": set(),
    "checks_statistics": {"checks_tensor", "summaries"},
    "checks": {"checks_statistics", "checks_tensor", "quantisation", "selection", "summaries"},
    "checks_step": {"checks_tensor"},
    "contents": {"selection"},
    "dispatch": {"marks", "scratch", "summaries"},
    "library": {"contents", "dispatch", "scratch", "selection"},
    "workspace": {"config", "dispatch", "scratch", "selection"},
    "certificate": {"selection", "summaries"},
    "cost": set(),
    "cost_kernels": {"cost"},
    "cost_attend": {"cost", "cost_kernels"},
    "cost_append": {"cost"},
    "cost_refine": {"cost", "cost_kernels"},
    "cost_plans": {"cost", "cost_attend", "cost_kernels", "cost_refine"},
    "reference": {"marks", "quantisation", "selection", "summaries"},
    "torch_path": {"marks", "quantisation", "selection", "summaries"},
    "tuning": set(),
    "kernels": {"marks", "quantisation", "scratch", "selection", "summaries", "tuning"},
    "ops": {"checks", "checks_step", "dispatch", "library", "marks", "selection", "summaries", "workspace"},
    "attention": {"checks", "dispatch", "library", "selection", "workspace"},
    "decode": {
        *("certificate", "checks", "checks_step", "config", "dispatch", "library", "selection", "summaries", "workspace"),
    },
    "reuse": {
        *("attention", "checks_tensor", "config", "contents", "decode", "dispatch", "ops", "selection", "summaries"),
        "workspace",
    },
    "flash": {
        *("checks", "checks_statistics", "checks_step", "checks_tensor", "config", "contents", "decode", "dispatch", "ops"),
        "summaries",
    },
    "pages": set(),
    "pool": {"checks", "checks_tensor", "quantisation", "summaries"},
    "cache_decode": {"attention", "config", "decode", "summaries", "workspace"},
    "cache": {
        *("cache_decode", "checks", "checks_statistics", "config", "dispatch", "ops", "pages", "pool", "quantisation"),
        *("selection", "summaries"),
    },
    "__init__": {
        "attention",
        "cache",
        "calibration",
        "config",
        "decode",
        "dispatch",
        "flash",
        "ops",
        "reuse",
        "selection",
        "workspace",
    },
    "testing": {"kernels", "quantisation", "reference", "scratch", "selection", "summaries", "tuning"},
    "policies": {"attention", "cache", "config", "cost", "decode", "ops", "selection", "summaries"},
    "integrations": {
        *("attention", "cache", "config", "decode", "dispatch", "library", "marks", "ops", "reuse", "selection"),
    },
    # What finds a configuration for a model: a function of the library that loads its tools when it is called.
    "calibration": {"config", "evaluation"},
    # The command that tunes launches the stages; tuning itself gets the launches as functions, so no kernel depends on it.
    "tune": {"kernels", "testing", "tuning"},
    "profiling": {"marks", "quantisation"},
    "evaluation": {"config", "integrations", "marks", "policies", "selection"},
    "demo": {"__init__", "cache", "config", "evaluation", "integrations", "library", "ops", "selection", "summaries"},
    "__main__": {"__init__", "demo", "evaluation", "tune"},
}
MAY_IMPORT_TRITON = {"kernels", "tuning", "testing"}  # testing: the ahead-of-time gate


def room_of(path: Path) -> str:
    """The room that a file belongs to."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return parts[0]


def imported_names(path: Path) -> set[str]:
    """Absolute names that a file imports, anywhere in it."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_follow_the_arrows(path):
    room = room_of(path)
    for name in imported_names(path):
        top, *rest = name.split(".")
        if top == "triton":
            assert room in MAY_IMPORT_TRITON, f"{room} imports triton"
        if top != "tsattn":
            continue
        known = bool(rest) and any((PACKAGE / name).exists() for name in (rest[0], f"{rest[0]}.py"))
        other = rest[0] if known else "__init__"
        assert other == room or other in ARROWS[room], f"{room} imports {other}"


def test_the_arrows_form_no_circle():
    order = list(graphlib.TopologicalSorter(ARROWS).static_order())  # raises where there is one
    assert all(order.index(other) < order.index(room) for room in ARROWS for other in ARROWS[room])


def test_every_room_is_on_the_map():
    assert {room_of(path) for path in MODULES} <= set(ARROWS)


@pytest.mark.parametrize("path", [*MODULES, *TESTS], ids=lambda p: str(p.relative_to(ROOT)))
def test_files_are_short(path):
    assert len(path.read_text().splitlines()) <= 400


METHODS = [path for path in (PACKAGE / "policies").glob("*.py") if path.stem not in ("__init__", "base", "kept_tokens")]


@pytest.mark.parametrize("path", METHODS, ids=lambda p: p.stem)
def test_a_policy_is_a_short_file(path):
    assert len(path.read_text().splitlines()) <= 120


def jit_functions(tree: ast.Module) -> set[str]:
    """Names of the functions of a module that triton.jit decorates."""
    return {
        node.name
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and any("triton.jit" in ast.unparse(d) for d in node.decorator_list)
    }


def launched_kernels() -> list[tuple[Path, str]]:
    """Jit functions of tsattn/kernels that are launched with [grid]."""
    found = []
    for path in (PACKAGE / "kernels").glob("*.py"):
        tree = ast.parse(path.read_text())
        calls = (node.func for node in ast.walk(tree) if isinstance(node, ast.Call))
        launched = {f.value.id for f in calls if isinstance(f, ast.Subscript) and isinstance(f.value, ast.Name)}
        found += [(path, name) for name in launched & jit_functions(tree)]
    return found


def test_launched_kernels_are_named_after_their_stage():
    kernels = launched_kernels()
    assert len(kernels) >= 8
    for path, name in kernels:
        assert re.fullmatch(r"_[a-z0-9_]+_kernel", name), f"{path.name}: {name}"


def test_no_tolerance_outside_the_judge():
    literal = re.compile(r"\b(atol|rtol|tol|abs|rel)\s*=\s*[0-9.]+|allclose\(|pytest\.approx|isclose\(")
    for path in [*MODULES, *TESTS]:
        if path.name in ("tolerance.py", "test_structure.py"):
            continue
        for number, line in enumerate(path.read_text().splitlines(), start=1):
            assert not literal.search(line), f"{path.relative_to(ROOT)}:{number}: {line.strip()}"


def test_nothing_is_left_unfinished():
    unfinished = re.compile(r"\b(TODO|FIXME|XXX)\b|NotImplementedError")
    for path in MODULES:
        for number, line in enumerate(path.read_text().splitlines(), start=1):
            assert not unfinished.search(line), f"{path.relative_to(ROOT)}:{number}: {line.strip()}"


def test_importing_tsattn_imports_no_optional_package():
    import subprocess
    import sys

    code = (
        "import sys, tsattn; print([m for m in ('triton.language', 'transformers', 'matplotlib', 'gguf') if m in sys.modules])"
    )
    seen = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT).stdout
    assert seen.strip() == "[]"
