"""Collected by ``pytest --pyargs kimi_hal_conformance``: a test for each case of each implementation."""

from __future__ import annotations

import pytest

from kimi_hal_conformance.pytest_plugin import session
from kimi_hal_conformance.sessions import SIZE, STATUS, TRIAL, Item, told
from kimi_hal_conformance.verdict import AGAINST, NOT_RUN, PASSED


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make the tests of the backend that the command line names."""
    items = session(metafunc.config).items()
    metafunc.parametrize("kimi_hal_item", items, ids=[item.id for item in items])


def test_case(kimi_hal_item: Item, request: pytest.FixtureRequest) -> None:
    """Run one case; what is left out or refused is skipped with its reason."""
    said = request.node.user_properties
    said += [(TRIAL, kimi_hal_item.trial), (SIZE, kimi_hal_item.size)]
    if kimi_hal_item.batch is None:
        said.append((STATUS, NOT_RUN))
        pytest.skip(kimi_hal_item.reason)
    verdict = session(request.config).verdict(kimi_hal_item)
    said.append((STATUS, verdict.status))
    if verdict.status in AGAINST:
        pytest.fail(told(verdict), pytrace=False)
    if verdict.status != PASSED:
        pytest.skip(f"{verdict.status}: {'; '.join(verdict.problems)}")
