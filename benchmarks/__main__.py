"""``python -m benchmarks [NAME…]``: run the measurements that need no device, or those named."""

from __future__ import annotations

import argparse
import importlib
import pkgutil
import sys

import benchmarks

#: Need a device, a group of machines or hours; run by name.
BY_NAME_ONLY: frozenset[str] = frozenset(
    {
        "false_alarms",
        "indexer",
        "nvidia_dsa",
        "nvidia_indexer",
        "nvidia_one_plan",
        "nvidia_real_text",
        "nvidia_sparse_mla",
        "nvidia_stores",
        "sparse_mla",
        "suite_time",
        "tpu_chunks",
        "tpu_conformance",
        "tpu_schedule",
        "tpu_layout",
        "tpu_torch_xla",
    }
)


def names() -> list[str]:
    """Return the measurements, in order of name."""
    modules = (m.name for m in pkgutil.iter_modules(benchmarks.__path__) if not m.ispkg)
    return sorted(n for n in modules if not n.startswith("_") and n != "record")


def main() -> None:
    """Run the chosen measurements."""
    known = names()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of: {', '.join(known)}")
    chosen = parser.parse_args().names or [n for n in known if n not in BY_NAME_ONLY]
    for name in chosen:
        if name not in known:
            sys.exit(f"no measurement {name!r}; known: {', '.join(known)}")
    for name in chosen:
        print(f"== {name}")
        importlib.import_module(f"benchmarks.{name}").main()


if __name__ == "__main__":
    main()
