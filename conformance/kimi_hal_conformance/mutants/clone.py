"""A private copy of the core in which one file is another. The real modules never see it.

A copy lives under a package name of its own. Its modules are compiled from the real files, with every import
of ``kimi_hal`` turned to the copy, so that a changed function is what its own siblings call while the oracle,
which imports ``kimi_hal``, calls the right one.
"""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

from kimi_hal_conformance.mutants.mutant import ROOT, Mutant

REAL = "kimi_hal"
#: What an operator's mutant copies. Specs and Operators stay the real ones, which plans are made of.
OPERATOR_PARTS = frozenset({"formats", "parallel", "reference"})


@dataclass(frozen=True)
class Clone:
    """One copy.

    Args:
        name: its package name.
        parts: subpackages and modules of the core that it copies; ``None``: all of them.
        mutant: what is changed in it; ``None``: nothing.
    """

    name: str
    parts: frozenset[str] | None = None
    mutant: Mutant | None = None

    def module(self, name: str) -> ModuleType:
        """Import a module of the copy by its name inside the package (``"reference.sparse_mla"``)."""
        FINDER.clones.setdefault(self.name, self)
        return importlib.import_module(f"{self.name}.{name}")

    def copies(self, name: str) -> bool:
        """Tell whether a dotted name of the core is inside this copy."""
        head, _, rest = name.partition(".")
        return head == REAL and (self.parts is None or rest.partition(".")[0] in self.parts)

    def inside(self, name: str) -> str:
        """Return the copy's name for a name of the core."""
        return self.name + name.removeprefix(REAL) if self.copies(name) else name


class Redirect(ast.NodeTransformer):
    """Turn imports of the core, and names of its modules in strings, to a copy."""

    def __init__(self, clone: Clone) -> None:
        self.clone = clone

    def visit_Import(self, node: ast.Import) -> ast.AST:
        """Rename ``import kimi_hal.x as y``."""
        for name in node.names:
            name.name = self.clone.inside(name.name)
        return node

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.AST | Sequence[ast.AST]:
        """Rename ``from kimi_hal.x import y``; of ``from kimi_hal import x, y`` only what is copied."""
        if node.module != REAL:
            node.module = self.clone.inside(node.module or "")
            return node
        copied = [n for n in node.names if self.clone.copies(f"{REAL}.{n.name}")]
        kept = [n for n in node.names if n not in copied]
        parts = ((self.clone.name, copied), (REAL, kept))
        return [ast.ImportFrom(module=m, names=names, level=0) for m, names in parts if names]

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        """Rename ``"kimi_hal.x:y"`` and the beginning of ``f"kimi_hal.x.{y}"``."""
        if isinstance(node.value, str) and node.value.startswith(f"{REAL}."):
            return ast.Constant(value=self.clone.inside(node.value))
        return node


class CloneLoader(Loader):
    """Compile one module of a copy from the core's own file."""

    def __init__(self, clone: Clone, path: Path) -> None:
        self.clone = clone
        self.path = path

    def create_module(self, spec: ModuleSpec) -> None:
        """Let the import system make the module."""

    def exec_module(self, module: ModuleType) -> None:
        """Run the module's text, changed if it is the mutant's."""
        mutant = self.clone.mutant
        changed = mutant is not None and self.path == ROOT / mutant.file
        text = mutant.source() if mutant is not None and changed else self.path.read_text(encoding="utf-8")
        tree = ast.fix_missing_locations(Redirect(self.clone).visit(ast.parse(text)))
        module.__file__ = str(self.path)
        exec(compile(tree, f"<{module.__name__}>", "exec"), module.__dict__)


class CloneFinder(MetaPathFinder):
    """Find the modules of copies."""

    def __init__(self) -> None:
        self.clones: dict[str, Clone] = {}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of a copied module; ``None`` for every other name."""
        root, _, rest = fullname.partition(".")
        clone = self.clones.get(root)
        if clone is None:
            return None
        if not rest and clone.parts is not None:
            spec = ModuleSpec(fullname, None, is_package=True)
            spec.submodule_search_locations = []
            return spec
        place = ROOT / rest.replace(".", "/") if rest else ROOT
        package = place.is_dir()
        file = place / "__init__.py" if package else place.with_suffix(".py")
        if not file.exists():
            return None
        return ModuleSpec(fullname, CloneLoader(clone, file), origin=str(file), is_package=package)


FINDER = CloneFinder()
sys.meta_path.insert(0, FINDER)
