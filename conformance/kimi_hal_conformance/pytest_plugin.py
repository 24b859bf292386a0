"""The suite as a pytest plugin: ``pytest --pyargs kimi_hal_conformance --kimi-backend NAME``.

Without that option it adds its options and nothing else: neither torch nor the suite is imported.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from kimi_hal_conformance.sessions import Session

#: Under which name pytest keeps the session of the suite.
NAME = "kimi-hal-session"
MISSING = "say which backend is to be tried: --kimi-backend NAME (an installed plugin, or reference)"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options, of the same names and meanings as those of ``kimi-hal conformance run``."""
    group = parser.getgroup("kimi-hal", "kimi-hal conformance")
    group.addoption("--kimi-backend", metavar="NAME", help="an installed backend, or reference")
    group.addoption(
        "--kimi-execution",
        metavar="HOW",
        default="native",
        help="native (default), portable or interpreted",
    )
    group.addoption(
        "--kimi-profile", metavar="NAME", default="", help="interp, quick (default), standard or full"
    )
    group.addoption("--kimi-case", metavar="ID", action="append", default=[], help="may be repeated")
    group.addoption(
        "--kimi-compile-only",
        action="store_true",
        help="compile its kernels for its targets, and run nothing",
    )
    group.addoption(
        "--kimi-target",
        metavar="NAME",
        action="append",
        default=[],
        help="with --kimi-compile-only: this target alone; may be repeated",
    )
    group.addoption("--kimi-implementation", metavar="NAME", default="", help="this one alone")


def pytest_configure(config: pytest.Config) -> None:
    """Start a session of the suite if a backend is named."""
    compiling = config.getoption("--kimi-compile-only")
    if config.getoption("--kimi-target") and not compiling:
        raise pytest.UsageError("--kimi-target goes with --kimi-compile-only")
    if not config.getoption("--kimi-backend"):
        return
    from kimi_hal_conformance.sessions import Session

    if compiling:
        from kimi_hal_conformance.compiling.sessions import CompileSession

        config.pluginmanager.register(CompileSession(config), NAME)
    else:
        config.pluginmanager.register(Session(config), NAME)


def session(config: pytest.Config) -> Session:
    """Return the running session.

    Raises:
        pytest.UsageError: no backend is named.
    """
    found: Session | None = config.pluginmanager.get_plugin(NAME)
    if found is None:
        raise pytest.UsageError(MISSING)
    return found
