"""What importing costs, as a ratio that a busy machine does not change; ``benchmarks/`` has the figures."""

from __future__ import annotations

import json
import subprocess
import sys

CODE = """
import json, time
times = []
for name in ("torch", "kimi_hal"):
    start = time.perf_counter()
    __import__(name)
    times.append(time.perf_counter() - start)
print(json.dumps(times))
"""


def test_importing_the_package_adds_at_most_a_tenth_to_importing_torch():
    done = subprocess.run([sys.executable, "-c", CODE], check=True, capture_output=True, text=True)
    torch_time, own_time = json.loads(done.stdout)
    assert own_time <= 0.1 * torch_time
