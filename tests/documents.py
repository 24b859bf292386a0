"""A page of documentation as a program: what its blocks show is run, and what it prints is compared.

* ``python`` blocks run one after another in one namespace. A ``text`` block right after one is what it prints.
* ``console`` blocks hold ``$ command`` lines, each followed by what it prints; ``cd`` stays in force.

In what is expected, ``…`` stands for any text.
"""

from __future__ import annotations

import contextlib
import io
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """One fenced block: its language, its text, the line of the page on which the text begins."""

    language: str
    text: str
    line: int


def blocks(page: Path) -> list[Block]:
    """Return the fenced blocks of a page, in order."""
    text = page.read_text(encoding="utf-8")
    return [Block(m[1], m[2], text[: m.start()].count("\n") + 2) for m in FENCE.finditer(text)]


def assert_printed(expected: str, got: str, where: str) -> None:
    """Compare what was printed with what the page shows; white space at line ends does not count."""
    pattern = re.escape(_stripped(expected)).replace("…", ".*")
    assert re.fullmatch(pattern, _stripped(got), re.DOTALL), (
        f"{where} shows\n{expected}\nbut it prints\n{got}"
    )


def _stripped(text: str) -> str:
    return "\n".join(line.rstrip() for line in text.strip("\n").splitlines())


def run_python(page: Path, namespace: dict[str, Any], sections: tuple[str, ...] = ()) -> None:
    """Run the page's python blocks and compare what they print; ``sections``: of those alone, by their headings."""
    found = [block for block in blocks(page) if not sections or _heading(page, block) in sections]
    for block, after in zip(found, [*found[1:], None], strict=True):
        if block.language != "python":
            continue
        printed = io.StringIO()
        code = compile("\n" * (block.line - 1) + block.text, str(page), "exec")
        with contextlib.redirect_stdout(printed):
            exec(code, namespace)
        if after is not None and after.language == "text":
            assert_printed(after.text, printed.getvalue(), f"{page.name}:{after.line}")


def _heading(page: Path, block: Block) -> str:
    """Return the heading of the section that a block stands in."""
    above = page.read_text(encoding="utf-8").splitlines()[: block.line - 1]
    return next((line.removeprefix("## ") for line in reversed(above) if line.startswith("## ")), "")


def commands(block: Block) -> Iterator[tuple[str, str]]:
    """Yield each command of a console block with what it prints."""
    for part in re.split(r"^\$ ", block.text, flags=re.MULTILINE)[1:]:
        command, _, expected = part.partition("\n")
        yield command, expected


def run_console(page: Path, folder: Path, environment: dict[str, str]) -> None:
    """Run the page's console blocks in a folder and compare what they print; a failing command may be shown."""
    for block in blocks(page):
        if block.language != "console":
            continue
        for command, expected in commands(block):
            if command.startswith("cd "):
                folder = (folder / command.removeprefix("cd ")).resolve()
                continue
            done = subprocess.run(
                ["bash", "-c", command],
                cwd=folder,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            assert_printed(expected, done.stdout, f"{page.name}: $ {command}")
