"""``python -m kimi_hal_conformance.workload``."""

from kimi_hal_conformance.workload.cli import main

if __name__ == "__main__":
    main()
