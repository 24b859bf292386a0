"""The sources that a record of an implementation is of are those that its builder imports from this backend."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import kimi_hal_nvidia
from kimi_hal.dispatch.contract import Implementation
from kimi_hal_nvidia.implementations import IMPLEMENTATIONS

ROOT = Path(kimi_hal_nvidia.__file__).parent.parent
OWN = [i for i in IMPLEMENTATIONS if i.build.startswith("kimi_hal_nvidia.")]


def imported(path: str) -> Iterator[str]:
    """Yield the files of this backend that a file of it imports."""
    for node in ast.walk(ast.parse((ROOT / path).read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("kimi_hal_nvidia"):
            module = str(node.module).replace(".", "/")
            yield from (f"{module}/{name.name}.py" for name in node.names)
            yield f"{module}.py"


def reached(start: str) -> set[str]:
    """Return a file and all that it imports: not through claims, nor through what sizes say of other operators."""
    found: set[str] = set()
    todo = [start]
    while todo:
        path = todo.pop()
        if path in found or path.endswith("claims.py") or not (ROOT / path).is_file():
            continue
        found.add(path)
        todo += [] if path.endswith("/sizes.py") else imported(path)
    return found


@pytest.mark.parametrize("kernel", [pytest.param(i, id=f"{i.operator}-{i.name}") for i in OWN])
def test_whatever_a_builder_imports_is_among_its_sources(kernel: Implementation) -> None:
    named = (kernel.build, kernel.size, kernel.prepare, kernel.configurations)
    files = {where.partition(":")[0].replace(".", "/") + ".py" for where in named if where}
    assert set().union(*map(reached, files)) <= set(kernel.source)
