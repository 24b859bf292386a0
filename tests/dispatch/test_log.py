"""``KIMI_HAL_LOG``: a level that is asked for is seen, one that is not asked for is left alone."""

from __future__ import annotations

import logging

import pytest

from kimi_hal.log import configure, log


@pytest.fixture(autouse=True)
def restored():
    level = log.level
    yield
    log.setLevel(level)


def only(monkeypatch, *handlers):
    """Leave the root logger these handlers; pytest adds its own when a test begins."""
    monkeypatch.setattr(logging.getLogger(), "handlers", list(handlers))
    monkeypatch.setattr(log, "handlers", [])


def test_no_variable_leaves_the_logger_alone(monkeypatch):
    only(monkeypatch)
    before = log.level
    configure("")
    assert (log.level, log.handlers) == (before, [])


def test_a_process_without_logging_gets_to_see_the_level(monkeypatch, capsys):
    only(monkeypatch)
    configure("INFO")
    configure("INFO")
    log.info("sparse_mla: acme.fast")
    assert len(log.handlers) == 1
    assert capsys.readouterr().err == "INFO kimi_hal: sparse_mla: acme.fast\n"


def test_an_engine_with_logging_keeps_its_handlers(monkeypatch):
    only(monkeypatch, logging.NullHandler())
    configure("DEBUG")
    assert (log.level, log.handlers) == (logging.DEBUG, [])
