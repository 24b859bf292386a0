from __future__ import annotations

import subprocess
import sys

import pytest

from kimi_hal import parallel


@pytest.mark.parametrize("name", parallel.__all__)
def test_every_public_name_is_there(name: str) -> None:
    assert getattr(parallel, name).__name__ == name


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match=r"^module 'kimi_hal\.parallel' has no attribute 'Shard'$"):
        parallel.Shard  # noqa: B018


def test_importing_the_package_imports_no_torch() -> None:
    code = "import sys, kimi_hal.parallel, kimi_hal.parallel.ownership; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
