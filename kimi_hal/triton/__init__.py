"""Portable Triton kernels that any backend may adopt, one file an operator family.

No vendor-only feature is used; sources work from Triton 3.6 on. Where Triton's CPU interpreter is switched on
(``KIMI_HAL_EXECUTION=interpreted`` or Triton's own ``TRITON_INTERPRET=1``, read when a kernel is decorated), its
arithmetic is repaired first.
"""

from __future__ import annotations

import os
from importlib.util import find_spec

if os.environ.get("KIMI_HAL_EXECUTION") == "interpreted" and find_spec("triton"):
    os.environ.setdefault("TRITON_INTERPRET", "1")

if os.environ.get("TRITON_INTERPRET") == "1":
    from kimi_hal.triton.interpreter import repair

    repair()
