"""How long the schedule is that libtpu makes of the KDA kernels for a TPU7x: instruction bundles, and what fills them.

Needs the environment of ``nox -s tpu_jax``. A bundle takes a cycle at least. A loop's body counts once: for decode,
verify and commit it is a row of 12 heads; a step of a prefill is one chunk of four heads. Nothing is run.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.record import keep

OPERATORS = ("kda_decode", "kda_verify", "kda_commit", "kda_prefill")
TARGET = "tpu7x"
COMPILE = """
import sys
from kimi_hal.dispatch.contract import Target
from kimi_hal_tpu.pallas import kda_compiling
for kernel in getattr(kda_compiling, sys.argv[1])(Target(sys.argv[2], sys.argv[2], code="")):
    kernel.compile()
"""


def schedule(operator: str) -> dict[str, int | dict[str, int]]:
    """Compile one operator's kernel; return its bundles, and per cent of each slot of them that is used."""
    with tempfile.TemporaryDirectory() as folder:
        flags = f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true"
        command = [sys.executable, "-c", COMPILE, operator, TARGET]
        subprocess.run(command, check=True, env=os.environ | {"LIBTPU_INIT_ARGS": flags}, capture_output=True)
        (found,) = Path(folder).glob("*-kda_*-final_hlo-static-per-bundle-utilization.txt")
        return read(found.read_text())


def read(text: str) -> dict[str, int | dict[str, int]]:
    """Read libtpu's table: names of slots, how many a bundle has of each, and a line a bundle."""
    head, _, table = text.partition("== UTILIZATION:")
    names, capacity = head.strip().splitlines()[1:]
    lines = [[int(used) for used in line.split()] for line in table.strip().splitlines()]
    slots = zip(
        (n.strip() for n in names.split(",")), capacity.split(), zip(*lines, strict=True), strict=True
    )
    busy = {name: round(100 * sum(used) / (int(count) * len(lines))) for name, count, used in slots}
    return {"bundles": len(lines), "used_per_cent": busy}


def main() -> None:
    """Compile every kernel and keep what its schedule holds."""
    figures = {}
    for operator in OPERATORS:
        figures[operator] = schedule(operator)
        print(operator, figures[operator])
    keep("tpu_schedule", figures)


if __name__ == "__main__":
    main()
