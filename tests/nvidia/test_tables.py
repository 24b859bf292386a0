"""The tables of measurements that the NVIDIA package ships: whole, about what exists, used on their device alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from kimi_hal.dispatch import matching, tuned_file, tuned_tables
from kimi_hal.dispatch.contract import Probe
from kimi_hal.dispatch.shapes import FIELDS
from kimi_hal.dispatch.sources import package_files
from kimi_hal.ops.operator import get
from kimi_hal.ops.spec import Limits
from kimi_hal.presets import Deployment
from kimi_hal.tuning.tune import NEAR
from kimi_hal_nvidia.claim_terms import COMPILED
from kimi_hal_nvidia.implementations import IMPLEMENTATIONS
from kimi_hal_nvidia.plugin import kimi_hal_backend

BACKEND = kimi_hal_backend()
FILES = package_files(BACKEND, BACKEND.tables)
H200 = Probe(present=True, arch="sm_90", devices=("NVIDIA H200 at 00000000:00:06.0",))
CLAIMED = {(i.operator, i.name): i for i in IMPLEMENTATIONS}


def test_there_is_a_table_for_the_device_that_was_measured() -> None:
    assert [path.name for path in FILES] == ["h200.json"]
    found = tuned_tables.tables(BACKEND, H200, None)
    assert found.unused == {}
    assert found.used is not None
    assert (found.used.label, found.used.device) == ("kimi_hal_nvidia/tables/h200.json", "NVIDIA H200")


def test_on_another_device_it_is_not_used_and_says_why() -> None:
    other = Probe(present=True, arch="sm_90", devices=("NVIDIA H100 80GB HBM3 at 00000000:00:06.0",))
    found = tuned_tables.tables(BACKEND, other, None)
    assert found.used is None
    why = "it was measured on NVIDIA H200 (sm_90), here is NVIDIA H100 80GB HBM3 (sm_90)"
    assert found.unused == {"kimi_hal_nvidia/tables/h200.json": why}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_line_ranks_what_exists_by_time(path: Path) -> None:
    seen = set()
    for line in tuned_file.read(path, path.name).lines:
        assert tuple(line.spec) == FIELDS[line.operator]
        key = (line.operator, str(line.spec), line.shape)
        assert key not in seen
        seen.add(key)
        names = [entry.implementation for entry in line.ranking]
        assert len(names) == len(set(names))
        for entry in line.ranking:
            claimed = CLAIMED[line.operator, entry.implementation]
            assert "native" in claimed.execution
            assert entry.us > 0
            assert claimed.preferences is not COMPILED  # the suite has not passed
            assert not entry.configuration or claimed.configurations
            assert all(c.properties.tie_rule == "contract" for c in claimed.capabilities)
        fastest = min(entry.us for entry in line.ranking)
        assert line.ranking[0].us <= NEAR * fastest


@pytest.mark.parametrize("operator", ["indexer_logits", "indexer_topk", "topk_select", "sparse_mla"])
@pytest.mark.parametrize("tp", [1, 8])
def test_the_model_s_own_decode_has_a_line(operator: str, tp: int) -> None:
    table = tuned_tables.tables(BACKEND, H200, None).used
    assert table is not None
    spec = Deployment(tp=tp).specs()[operator]
    for rows in (1, 4, 32, 256):
        found = table.find(operator, spec, Limits(max_rows=rows, max_reqs=rows))
        assert found is not None
        target = matching.Target("sm_90", {"nvidia-driver": "580.159", "triton": "3.6.0"})
        fit = [
            e
            for e in found[1].ranking
            for c in CLAIMED[operator, e.implementation].capabilities
            if not list(
                matching.refusals(get(operator), spec, Limits(max_rows=rows, max_reqs=rows), c, target)
            )
        ]
        assert fit
