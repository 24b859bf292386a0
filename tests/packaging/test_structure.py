"""The house's rules that a reader would not notice being broken: who imports whom, and whose names stand where."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from kimi_hal.ops import get
from kimi_hal.triton.capabilities import implementations

ROOT = Path(__file__).resolve().parents[2]
CORE = ROOT / "kimi_hal"
BACKENDS = sorted(p.name for p in (ROOT / "backends").iterdir() if p.is_dir())
#: Parts of the core that an extra or an adopted kernel brings in, and what those may import beside torch and pluggy.
EXTRAS = {
    "cli": {"click", "rich", "msgspec"},
    "step": {"rich", "safetensors"},
    "workload": {"safetensors"},
    "triton": {"triton", "numpy"},
    "checkpoint.py": {"safetensors"},
    "cache": {"nixl"},
}
#: A conformance suite is handed over to, never needed.
HANDED_OVER = {"kimi_hal_conformance"}


def sources(folder: Path) -> Iterator[Path]:
    yield from (p for p in sorted(folder.rglob("*.py")) if "templates" not in p.parts)


def imported(path: Path) -> set[str]:
    """Return the top-level packages that a file imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.partition(".")[0])
    return found - set(sys.stdlib_module_names)


@pytest.mark.parametrize("path", list(sources(CORE)), ids=lambda p: str(p.relative_to(CORE)))
def test_the_core_imports_torch_and_pluggy_alone(path: Path) -> None:
    allowed = {"torch", "pluggy", "kimi_hal"} | EXTRAS.get(path.relative_to(CORE).parts[0], set())
    if path.relative_to(CORE) == Path("cli/conformance.py"):
        allowed |= HANDED_OVER
    assert imported(path) <= allowed


@pytest.mark.parametrize("name", BACKENDS)
def test_a_backend_imports_no_other_backend_and_no_suite(name: str) -> None:
    others = {f"kimi_hal_{other}" for other in BACKENDS if other != name} | {"kimi_hal_conformance"}
    for path in sources(ROOT / "backends" / name):
        assert not imported(path) & others, path


def test_the_suite_imports_no_backend() -> None:
    for path in sources(ROOT / "conformance"):
        assert not imported(path) & {f"kimi_hal_{name}" for name in BACKENDS}, path


@pytest.mark.parametrize("path", list(sources(CORE)), ids=lambda p: str(p.relative_to(CORE)))
def test_no_code_of_the_core_names_a_backend(path: Path) -> None:
    """Strings and names, not prose: a docstring may say where a formula or a byte order comes from."""
    tree = ast.parse(path.read_text())
    prose = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
        and isinstance(node.body[0].value, ast.Constant)
    }
    words = [
        n.value
        for n in ast.walk(tree)
        if isinstance(n, ast.Constant) and isinstance(n.value, str) and id(n) not in prose
    ]
    words += [n.id for n in ast.walk(tree) if isinstance(n, ast.Name)]
    for word in words:
        assert word.lower() not in BACKENDS, f"{path}: {word!r}"
        assert not re.search(r"kimi_hal_(?:" + "|".join(BACKENDS) + r")\b", word), f"{path}: {word!r}"


def test_an_operator_family_has_one_file_name_everywhere() -> None:
    families = {"indexer", "topk_merge", "sparse_mla", "kda", "moe", "all_gather", "composites"}
    cases = ROOT / "conformance" / "kimi_hal_conformance" / "cases"
    for family in families:
        for folder in (CORE / "ops", CORE / "reference", cases):
            assert (folder / f"{family}.py").is_file(), folder / f"{family}.py"


def test_a_portable_kernel_is_built_in_its_family_s_file() -> None:
    for implementation in implementations(("any",)):
        family = get(implementation.operator).family
        assert implementation.build.startswith(f"kimi_hal.triton.{family}:"), implementation.build


def test_the_core_distribution_needs_torch_and_pluggy_alone() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["dependencies"] == ["torch>=2.9", "pluggy>=1.7,<2"]
    assert project["requires-python"] == ">=3.11"


@pytest.mark.parametrize("name", ["conformance", *(f"backends/{b}" for b in BACKENDS)])
def test_every_distribution_states_its_core(name: str) -> None:
    project = tomllib.loads((ROOT / name / "pyproject.toml").read_text())["project"]
    assert "kimi-hal>=0.1,<0.2" in project["dependencies"]
    assert project["version"] == "0.1.0"


@pytest.mark.parametrize("name", BACKENDS)
def test_a_backend_registers_through_the_entry_point_of_outside_vendors(name: str) -> None:
    project = tomllib.loads((ROOT / "backends" / name / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["kimi_hal"] == {name: f"kimi_hal_{name}.plugin"}
