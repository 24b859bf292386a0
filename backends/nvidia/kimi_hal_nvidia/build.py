"""``python -m kimi_hal_nvidia.build [SOURCE…]``: compile the CUDA sources to the cubins that the package keeps.

Sources that are named, without ``.cu``, are compiled alone. Needs nvcc 13.0 on the path, as the kept ones were made
with; ``NVCC`` names another one. The same compiler gives the same bytes.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from kimi_hal_nvidia import cubins

FLAGS = ("-std=c++17", "-O3", "-cubin")


def compiler() -> str:
    """Return the path of nvcc, or leave with a sentence."""
    path = shutil.which(os.environ.get("NVCC", "nvcc"))
    if path is None:
        sys.exit("nvcc is not on the path: install the CUDA toolkit 13.0, or name its nvcc by NVCC=…")
    return path


def version(nvcc: str) -> str:
    """Return the version of a compiler."""
    said = subprocess.run([nvcc, "--version"], check=True, capture_output=True, text=True).stdout
    found = re.search(r"V(\d+\.\d+\.\d+)", said)
    return found[1] if found else "unknown"


def compile_one(nvcc: str, stem: str, target: str, out: Path) -> None:
    """Compile one source for one target, such as ``sm_90a``."""
    code = f"-gencode=arch={target.replace('sm', 'compute')},code={target}"
    subprocess.run([nvcc, *FLAGS, code, f"{stem}.cu", "-o", str(out)], check=True, cwd=cubins.SOURCES)


def main() -> None:
    """Compile the sources that are named, else everything, and write the manifest."""
    named = sys.argv[1:]
    if unknown := [stem for stem in named if stem not in cubins.STEMS]:
        sys.exit(f"there is no {', '.join(unknown)}: the sources are {', '.join(cubins.STEMS)}")
    nvcc = compiler()
    made = cubins.manifest() if named else {}
    cubins.KEPT.mkdir(exist_ok=True)
    for stem, arch in cubins.kept():
        if named and stem not in named:
            continue
        path = cubins.KEPT / cubins.file_name(stem, arch)
        compile_one(nvcc, stem, cubins.TARGETS[arch], path)
        made[path.name] = {
            "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
            "source": cubins.source_hash(stem),
            "nvcc": version(nvcc),
        }
        print(f"{path.name}: {path.stat().st_size} bytes")
    cubins.MANIFEST.write_text(json.dumps(made, indent=2) + "\n")


if __name__ == "__main__":
    main()
